"""The two halves of the connector without an engine: what they tell each other over several steps and ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.config import Config
from kvpool.errors import ConfigError
from kvpool.hashes import BlockHashes
from kvpool.keys import KeySpace, Namespace
from kvpool.memory import BlockLayout
from kvpool.ranks import Rank
from kvpool.spec import CacheGroup, CacheSpec, Kind
from kvpool.transport import LookupResult
from kvpool.vllm import worker
from kvpool.vllm.messages import WorkerReport
from kvpool.vllm.scheduler import SchedulerSide
from kvpool.vllm.worker import WorkerSide
from tests.vllm.halves import (
    BLOCK,
    EPOCH,
    NAMESPACE,
    FakeClient,
    FakePool,
    FakeRequest,
    output,
    reported,
    scheduler,
    spec,
)
from tests.vllm.worker_half import job, step, until, work

HANGS = "tests.vllm.hanging:HangingStore"


@pytest.fixture
def workers() -> Iterator[Callable[..., WorkerSide]]:
    made: list[WorkerSide] = []

    def make(store: str, rank: Rank = Rank(), tensor: int = 1, **config: Any) -> WorkerSide:  # noqa: B008
        side = WorkerSide(Config.load({"store": store, **config}), spec(tensor), None, rank=rank, kv_heads=[8])
        side.start([BlockLayout.of_arrays(np.zeros((64, 32), np.uint8))], {"form": "test"})
        made.append(side)
        return side

    yield make
    for side in made:
        side.close()


def test_a_rank_releases_each_job_once_over_all_steps(workers: Callable[..., WorkerSide], tmp_path: Path) -> None:
    side = workers(f"file://{tmp_path}")
    for number in range(1, 6):
        *_, total = until(side, lambda r, n=number: n in r.saved, work(saves=(job(number, seed=number),)))  # type: ignore[misc]
        for _ in range(5):
            total = total.aggregate(step(side, work()))
        assert total.released == {number: 1}
        assert total.saved == {number: (1, True)}
    assert not any(side.outstanding().values())


def test_pins_stay_until_every_rank_has_let_go() -> None:
    pool = FakePool(64)
    side = scheduler(pool, tensor=2)
    request = FakeRequest(4)
    side.on_new_request(request)
    (saving,) = side.build_work(output(request, 16)).saves
    assert pool.pinned == 4
    side.take_report(reported(released={saving.number: 1}, saved={saving.number: (1, True)}))
    assert pool.pinned == 4, "the other rank still reads"
    side.take_report(reported(released={saving.number: 1}))
    assert pool.pinned == 0
    side.take_report(reported(released={saving.number: 1}, saved={saving.number: (1, True), 99: (1, True)}))
    assert pool.pinned == 0
    assert side.outstanding()["saves"] == 0


def test_a_store_that_never_opens_delays_nothing_for_ever(workers: Callable[..., WorkerSide]) -> None:
    side = workers(HANGS, load_timeout_s=0.2, save_timeout_s=0.2)
    *_, total = until(side, lambda r: 1 in r.loaded and 2 in r.saved, work((job(1),), (job(2),)))
    assert total.loaded == {1: (1, False)}
    assert total.saved == {2: (1, False)}
    assert total.released == {2: 1}
    assert side.take_stats()["failed_jobs"] == 2
    assert side.take_received() == {"request-1"}
    assert side.take_invalid() == {1, 2, 3, 4}


def test_staging_that_holds_no_block_is_refused_at_start() -> None:
    config = Config.load({"staging_bytes": 16, "batch_bytes": 16})
    with pytest.raises(ConfigError, match="staging_bytes"):
        WorkerSide(config, spec(), None).start([BlockLayout.of_arrays(np.zeros((4, 32), np.uint8))], {})


@pytest.mark.parametrize(("limit", "refused"), [(31, True), (32, False)])
def test_a_store_that_takes_no_block_is_refused_at_start(limit: int, refused: bool) -> None:
    config = Config.load({"store": f"redis://127.0.0.1:1?max_value={limit}", "save_timeout_s": 0.1})
    side = WorkerSide(config, spec(), None)
    layouts = [BlockLayout.of_arrays(np.zeros((4, 32), np.uint8))]
    try:
        if refused:
            with pytest.raises(ConfigError, match=r"RedisStore takes values of up to 31 bytes .* one block has 32"):
                side.start(layouts, {})
        else:
            side.start(layouts, {})
    finally:
        side.close()


def test_an_answer_counts_once_whatever_its_age() -> None:
    client = FakeClient(LookupResult(12, (12,), EPOCH, 0.0))
    side = scheduler(FakePool(64), client=client, lookup_grace_ms=0)
    request = FakeRequest(4)
    side.on_new_request(request)
    assert side.match(request, 0) is None
    client.answer()
    side.build_work(output())
    assert side.match(request, 0) == 12
    assert client.asked == 1


def test_the_socket_is_read_once_a_step_however_many_wait() -> None:
    client = FakeClient(LookupResult(12, (12,), EPOCH, 1.0))
    side = scheduler(FakePool(64), client=client, lookup_grace_ms=0)
    requests = [FakeRequest(4) for _ in range(50)]
    for request in requests:
        side.on_new_request(request)
        side.match(request, 0)
    side.build_work(output())
    before = client.polls
    for request in requests:
        assert side.match(request, 0) is None
    assert client.polls - before == 1


def test_a_save_larger_than_the_pin_budget_goes_in_parts() -> None:
    pool = FakePool(20)  # at most 10 pinned
    side = scheduler(pool)
    request = FakeRequest(18)
    side.on_new_request(request)
    stored = 0
    for _ in range(10):
        for saving in side.build_work(output(request, 72)).saves:
            assert pool.pinned <= 10
            stored += len(saving.parts[0].block_ids)
            side.take_report(reported(released={saving.number: 1}, saved={saving.number: (1, True)}))
    assert stored == 18


def test_a_failed_save_waits_before_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("kvpool.vllm.saves.time", SimpleNamespace(monotonic=lambda: now[0]))
    side = scheduler(FakePool(64))
    request = FakeRequest(4)
    side.on_new_request(request)
    tries = []
    for _ in range(600):
        for saving in side.build_work(output(request, 16)).saves:
            tries.append(now[0])
            side.take_report(reported(released={saving.number: 1}, saved={saving.number: (1, False)}))
        now[0] += 0.1
    gaps = np.diff(tries)
    assert len(tries) < 12, "a failing store is asked in every step"
    assert (gaps[1:] >= gaps[:-1] - 1e-6).all()


def test_what_was_computed_before_a_reset_is_not_stored_after_it() -> None:
    side = scheduler(FakePool(64))
    running, waiting = FakeRequest(8), FakeRequest(4, seed=1)
    for request in (running, waiting):
        side.on_new_request(request)
    assert side.build_work(output(running, 16)).saves
    side.reset()
    assert not side.build_work(output(running, 32)).saves
    assert side.match(running, 0) == 0
    (saving,) = side.build_work(output(waiting, 16)).saves
    assert saving.request_id == waiting.request_id
    assert saving.epoch == side.epoch != EPOCH


def test_hashes_of_a_job_are_those_of_its_chunks() -> None:
    assert isinstance(job(1).parts[0].hashes, BlockHashes)
    assert len(job(1, blocks=3).parts[0].hashes) == 3


def test_blocks_are_looked_up_once_a_group_on_load_and_on_save(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = (CacheGroup(Kind.FULL, BLOCK), CacheGroup(Kind.SLIDING_WINDOW, BLOCK, window=8))
    pool = FakePool(64)
    side: Any = SchedulerSide(
        Config.load({"lookup_grace_ms": 0}),
        CacheSpec(groups, BLOCK),
        lambda: NAMESPACE,
        "test-chained",
        FakeClient(LookupResult(12, (12, 12), EPOCH, 1.0)),  # type: ignore[arg-type]
        reads=True,
        writes=True,
        epoch=EPOCH,
    )
    side.bind_block_pool(pool)
    asked: list[int] = []
    blocks = side._jobs.database.blocks

    def counted(group: int, *args: Any) -> Any:
        asked.append(group)
        return blocks(group, *args)

    monkeypatch.setattr(side._jobs.database, "blocks", counted)
    request = FakeRequest(8)
    side.on_new_request(request)
    table = list(range(1, 9))
    tables = (table, [0, *table[1:]])  # the window's first block has gone
    assert side.match(request, 0) is None
    side._client.answer()
    side.build_work(output())
    assert side.match(request, 0) == 12
    side.after_alloc(request, SimpleNamespace(get_block_ids=lambda: tables), 12)
    assert asked == [0, 1]
    step_output = output(request, 32)
    step_output.kv_connector_block_state = SimpleNamespace(get_block_ids=lambda _: tables, boundary_state_offloads={})
    sent = side.build_work(step_output)
    assert asked == [0, 1, 0, 1]
    (loading,), (saving,) = sent.loads, sent.saves
    assert [part.block_ids.tolist() for part in loading.parts] == [[1, 2, 3], [2, 3]]
    assert saving.parts[0].block_ids.tolist() == [4, 5, 6, 7, 8], "what was found in the store is not saved again"


def test_a_mamba_state_is_saved_from_its_exact_block_and_pinned() -> None:
    pool = FakePool(64)
    side: Any = SchedulerSide(
        Config.load({}),
        CacheSpec((CacheGroup(Kind.FULL, BLOCK), CacheGroup(Kind.MAMBA, BLOCK)), BLOCK),
        lambda: NAMESPACE,
        "test-chained",
        FakeClient(LookupResult(0, (0, 0), EPOCH, 1.0)),  # type: ignore[arg-type]
        reads=True,
        writes=True,
        epoch=EPOCH,
    )
    side.bind_block_pool(pool)
    request = FakeRequest(8)
    side.on_new_request(request)
    step_output = output(request, 8 * BLOCK)
    table = list(range(1, 9))
    offers = [
        (1, 40, 2 * BLOCK),
        (1, 41, 8 * BLOCK),
        (1, 42, 2 * BLOCK + 2),  # inside a block
        (1, 43, 9 * BLOCK),  # behind the prompt
    ]
    step_output.kv_connector_block_state = SimpleNamespace(
        get_block_ids=lambda _: (table, [0] * 7 + [8]),
        boundary_state_offloads={request.request_id: offers, "gone": offers},
    )
    *states, attention = side.build_work(step_output).saves
    assert [part.group for part in attention.parts] == [0], "a state is never found through the table"
    assert [[(p.group, p.chunk_ids.tolist(), p.block_ids.tolist()) for p in job.parts] for job in states] == [
        [(1, [1], [40])],
        [(1, [7], [41])],
    ]
    assert [bytes(job.parts[0].hashes[0]) for job in states] == [request.block_hashes[1], request.block_hashes[7]]
    assert pool.pinned == 8 + 2
    for saving in (attention, *states):
        side.take_report(reported(released={saving.number: 1}, saved={saving.number: (1, saving is attention)}))
    assert pool.pinned == 0
    assert not side.build_work(output(request, 8 * BLOCK)).saves, "a state that was not stored is gone"


def test_what_the_namespace_stands_for_is_sent_once_and_when_a_rank_asks() -> None:
    large = Namespace.of({"model": "x" * 100_000})
    side = SchedulerSide(
        Config.load({}),
        spec(),
        lambda: large,
        "test-chained",
        FakeClient(LookupResult(0, (0,), EPOCH, 1.0)),  # type: ignore[arg-type]
        reads=True,
        writes=True,
        epoch=EPOCH,
    )

    def sent() -> int:
        step = side.build_work(output())
        assert step.namespace == large.digest
        return len(pickle.dumps(step, pickle.HIGHEST_PROTOCOL))

    assert sent() > 100_000
    assert max(sent() for _ in range(20)) < 300
    side.reset()
    side.take_report(reported(loaded={7: (1, True)}))
    assert sent() < 300, "an epoch changes nothing of it"
    side.take_report(reported(unnamed=True))
    assert [sent() > 100_000 for _ in range(3)] == [True, False, False]


def test_a_rank_that_has_not_seen_it_asks_and_shares_all_the_same(
    workers: Callable[..., WorkerSide], tmp_path: Path
) -> None:
    """As a worker that has started again, or to which the first step's message did not come."""
    told, late = workers(f"file://{tmp_path}"), workers(f"file://{tmp_path}")
    first = work(saves=(job(1),))
    first.engine = NAMESPACE
    *reports, total = until(told, lambda r: 1 in r.saved, first)
    assert not total.unnamed
    *reports, total = until(late, lambda r: 2 in r.loaded, work((job(2),)))
    assert total.loaded == {2: (1, True)}
    assert all(report.unnamed for report in reports)
    assert WorkerReport(released={1: 1}).aggregate(WorkerReport(unnamed=True)).unnamed, "one rank is enough"
    again = work()
    again.engine = NAMESPACE
    assert not step(late, again).unnamed
    assert not step(late, work())


def test_what_is_made_while_the_engine_is_named_gets_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first lookup comes from the event loop while the first step comes from the worker's thread."""
    spaces = worker._Spaces(spec(), "layout")

    def named_meanwhile(key: Namespace, of: CacheSpec) -> KeySpace:
        spaces.name(NAMESPACE)
        return KeySpace(key, of)

    monkeypatch.setattr(worker, "KeySpace", named_meanwhile)
    first = spaces.get(NAMESPACE.digest, EPOCH)
    later = spaces.get(NAMESPACE.digest, EPOCH)
    assert "engine_facts" in later.namespace.manifest
    assert later.namespace.digest == first.namespace.digest
    assert spaces.get(NAMESPACE.digest, EPOCH) is later
