"""Watches the owners of memory, so that what lies with one that is dead or frozen is not waited for.

While all is well it asks nothing. When a transfer is late or fails, it looks where the values in question lie, and
tries those owners: a sign of life first, which takes no thread, then a small value.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anyio

from kvpool.backends._mooncake_client import gives_sign_of_life
from kvpool.backends._mooncake_codes import TRANSFER_FAIL
from kvpool.backends._mooncake_link import Client, Link
from kvpool.backends._mooncake_owners import Place, Trial

__all__ = ["OwnerWatch"]

logger = logging.getLogger(__name__)

TICK_S = 0.25
SLOW_S = 1.0  # a transfer that takes longer raises a doubt, also before its deadline
INQUIRY_S = 1.0  # for one inquiry, and between two
SIGN_S = 1.0  # for a sign of life
TRIAL_S = 2.0  # for a small value
MOST_NAMES = 256  # in one inquiry


class OwnerWatch:
    """``name``: of the store, for messages. ``signs``: whether owners give signs of life at their known address."""

    def __init__(self, link: Link, name: str, *, signs: bool) -> None:
        self._link = link
        self._name = name
        self._signs = signs
        self._doubted: dict[str, None] = {}  # names of values whose transfer was late or failed
        self._recent: deque[str] = deque(maxlen=64)  # names of values whose transfer was good: they are somewhere
        self._under_way: dict[object, tuple[float, Sequence[str]]] = {}
        self._rest_until = 0.0

    # ---- for the store

    def silent(self) -> frozenset[str]:
        """The owners that do not answer (``host:port``)."""
        client = self._link.current
        return client.owners.silent(anyio.current_time()) if client is not None else frozenset()

    async def lost(self, names: Sequence[str], deadline: float) -> list[int]:
        """The indices of the values that lie with an owner that does not answer. Raises StoreError."""
        client = self._link.current
        silent = self.silent()
        if client is None or not silent or not names:
            return []
        places = await self._find(client, names, deadline)
        return [i for i, name in enumerate(names) if name in places and places[name].owner in silent]

    @contextmanager
    def transfer(self, names: Sequence[str]) -> Iterator[Callable[[Sequence[int] | None], None]]:
        """Around a transfer of these values; what is yielded is to be told its codes, None if it was late."""
        token = object()
        self._under_way[token] = anyio.current_time(), names

        def ended(codes: Sequence[int] | None) -> None:
            if codes is None or TRANSFER_FAIL in codes:
                self._doubt(names)
            else:
                self._recent.extend(name for name, code in zip(names, codes, strict=True) if code >= 0)

        try:
            yield ended
        finally:
            self._under_way.pop(token, None)

    # ---- a task of the store

    async def run(self) -> None:
        """Follow up doubts, for ever."""
        async with anyio.create_task_group() as tasks:
            while True:
                await anyio.sleep(TICK_S)
                now = anyio.current_time()
                for token, (since, names) in list(self._under_way.items()):
                    if now - since > SLOW_S:
                        self._doubt(names)
                        del self._under_way[token]
                client = self._link.current
                if client is None:
                    continue
                if self._doubted and now >= self._rest_until:
                    await self._inquire(client)
                for trial in client.owners.due(anyio.current_time()):
                    tasks.start_soon(self._try, client, trial)

    def _doubt(self, names: Sequence[str]) -> None:
        self._doubted.update(dict.fromkeys(names[:MOST_NAMES]))

    async def _inquire(self, client: Client) -> None:
        """Find the owners of what is doubted, and of some other values: what was to be put is nowhere as yet."""
        names = [*list(self._doubted)[-MOST_NAMES:], *self._recent]
        self._doubted.clear()
        self._rest_until = anyio.current_time() + INQUIRY_S
        try:
            await self._find(client, list(dict.fromkeys(names)), self._rest_until)
        except Exception as error:  # the watch goes on, and with it the store
            logger.debug("%s", error)
        else:
            client.owners.doubt()

    async def _find(self, client: Client, names: Sequence[str], deadline: float) -> dict[str, Place]:
        """Where these values are read from, by name; without those that are not there."""
        places: dict[str, Place] = {}
        describe = getattr(client.native, "batch_get_replica_desc", None)
        if describe is None:
            return {}  # of an older Mooncake

        def find() -> list[int]:
            codes = client.native.batch_is_exist(list(names))
            there = [name for name, code in zip(names, codes, strict=False) if code > 0]  # it logs each that is not
            for name, replicas in describe(there).items() if there else ():
                if (place := _place(name, replicas)) is not None:
                    places[name] = place
            return codes

        codes = await self._link.ask(client, client.probes, find, len(names), deadline)
        if codes is None:
            return {}
        client.owners.found(places.values(), anyio.current_time())
        return places

    async def _try(self, client: Client, trial: Trial) -> None:
        good: bool | None = None
        alive: bool | None = None
        try:
            if self._signs:
                alive = await gives_sign_of_life(trial.owner, anyio.current_time() + SIGN_S)
            good = alive if alive is False else await self._load(client, trial.place)
            if good is None and alive:
                good = True  # it has nothing to be tried with
        except Exception as error:  # the master cannot be asked, or there was no room for a trial
            logger.debug("%s", error)
        finally:
            now = anyio.current_time()
            change = client.owners.settle(trial, now, good, mute=alive is False)
        if change == "silent":
            logger.warning(
                "%s: the owner of memory at %s does not answer; what it keeps is computed", self._name, trial.owner
            )
        elif change == "answers":
            logger.info("%s: the owner of memory at %s answers again", self._name, trial.owner)

    async def _load(self, client: Client, place: Place) -> bool | None:
        """Whether a value comes; None: it is not there, or too large to be tried.

        Raises TimeoutError or StoreError if it could not be asked for: that is not the owner's fault.
        """
        limit = anyio.current_time() + TRIAL_S
        if place.nbytes > client.arena.nbytes:
            return None
        lease = await client.arena.acquire(place.nbytes, deadline=limit)
        asked = False
        address = lease.region.address + lease.offset

        def load() -> list[int]:
            nonlocal asked
            asked = True
            return client.native.batch_get_into_multi_buffers([place.name], [[address]], [[place.nbytes]])

        codes = await self._link.ask(client, client.trials, load, 1, limit, lease)
        if codes is None:
            if not asked:
                raise TimeoutError("no thread became free for a trial")
            return False
        lease.release()
        return True if codes[0] >= 0 else False if codes[0] == TRANSFER_FAIL else None


def _place(name: str, replicas: Sequence[Any]) -> Place | None:
    """Of the replica that Mooncake reads, which is the first whole one, if it is in memory."""
    try:
        whole = next((r for r in replicas if r.status.name == "COMPLETE"), None)
        if whole is None or not whole.is_memory_replica():
            return None
        found = whole.get_memory_descriptor().buffer_descriptor
        return Place(found.transport_endpoint, name, found.size)
    except AttributeError:  # another version's descriptor
        return None
