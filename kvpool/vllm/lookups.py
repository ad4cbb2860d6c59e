"""How much of a prompt the store has, asked without blocking: each request once, polled on the scheduler's thread."""

from __future__ import annotations

import logging
import time

from kvpool.config import Config
from kvpool.errors import LookupTimeout, TransportError
from kvpool.spec import CacheSpec
from kvpool.transport import LookupRequest, PolledLookupClient
from kvpool.trouble import Trouble, reason
from kvpool.vllm.requests import Names, RequestState
from kvpool.vllm.stats import ConnectorCounters

__all__ = ["Lookups"]

logger = logging.getLogger(__name__)


class Lookups:
    """Lookups in flight. ``client`` answers them from the process that holds the store."""

    def __init__(
        self, config: Config, spec: CacheSpec, names: Names, client: PolledLookupClient, counters: ConnectorCounters
    ) -> None:
        self._spec = spec
        self._names = names
        self._client = client
        self._counters = counters
        self._timeout_s = config.lookup_timeout_ms / 1000
        self._grace_s = self._grace_left = config.lookup_grace_ms / 1000
        self._min_tokens = max(1, config.min_load_tokens)
        self._tickets: dict[int, RequestState] = {}
        self._polled = False
        self._trouble = Trouble(logger, "kvpool: the process that holds the store", "such prompts are computed")

    def __len__(self) -> int:
        """How many are in flight."""
        return len(self._tickets)

    def new_step(self) -> None:
        """The engine's step has ended: the next one may wait and poll anew."""
        self._grace_left, self._polled = self._grace_s, False

    def match(self, state: RequestState, local_tokens: int) -> int | None:
        """Tokens that can be loaded beyond ``local_tokens``; None: not known yet, ask again in the next step."""
        if not self._polled:
            self._polled = True  # once a step is enough, however many requests wait
            self._poll(0.0)
        if state.ticket is None and not state.no_lookup:
            # An answer counts at least once, so that a short age cannot make a request ask for ever.
            fresh = state.answer is not None and (not state.answer_used or time.monotonic() < state.answer_until)
            if not fresh or state.asked_local > local_tokens:
                # Under preemption the local count shrinks step by step: the second time ask for everything, once.
                shrunk = state.answer is not None and state.asked_local > local_tokens
                state.answer = None
                self._ask(state, local_tokens, asked_local=0 if shrunk else local_tokens)
        if state.ticket is not None and self._grace_left > 0:
            start = time.monotonic()
            self._poll(self._grace_left, until=state)
            self._grace_left -= time.monotonic() - start
        if state.ticket is not None:
            return None
        hit = 0 if state.answer is None else state.answer.hit_length
        state.answer_used = True
        # The answer may be older than the request's last token; a hit never covers it.
        hit = min(hit, self._spec.align(state.request.num_tokens - 1))
        tokens = hit - local_tokens
        return tokens if tokens >= self._min_tokens else 0

    def drop(self, state: RequestState) -> None:
        """Nobody waits for this request's lookup any more."""
        if state.ticket is not None:
            self._client.cancel(state.ticket)
            self._tickets.pop(state.ticket, None)
            state.ticket = None

    def _ask(self, state: RequestState, local_tokens: int, *, asked_local: int) -> None:
        hashes, num_tokens = state.request.block_hashes, state.request.num_tokens
        if self._spec.align(min(len(hashes) * self._spec.hash_block_size, num_tokens - 1)) <= local_tokens:
            return
        namespace = self._names.namespace().digest
        request = LookupRequest(namespace, self._names.epoch, num_tokens, asked_local, state.hashes())
        state.asked_local = asked_local
        state.ticket = self._client.submit(request, timeout=self._timeout_s)
        self._tickets[state.ticket] = state

    def _poll(self, wait: float, until: RequestState | None = None) -> None:
        """Take in answers; with ``until``, wait up to ``wait`` seconds for that request's."""
        end = time.monotonic() + wait
        while self._tickets:
            for ticket, result in self._client.poll(wait=max(0.0, end - time.monotonic()) if until else 0.0):
                state = self._tickets.pop(ticket, None)
                if state is None:
                    continue
                state.ticket = None
                if isinstance(result, TransportError):
                    state.no_lookup = True
                    if isinstance(result, LookupTimeout):
                        self._counters.lookups_unanswered += 1
                    else:
                        self._counters.lookups_refused += 1
                    self._trouble.bad(time.monotonic(), "lookup", reason(result))
                elif result.epoch != self._names.epoch:
                    state.no_lookup = True
                    self._counters.lookups_of_another_epoch += 1
                else:
                    if not self._trouble.well:
                        self._trouble.good(time.monotonic(), "lookup")
                    state.answer, state.answer_used = result, False
                    state.answer_until = time.monotonic() + result.max_age
            if until is None or until.ticket is None or time.monotonic() >= end:
                return
