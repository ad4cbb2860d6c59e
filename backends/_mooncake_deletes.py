"""Removing values from Mooncake: those that are to be deleted, and damaged ones, which would keep a good one out.

Nothing is removed while somebody has a lease on it, and never by force: whoever reads it would get torn bytes. Leases
end by themselves, so it is tried again, at growing intervals and not for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import anyio
import anyio.abc

from kvpool.backends._mooncake_codes import Meaning, described, meaning_of
from kvpool.backends._mooncake_link import Link
from kvpool.errors import StoreClosed, StoreError
from kvpool.key_memory import KeyMemory
from kvpool.store import Results, Status

__all__ = ["Deletes"]

logger = logging.getLogger(__name__)

REMOVED_KEYS = 64  # by one thread, which asks the master for each
REMOVE_S = 30.0  # how long it is tried to remove a value that somebody has a lease on
STUCK_S = 60.0  # how long a damaged value that could not be removed is left alone
REMOVE_PAUSES_S = 0.02, 0.5  # the first pause between two attempts; each is twice as long, up to the second


class Deletes:
    """``name``: of the store, for messages. ``prefix``: what makes the name of a value of its key.

    A damaged value is being healed (:meth:`healing`) until it is removed, or stuck (:meth:`stuck`) for a while if it
    could not be; in both cases its key counts as absent.
    """

    def __init__(self, link: Link, name: str, prefix: str) -> None:
        self._link = link
        self._name = name
        self._prefix = prefix
        self._healing: dict[str, anyio.Event] = {}
        self._stuck = KeyMemory(STUCK_S)

    async def delete(self, keys: Sequence[str], rows: list[int], results: Results, deadline: float) -> None:
        """Remove these keys; what is not done by the deadline stays as it is in ``results``."""
        give_up = anyio.current_time() + REMOVE_S
        left = rows
        for pause in _pauses():
            now = anyio.current_time()
            if not left or now >= deadline:
                break
            busy = []
            for at in range(0, len(left), REMOVED_KEYS):
                part = left[at : at + REMOVED_KEYS]
                busy += await self._delete(keys, part, results, deadline, patient=now < give_up)
            left = busy
            if left:  # somebody reads them, or has asked for them: their lease ends by itself
                await anyio.sleep_until(min(deadline, now + pause))

    def healing(self, key: str) -> anyio.Event | None:
        """Set once the damaged value of this key is removed or stuck; None if it has none that is being removed."""
        return self._healing.get(key)

    def stuck(self, keys: Sequence[str]) -> list[int]:
        """The indices of the keys whose damaged value could not be removed."""
        return self._stuck.among(keys, anyio.current_time())

    def absent(self, keys: Sequence[str], rows: Sequence[int]) -> list[int]:
        """The indices of the keys whose damaged value is being removed (of ``rows``) or could not be (of all)."""
        return self.stuck(keys) + ([i for i in rows if keys[i] in self._healing] if self._healing else [])

    def heal(self, key: str, tasks: anyio.abc.TaskGroup) -> None:
        """Remove a damaged value, in ``tasks``, as soon as nobody holds a lease on it."""
        if key not in self._healing:
            self._healing[key] = anyio.Event()
            tasks.start_soon(self._heal, key)

    async def _delete(
        self, keys: Sequence[str], rows: list[int], results: Results, deadline: float, *, patient: bool
    ) -> list[int]:
        """One attempt. Those that somebody reads, if that is to be waited for (``patient``)."""
        if anyio.current_time() >= deadline:
            return []
        try:
            codes = await self._remove([keys[i] for i in rows], deadline)
        except StoreClosed:
            raise
        except StoreError as error:
            results.status[rows] = Status.FAILED
            results.errors[rows[0]] = error
            return []
        busy = []
        for i, code in zip(rows, codes or [], strict=False):
            meaning = meaning_of(code)
            if meaning is Meaning.RETRY and patient:
                busy.append(i)
            elif meaning in (Meaning.OK, Meaning.ABSENT):
                results.set(i, Status.OK if meaning is Meaning.OK else Status.ABSENT)
            else:
                trouble = StoreError(f"{self._name}: {keys[i][:100]}: {described(code)}")
                results.set(i, Status.FAILED, error=trouble)
        return busy

    async def _heal(self, key: str) -> None:
        try:
            give_up = anyio.current_time() + REMOVE_S
            for pause in _pauses():
                if anyio.current_time() >= give_up:
                    break
                try:
                    codes = await self._remove([key], give_up)
                except StoreError:
                    codes = None
                if codes and meaning_of(codes[0]) in (Meaning.OK, Meaning.ABSENT):
                    return
                await anyio.sleep(pause)
            logger.warning("%s: the damaged value of %s could not be removed", self._name, key[:100])
            self._stuck.add([key], anyio.current_time())
        finally:
            self._healing.pop(key).set()

    async def _remove(self, keys: Sequence[str], deadline: float) -> list[int] | None:
        """The codes of one attempt, None if it was late. Raises StoreError if Mooncake cannot be asked."""
        client = self._link.client()
        names = [self._prefix + key for key in keys]

        def remove() -> list[int]:
            codes: list[int] = []
            for name in names:
                codes.append(client.native.remove(name, False))
                if meaning_of(codes[-1]) is Meaning.UNREACHABLE:  # each of the rest would take the master's time-out
                    break
            return codes + codes[-1:] * (len(names) - len(codes))

        return await self._link.ask(client, client.probes, remove, len(names), deadline)


def _pauses() -> Iterator[float]:
    """Between attempts to remove something."""
    pause, longest = REMOVE_PAUSES_S
    while True:
        yield pause
        pause = min(2 * pause, longest)
