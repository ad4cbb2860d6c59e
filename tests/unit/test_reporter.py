"""What a pool's log says of its store, whichever it is: failing, hanging, damaged, full. Nothing while all is well."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence

import anyio
import pytest

from kvpool.backends.checked import CheckedStore
from kvpool.backends.guarded import GuardedStore
from kvpool.backends.memory import MemoryStore
from kvpool.backends.tiered import TieredStore
from kvpool.errors import StoreError
from kvpool.events import Event, Reporter
from kvpool.manifest import read_manifests
from kvpool.memory import Buffers
from kvpool.pool import KVPool
from kvpool.store import PRESENT, Results, Status, Store
from kvpool.testing.faults import Fault, FaultyStore, Kind
from kvpool.testing.simulation import simulate
from tests.unit.test_pool import NAMESPACE, SPEC, Engine, Steered, engine, prompt

pytestmark = pytest.mark.anyio


async def serve(e: Engine, seed: int, seconds: float = 30.0) -> None:
    """One request: looked up, loaded if it is there, saved; ``seconds`` for each."""
    part = e.pool.transfer(0, prompt(4, seed), range(4), range(4))
    if (await e.pool.lookup(prompt(4, seed), 17, deadline=anyio.current_time() + seconds)).length:
        await e.pool.load([part], deadline=anyio.current_time() + seconds)
    await e.pool.save([part], deadline=anyio.current_time() + seconds)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("kvpool") and r.levelno >= logging.WARNING]


async def test_a_store_that_is_well_is_not_spoken_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[object] = []
    tell = Reporter.tell

    def listen(self: Reporter, event: Event) -> None:
        events.append(event)
        tell(self, event)

    monkeypatch.setattr(Reporter, "tell", listen)
    async with engine(lookup_timeout_ms=30_000) as e:
        for seed in (1, 2, 1):
            await serve(e, seed)
    assert lines(caplog) == []
    assert [type(event).__name__ for event in events] == ["SaveEnded", "SaveEnded", "LoadEnded", "SaveEnded"]


REASONS: dict[Kind, str] = {
    "raise": "fault on purpose: exists",
    "failed": "it did not say of . of . values whether it has them",
    "hang": "no answer within|it did not say .* in time",
    "stuck": "no answer within|it did not say .* in time",
}


@pytest.mark.parametrize(("kind", "reason"), REASONS.items())
@pytest.mark.parametrize("wrapped", [False, True])
async def test_a_store_that_fails_is_said_once_and_so_is_its_return(
    kind: Kind, reason: str, wrapped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = FaultyStore(MemoryStore())
    async with engine(CheckedStore(store) if wrapped else store, deadline_grace_s=0.0, lookup_timeout_ms=30_000) as e:
        await serve(e, 0)
        store.faults = [Fault(kind=kind)]
        for seed in range(1, 8):
            await serve(e, seed, seconds=0.02 if kind in ("hang", "stuck") else 30.0)
        (line,) = lines(caplog)
        assert re.fullmatch(f"store (Faulty|Checked)Store: 1 lookup failed: .*({reason}).*; what .* is computed", line)
        store.faults = []
        for seed in range(8, 10):
            await serve(e, seed)
        assert len(lines(caplog)) == 2
        assert "serves again after" in lines(caplog)[1]


def guarded(store: Store) -> Store:
    return GuardedStore(store, bounce=False)


@pytest.mark.parametrize(
    "wrap",
    [lambda s: s, guarded, lambda s: CheckedStore(guarded(s)), lambda s: TieredStore(MemoryStore(), guarded(s))],
    ids=["plain", "guarded", "checked guarded", "tiered guarded"],
)
@pytest.mark.parametrize("kind", REASONS)
def test_an_outage_is_told_once_when_it_begins_and_once_when_it_ends(
    kind: Kind, wrap: Callable[[Store], Store], caplog: pytest.LogCaptureFixture
) -> None:
    """With the configuration as it comes, whoever else counts failures on the way."""

    async def main() -> None:
        store = FaultyStore(MemoryStore())
        async with engine(wrap(store)) as e:
            for faults in ([], [Fault(kind=kind)], []):
                store.faults = faults
                end = anyio.current_time() + 20
                while anyio.current_time() < end:
                    await serve(e, 1, seconds=1.0)
                    await serve(e, int(anyio.current_time() * 1000), seconds=1.0)
                    await anyio.sleep(0.5)

    simulate(main, seed=1)
    begun, ended = lines(caplog)
    assert re.match(rf"store \w+: 1 lookup failed: .*({REASONS[kind]}).*; what it does not serve is computed", begun)
    assert re.match(r"store \w+: serves again after .*, in which \d+ lookups, \d+ saves failed", ended)


def test_a_lookup_that_is_cancelled_without_an_answer_counts(caplog: pytest.LogCaptureFixture) -> None:
    """As the lookup server does: the client's deadline is a little earlier than the pool's own."""

    async def main() -> None:
        async with engine(FaultyStore(MemoryStore(), [Fault(kind="stuck")]), lookup_timeout_ms=200) as e:
            with anyio.move_on_after(0.02):
                await e.pool.lookup(prompt(4), 17)
            assert lines(caplog) == [], "an early end says nothing about the store"
            with anyio.move_on_after(0.199):
                await e.pool.lookup(prompt(4), 17)
            assert "1 lookup failed: no answer within" in lines(caplog)[0]

    simulate(main, seed=1, limit=1000)


async def test_damaged_values_are_said_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    class Rotten(MemoryStore):
        async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = float("inf")) -> Results:
            results = await super().get_into(keys, into, deadline=deadline)
            for i in range(len(keys)):
                results.set(i, Status.CORRUPT, error=StoreError("wrong checksum"))
            return results

    async with engine(Rotten()) as e:
        for seed in range(3):
            await serve(e, seed)
            await serve(e, seed)
        assert lines(caplog) == [
            "store Rotten: 4 values damaged: wrong checksum; such a value is not used, its block is computed"
        ]
    assert "8 values damaged in" in lines(caplog)[1], "what was not said yet is said at the end"


async def test_a_store_that_takes_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async with engine(MemoryStore(capacity=10)) as e:
        for seed in range(3):
            await serve(e, seed)
        assert len(lines(caplog)) == 1
        assert "1 save failed" in lines(caplog)[0]


async def test_a_store_that_comes_and_goes_does_not_flood(caplog: pytest.LogCaptureFixture) -> None:
    store = FaultyStore(MemoryStore())
    async with engine(store) as e:
        for seed in range(60):
            store.faults = [Fault(kind="raise")] if seed % 3 == 0 else [Fault(kind="corrupt", op="get")]
            await serve(e, seed % 5)
        assert e.pool.counters.lookup_failed == 20
        assert e.pool.counters.load_corrupt_chunks > 20
        assert len(lines(caplog)) == 3, "that it fails, that it serves, and damage"


async def test_a_listener_that_fails_does_not_flood(caplog: pytest.LogCaptureFixture) -> None:
    def listen(event: object) -> None:
        raise ValueError("a bug")

    async with KVPool(MemoryStore(), spec=SPEC, namespace=NAMESPACE, listener=listen) as pool:
        for _ in range(20):
            await pool.lookup(prompt(4), 17)
        assert lines(caplog) == [
            "the listener of the pool: 1 call failed: ValueError: a bug; the pool goes on as if it had not"
        ]


async def test_a_reset_says_its_epoch(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvpool")
    async with engine() as e:
        epoch = e.pool.reset()
    assert epoch.hex() in caplog.text


class TestManifest:
    async def test_it_comes_when_the_store_is_back(self) -> None:
        store = Steered()

        async def away(keys: Sequence[str]) -> None:
            raise StoreError("away")

        store.before_put = away
        async with engine(store) as e:
            await serve(e, 1)
            store.before_put = None
            await serve(e, 2)
            assert await self.found(e, store)
            read = [manifest async for manifest in read_manifests(store.inner, NAMESPACE.hex)]
            assert read == [{"kvpool": 1, "facts": NAMESPACE.facts}]
            manifests = [key for key in store.stored if "/manifest/" in key]
            await serve(e, 3)
            assert [key for key in store.stored if "/manifest/" in key] == manifests, "not with each save"

    async def test_it_comes_again_when_the_store_has_lost_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store = Steered()
        async with engine(store) as e:
            await serve(e, 1)
            await store.delete([e.pool.keyspace.manifest_key])
            await serve(e, 2)
            assert not await self.found(e, store)
            monkeypatch.setattr("kvpool.pool.anyio.current_time", lambda t=anyio.current_time: t() + 61)
            await serve(e, 3)
            assert await self.found(e, store)

    async def test_one_that_hangs_holds_no_save_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvpool.pool.MANIFEST_TIMEOUT_S", 0.02)
        store = Steered()

        async def hang(keys: Sequence[str]) -> None:
            if "/manifest/" in keys[0]:
                await anyio.sleep(60)

        store.before_put = hang
        async with engine(store, deadline_grace_s=0.0) as e:
            part = e.pool.transfer(0, prompt(4), range(4), range(4))
            with anyio.fail_after(30):
                (saved,) = await e.pool.save([part])
            assert saved.ok.all()

    async def found(self, e: Engine, store: Steered) -> bool:
        return bool((await store.inner.exists([e.pool.keyspace.manifest_key]))[0] == PRESENT)

    async def test_what_is_no_manifest_is_left_out(self) -> None:
        async with MemoryStore() as store:
            for rest, text in (
                ("x", b"{}"),
                ("3", b"{{{"),
                ("2", b"[]"),
                ("999999999999", b"{}"),
                ("7", b"{}"),
                ("99999", b"[" * 99999),
            ):
                await store.put([f"{NAMESPACE.hex}/manifest/{rest}"], Buffers.of(bytearray(text)))
            assert [m async for m in read_manifests(store, NAMESPACE.hex)] == []
