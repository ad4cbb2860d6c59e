"""A store that fails on purpose, to prove that everything above it copes.

In a test: ``FaultyStore(inner, [Fault(kind="failed", op="get", keys="*/1.0/*")])``; ``store.faults`` may change at any
time. From outside, while an engine runs: ``kvpool.testing.faults:FaultyStore?store=file:///kv&script=/faults.json``,
where the script is a JSON list of faults, read again whenever it changes (replace it by a rename). It must be there
when the store is made, or a misspelt path would be a test that proves nothing; if it goes later, so do its faults.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Literal, Self

import anyio
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field

from kvpool._options import validate
from kvpool.errors import ConfigError, StoreError
from kvpool.memory import Buffers
from kvpool.registry import URL, create_store
from kvpool.store import (
    ABSENT,
    UNKNOWN,
    Finding,
    Presence,
    Results,
    Status,
    Store,
    SupportsDiagnosis,
    check_batch,
)

__all__ = ["Fault", "FaultyStore"]

Op = Literal["exists", "get", "put", "delete"]
#: Faults of single keys (the others of the batch are done as ever):
#: absent     nothing is there; a put says OK and stores nothing; on ``get`` alone: lost between lookup and load
#: failed, corrupt, timed_out, rejected    that status
#: flip       a get says OK and hands over a wrong byte, as a store without checksums may
#: hang       not done until the deadline, then TIMED_OUT
#: Faults of the whole call, if any of its keys matches:
#: raise      StoreError
#: delay      done ``seconds`` later
#: stuck      never returns, whatever the deadline; ends by cancellation only
#: deaf       like a blocking native call: for ``seconds`` it heeds neither deadline nor cancellation
Kind = Literal[
    "absent", "failed", "corrupt", "timed_out", "rejected", "flip", "hang", "raise", "delay", "stuck", "deaf"
]

_STATUS = {
    "absent": Status.ABSENT,
    "failed": Status.FAILED,
    "corrupt": Status.CORRUPT,
    "timed_out": Status.TIMED_OUT,
    "hang": Status.TIMED_OUT,
    "rejected": Status.REJECTED,
}


class Fault(BaseModel):
    """One rule; of several that match a key, the first counts."""

    kind: Kind
    op: Op | Literal["*"] = "*"
    keys: str = Field(default="*", description="a shell pattern that the whole key must match")
    seconds: float = Field(default=0.0, ge=0, description="seconds, for delay and deaf")
    times: int | None = Field(default=None, ge=0, description="calls that are still to fail; without it all")


class _Options(BaseModel):
    store: str = Field(description="the URL of the store to wrap")
    script: str = Field(default="", description="path of a JSON list of faults")


class FaultyStore(Store):
    """Passes everything on to ``inner``, but for what ``faults`` say. ``calls`` counts calls and keys by operation.

    Raises ConfigError for a ``script`` that is not there.
    """

    scheme: ClassVar[str] = "faulty"

    def __init__(self, inner: Store, faults: Iterable[Fault] = (), *, script: str | os.PathLike[str] = "") -> None:
        self.inner = inner
        self.capabilities = replace(inner.capabilities, scan=False)
        self.faults = list(faults)
        self.calls: Counter[str] = Counter()
        self._script = Path(script) if script else None
        self._version: tuple[int, ...] = ()
        if self._script is not None and not self._script.exists():
            raise ConfigError(f"faults script {script}: there is no such file; for no faults yet, write [] into it")

    @classmethod
    def from_url(cls, url: URL) -> Self:
        """``kvpool.testing.faults:FaultyStore?store=URL[&script=/path/to/faults.json]``."""
        options = url.options(_Options)
        return cls(create_store(options.store), script=options.script)

    async def __aenter__(self) -> Self:
        self._reload()
        await self.inner.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.inner.__aexit__(exc_type, exc, tb)

    async def exists(self, keys: Sequence[str], *, deadline: float = math.inf) -> Presence:
        presence = np.full(len(keys), UNKNOWN, np.uint8)
        faults = await self._before("exists", keys, deadline)
        healthy = _indices(faults, lambda f: f is None or f.kind not in _STATUS)
        presence[healthy] = await self.inner.exists(_pick(keys, healthy), deadline=deadline)
        presence[_indices(faults, lambda f: f is not None and f.kind == "absent")] = ABSENT
        await self._after(faults, deadline)
        return presence

    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
        check_batch(keys, into)

        async def get(index: npt.NDArray[np.intp]) -> Results:
            return await self.inner.get_into(_pick(keys, index), into.select(index), deadline=deadline)

        results, faults = await self._run("get", keys, get, deadline)
        for i in _indices(faults, lambda f: f is not None and f.kind == "flip"):
            if results.ok[i] and (views := into.views(i)):
                views[0][0] ^= 0x01
        return results

    async def put(self, keys: Sequence[str], source: Buffers, *, deadline: float = math.inf) -> Results:
        check_batch(keys, source)

        async def put(index: npt.NDArray[np.intp]) -> Results:
            return await self.inner.put(_pick(keys, index), source.select(index), deadline=deadline)

        results, faults = await self._run("put", keys, put, deadline)
        for i in _indices(faults, lambda f: f is not None and f.kind == "absent"):
            results.set(int(i), Status.OK, int(source.nbytes[i]))
        return results

    async def delete(self, keys: Sequence[str], *, deadline: float = math.inf) -> Results:
        async def delete(index: npt.NDArray[np.intp]) -> Results:
            return await self.inner.delete(_pick(keys, index), deadline=deadline)

        return (await self._run("delete", keys, delete, deadline))[0]

    async def diagnose(self) -> Sequence[Finding]:
        """How many faults there are, and what the wrapped store says of itself."""
        inner = await self.inner.diagnose() if isinstance(self.inner, SupportsDiagnosis) else ()
        n = len(self.faults)
        return [Finding("ok", f"faults on purpose: {n} rule{'s' * (n != 1)}"), *inner]

    async def _run(
        self,
        op: Op,
        keys: Sequence[str],
        call: Callable[[npt.NDArray[np.intp]], Awaitable[Results]],
        deadline: float,
    ) -> tuple[Results, list[Fault | None]]:
        faults = await self._before(op, keys, deadline)
        results = Results.empty(len(keys))
        healthy = _indices(faults, lambda f: f is None or f.kind not in _STATUS)
        inner = await call(healthy)
        results.status[healthy], results.nbytes[healthy] = inner.status, inner.nbytes
        results.errors.update({int(healthy[i]): error for i, error in inner.errors.items()})
        for i, fault in enumerate(faults):
            if fault is not None and fault.kind in _STATUS:
                error = StoreError(f"fault on purpose: {op} of {keys[i]}") if fault.kind == "failed" else None
                results.set(i, _STATUS[fault.kind], error=error)
        await self._after(faults, deadline)
        return results, faults

    async def _before(self, op: Op, keys: Sequence[str], deadline: float) -> list[Fault | None]:
        """The fault of each key, after those of the whole call have had their effect."""
        self._reload()
        self.calls[op] += 1
        self.calls[f"{op}_keys"] += len(keys)
        live = [f for f in self.faults if f.op in ("*", op) and f.times != 0]
        faults = [next((f for f in live if fnmatchcase(key, f.keys)), None) for key in keys]
        for fault in {id(f): f for f in faults if f is not None}.values():
            if fault.times is not None:
                fault.times -= 1
            if fault.kind == "raise":
                raise StoreError(f"fault on purpose: {op}")
            if fault.kind == "stuck":
                await anyio.sleep_forever()
            elif fault.kind == "deaf":
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(fault.seconds)
            elif fault.kind == "delay":
                await anyio.sleep_until(min(anyio.current_time() + fault.seconds, deadline))
        return faults

    async def _after(self, faults: Sequence[Fault | None], deadline: float) -> None:
        if any(f is not None and f.kind == "hang" for f in faults):
            await anyio.sleep_until(deadline)

    def _reload(self) -> None:
        if self._script is None:
            return
        try:
            found = self._script.stat()
            version: tuple[int, ...] = (found.st_ino, found.st_size, found.st_mtime_ns)
            if version == self._version:
                return
            rules = json.loads(self._script.read_text())
        except FileNotFoundError:
            version, rules = (), []
        except ValueError as error:
            raise ConfigError(f"{self._script}: not JSON: {error}") from error
        if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
            raise ConfigError(f"{self._script}: must be a JSON list of faults")
        self.faults = [validate(Fault, rule, lambda _: f"{self._script}: {rule}") for rule in rules]  # noqa: B023
        self._version = version


def _indices(faults: Sequence[Fault | None], wanted: Callable[[Fault | None], bool]) -> npt.NDArray[np.intp]:
    return np.array([i for i, fault in enumerate(faults) if wanted(fault)], np.intp)


def _pick(keys: Sequence[str], index: npt.NDArray[np.intp]) -> list[str]:
    return [keys[int(i)] for i in index]
