"""What the scheduler's half knows of each request, and what its keys are made of. No I/O."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.hashes import BlockHashes
from kvpool.keys import Namespace
from kvpool.transport import LookupResult

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["Names", "RequestState", "Requests"]


class Names:
    """The engine's namespace, for later: its seed is not known at first; the epoch, new with each reset; the scheme of
    its block hashes.
    """

    __slots__ = ("epoch", "namespace", "scheme")

    def __init__(self, namespace: Callable[[], Namespace], epoch: bytes, scheme: str) -> None:
        self.namespace = namespace
        self.epoch = epoch
        self.scheme = scheme

    def renew(self) -> None:
        """A new epoch: nothing that was stored before is found again."""
        self.epoch = os.urandom(16)


@dataclass(slots=True)
class RequestState:
    """What is known of one request in one generation; it goes when the request ends."""

    request: Request
    scheme: str
    bypass: bool  #: never looked up, loaded or saved
    stale: bool = False  #: computed, in part, before a reset: neither stored nor looked up again
    no_lookup: bool = False  #: a load failed or a lookup was late: computed by the engine in this generation
    waited: bool = False  #: for news of a rank whose store was away
    unasked: bool = False  #: such a rank made it a miss
    offered: int = 0  #: local tokens at the last positive match
    joined: BlockHashes | None = None  #: see hashes()

    # of its lookup
    ticket: int | None = None
    asked_local: int = 0  #: local tokens of the lookup in flight or answered
    answer: LookupResult | None = None
    answer_until: float = 0.0
    answer_used: bool = False

    # of its saves
    saving: bool = False  #: known to the save progress
    retry_at: float = 0.0  #: no save before that: the last one failed
    failures: int = 0

    @property
    def found(self) -> int:
        """Tokens found in the store, which need no saving; a failed load proves nothing of the kind."""
        return 0 if self.answer is None or self.no_lookup else self.answer.hit_length

    def hashes(self) -> BlockHashes:
        """The request's block hashes back to back.

        Joined once and extended as they grow: joining 72,256 of them (289,024 tokens by 4) takes 2 ms, and under
        preemption vLLM asks again in every step.
        """
        hashes, joined = self.request.block_hashes, self.joined
        known = 0 if joined is None else len(joined)
        # They are chained, so the last one tells for all: a streaming session drops its last token, and its hash.
        if joined is None or known > len(hashes) or (known and joined[known - 1] != hashes[known - 1]):
            joined = BlockHashes(b"".join(hashes), len(hashes[0]) if hashes else 0, scheme=self.scheme)
            self.joined = joined
        elif len(hashes) > known:
            joined.extend(hashes[known:])
        return joined


class Requests:
    """The states of the engine's requests, by their ids. An id that comes back is a new generation."""

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme
        self._states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def add(self, request: Request) -> RequestState:
        """A new state, whatever there was."""
        # A LoRA adapter is hashed by name and path, not by content, so such requests stay out of the pool.
        state = RequestState(request, self._scheme, bypass=request.lora_request is not None)
        self._states[request.request_id] = state
        return state

    def of(self, request: Request) -> RequestState | None:
        """The state of this very request; None if there is none, or its id stands for an earlier one."""
        state = self._states.get(request.request_id)
        return state if state is not None and state.request is request else None

    def savable(self, request_id: str) -> RequestState | None:
        """The state of a request whose blocks may be stored."""
        state = self._states.get(request_id)
        return None if state is None or state.bypass or state.stale else state

    def pop(self, request_id: str) -> RequestState | None:
        """Forget a request."""
        return self._states.pop(request_id, None)
