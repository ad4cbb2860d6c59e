"""A lookup channel whose server a test takes away and brings back while the engine runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import ClassVar, Literal, Self

import anyio
from pydantic import BaseModel, Field

from kvpool.registry import URL, create_transport
from kvpool.transport import (
    LookupClient,
    LookupHandler,
    LookupRequest,
    LookupResult,
    LookupTransport,
    PolledLookupClient,
)

#: up; gone: its socket is closed; silent: asks nobody and answers nothing; failing: each answer is an error;
#: boasting: says that as much as can be is stored; other-epoch: answers for another epoch
State = Literal["up", "gone", "silent", "failing", "boasting", "other-epoch"]
_POLL_S = 0.002


class _Options(BaseModel):
    channel: str = Field(description="the URL of the real transport")
    codec: str = Field(default="binary", description="a codec name")


class SwitchedTransport(LookupTransport):
    """``tests.vllm.switched:SwitchedTransport?channel=zmq%2Bipc://name``, in the test's own process."""

    state: ClassVar[State] = "up"

    def __init__(self, inner: LookupTransport) -> None:
        self._inner = inner

    @classmethod
    def from_url(cls, url: URL) -> Self:
        options = url.options(_Options)
        return cls(create_transport({"url": options.channel, "codec": options.codec}))

    @classmethod
    @contextmanager
    def switched(cls, state: State) -> Iterator[None]:
        SwitchedTransport.state = state
        try:
            yield
        finally:
            SwitchedTransport.state = "up"

    def serve(self, handler: LookupHandler, *, namespace: bytes | None = None) -> AbstractAsyncContextManager[None]:
        return self._serve(handler, namespace)

    @asynccontextmanager
    async def _serve(self, handler: LookupHandler, namespace: bytes | None) -> AsyncIterator[None]:
        async def answer(request: LookupRequest) -> LookupResult:
            state = SwitchedTransport.state
            if state == "silent":
                await anyio.sleep_forever()
            if state == "failing":
                raise RuntimeError("fails on purpose")
            if state == "boasting":
                # Whole hash blocks below the last token: the most that a server may claim.
                block = request.num_tokens // len(request.hashes)
                most = (request.num_tokens - 1) // block * block
                return LookupResult(most, (most,), request.epoch, 1.0)
            result = await handler(request)
            return replace(result, epoch=bytes(len(result.epoch) - 1) + b"?") if state == "other-epoch" else result

        async def keep() -> None:
            while True:
                if not _gone():
                    async with self._inner.serve(answer, namespace=namespace):
                        while not _gone():  # noqa: ASYNC110  # another thread switches
                            await anyio.sleep(_POLL_S)
                await anyio.sleep(_POLL_S)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keep)
            yield
            tasks.cancel_scope.cancel()

    def client(self) -> LookupClient:
        return self._inner.client()

    def polled_client(self) -> PolledLookupClient:
        return self._inner.polled_client()


def _gone() -> bool:
    return SwitchedTransport.state == "gone"
