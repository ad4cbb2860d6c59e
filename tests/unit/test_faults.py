"""FaultyStore: each kind of fault does what it says, also from outside while an engine runs."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest

from kvpool.backends.memory import MemoryStore
from kvpool.errors import ConfigError, StoreError
from kvpool.registry import create_store
from kvpool.store import ABSENT, PRESENT, UNKNOWN, Status
from kvpool.testing.faults import Fault, FaultyStore
from kvpool.testing.stores import get, put

pytestmark = pytest.mark.anyio

KEYS = ["a/0", "b/0", "b/1"]


async def filled(*faults: Fault) -> FaultyStore:
    store = FaultyStore(MemoryStore())
    await store.__aenter__()
    await put(store, [(k, k.encode()) for k in KEYS])
    store.faults = list(faults)
    return store


@pytest.mark.parametrize(
    ("kind", "seen", "status"),
    [
        ("absent", ABSENT, Status.ABSENT),
        ("failed", UNKNOWN, Status.FAILED),
        ("corrupt", UNKNOWN, Status.CORRUPT),
        ("timed_out", UNKNOWN, Status.TIMED_OUT),
        ("rejected", UNKNOWN, Status.REJECTED),
        ("flip", PRESENT, Status.OK),
    ],
)
async def test_faults_of_single_keys(kind: str, seen: int, status: Status) -> None:
    store = await filled(Fault.model_validate({"kind": kind, "keys": "b/*"}))
    assert (await store.exists(KEYS)).tolist() == [PRESENT, seen, seen]
    results, memory = await get(store, KEYS, [3, 3, 3])
    assert results.status.tolist() == [Status.OK, status, status]
    assert memory[0] == b"a/0"
    assert memory[1] != b"b/0"
    assert len(results.errors) == (2 if kind == "failed" else 0)


async def test_by_operation_lost_between_lookup_and_load() -> None:
    store = await filled(Fault(kind="absent", op="get", keys="b/1"))
    assert (await store.exists(KEYS)).tolist() == [PRESENT] * 3
    assert (await get(store, KEYS, [3] * 3))[0].status.tolist() == [Status.OK, Status.OK, Status.ABSENT]


async def test_a_put_that_is_lost() -> None:
    store = await filled(Fault(kind="absent", op="put"))
    results = await put(store, [("new", b"v")])
    assert (results.ok.tolist(), results.nbytes.tolist()) == ([True], [1])
    assert (await store.exists(["new"])).tolist() == [ABSENT]


async def test_the_first_rule_counts_and_times_run_out() -> None:
    store = await filled(Fault(kind="absent", keys="a/*", times=2), Fault(kind="failed", keys="*/0", times=3))
    seen = [(await store.exists(KEYS)).tolist() for _ in range(4)]
    assert seen == [[ABSENT, UNKNOWN, PRESENT], [ABSENT, UNKNOWN, PRESENT], [UNKNOWN, UNKNOWN, PRESENT], [PRESENT] * 3]


async def test_whole_calls() -> None:
    store = await filled(Fault(kind="raise", op="get", keys="b/1"))
    assert (await get(store, KEYS[:2], [3, 3]))[0].ok.all(), "no key matches"
    with pytest.raises(StoreError, match="on purpose"):
        await get(store, KEYS, [3] * 3)


async def test_hang_ends_at_the_deadline() -> None:
    store = await filled(Fault(kind="hang", keys="b/1"))
    deadline = anyio.current_time() + 0.05
    results, memory = await get(store, KEYS, [3] * 3, deadline=deadline)
    assert anyio.current_time() >= deadline
    assert results.status.tolist() == [Status.OK, Status.OK, Status.TIMED_OUT]
    assert memory[1] == b"b/0"


async def test_stuck_ends_by_cancellation_only() -> None:
    store = await filled(Fault(kind="stuck"))
    with anyio.move_on_after(0.05) as scope:
        await store.exists(KEYS, deadline=anyio.current_time())
    assert scope.cancelled_caught


async def test_deaf_heeds_neither_deadline_nor_cancellation() -> None:
    store = await filled(Fault(kind="deaf", seconds=0.1))
    start = anyio.current_time()
    with anyio.move_on_after(0.01):
        await store.exists(KEYS, deadline=start)
    assert anyio.current_time() >= start + 0.1


async def test_delay_is_cut_by_the_deadline() -> None:
    store = await filled(Fault(kind="delay", seconds=0.05))
    start = anyio.current_time()
    assert (await store.exists(KEYS)).tolist() == [PRESENT] * 3
    assert anyio.current_time() >= start + 0.05
    store.faults[0].seconds = 3600
    assert (await store.exists(KEYS, deadline=anyio.current_time() + 0.05)).tolist() == [UNKNOWN] * 3


async def test_calls_are_counted() -> None:
    store = await filled()
    await store.exists(KEYS)
    await store.exists([])
    assert (store.calls["exists"], store.calls["exists_keys"], store.calls["get"]) == (2, 3, 0)


async def test_a_script_is_read_again_when_it_changes(tmp_path: Path) -> None:
    script = tmp_path / "faults.json"

    def write(text: str) -> None:
        script.with_suffix(".new").write_text(text)
        script.with_suffix(".new").rename(script)

    write("[]")
    url = {"url": "kvpool.testing.faults:FaultyStore", "store": "memory://?capacity=1MiB", "script": str(script)}
    async with create_store(url) as store:
        await put(store, [("k", b"v")])
        write(json.dumps([{"kind": "absent", "op": "exists"}]))
        assert (await store.exists(["k"])).tolist() == [ABSENT]
        write(json.dumps([{"kind": "failed", "op": "exists", "times": 1}]))
        assert [(await store.exists(["k"])).tolist() for _ in range(2)] == [[UNKNOWN], [PRESENT]]
        script.unlink()
        assert (await store.exists(["k"])).tolist() == [PRESENT]
        for text, message in [
            ("[", "not JSON"),
            ("{}", "must be a JSON list"),
            ('[{"kind": "fialed"}]', "kind='fialed'"),
            ('[{"kind": "failed", "key": "x"}]', r"unknown option key=\*\*\*; did you mean 'keys'"),
        ]:
            write(text)
            with pytest.raises(ConfigError, match=message):
                await store.exists(["k"])


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="option store is missing"):
        create_store("kvpool.testing.faults:FaultyStore")
    with pytest.raises(ConfigError, match="unknown store 'memry'"):
        create_store("kvpool.testing.faults:FaultyStore?store=memry://")
    with pytest.raises(ConfigError, match=r"faults script /no/such\.json: there is no such file; for no faults yet, "):
        create_store("kvpool.testing.faults:FaultyStore?store=memory://&script=/no/such.json")
