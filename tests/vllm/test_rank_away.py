"""One rank's store is away: no rank is asked for a hit that this one could not load, until it is back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.config import Config
from kvpool.events import LoadEnded, SaveEnded
from kvpool.memory import BlockLayout
from kvpool.ranks import Rank
from kvpool.transport import LookupResult
from kvpool.vllm.health import MAX_PROBE_S, STALE_S, Health
from kvpool.vllm.messages import WorkerReport
from kvpool.vllm.worker import WorkerSide
from tests.vllm.halves import EPOCH, FakeClient, FakePool, FakeRequest, output, reported, scheduler, spec
from tests.vllm.other_process import outputs_of
from tests.vllm.rank_away import RUNS
from tests.vllm.worker_half import job, step, until, work


def load(**columns: int) -> LoadEnded:
    names = ("loaded", "missing", "late", "failed", "corrupt", "nbytes", "seconds")
    told: dict[str, Any] = dict.fromkeys(names, 0) | columns
    return LoadEnded(**told)


def save(**columns: int) -> SaveEnded:
    names = ("saved", "present", "skipped", "dropped", "late", "failed", "nbytes", "seconds")
    told: dict[str, Any] = dict.fromkeys(names, 0) | columns
    return SaveEnded(**told)


class TestHealth:
    @pytest.mark.parametrize("event", [load(failed=3), load(late=1), load(late=1, failed=2)])
    @pytest.mark.parametrize(
        "good", [load(loaded=1, failed=2), load(missing=1), load(corrupt=1), save(present=1, late=1)]
    )
    def test_a_load_that_fails_as_a_whole_and_a_job_that_is_answered(self, event: Any, good: Any) -> None:
        health = Health()
        health.on_event(event)
        assert not health.serves
        assert health.doubted.is_set()
        health.on_event(good)
        assert health.serves
        assert not health.doubted.is_set()

    @pytest.mark.parametrize("event", [load(), save(skipped=2), save(dropped=3), save(failed=1), save(late=2)])
    def test_what_tells_nothing_of_loads(self, event: Any) -> None:
        health = Health()
        health.on_event(event)
        assert health.serves
        health.failed()
        health.on_event(event)
        assert not health.serves

    def test_probes_come_at_once_then_more_and_more_rarely(self) -> None:
        health = Health()
        health.failed()
        delays = [health.delay(probes) for probes in range(50)]
        assert delays[0] == 0
        assert delays == sorted(delays)
        assert delays[-1] == MAX_PROBE_S

    def test_a_store_that_takes_saves_and_fails_loads_is_believed_less_each_time(self) -> None:
        health, first = Health(), []
        for _ in range(5):
            health.failed()
            health.failed()  # those that were under way
            first.append(health.delay(0))
            health.on_event(save(saved=1))
        assert first[0] == 0
        assert first == sorted(set(first))
        health.on_event(load(loaded=1))
        health.failed()
        assert health.delay(0) == 0


class TestScheduler:
    def side(self, **config: Any) -> tuple[Any, FakeClient]:
        client = FakeClient(LookupResult(12, (12,), EPOCH, 100.0))
        return scheduler(FakePool(64), tensor=2, client=client, lookup_grace_ms=0, **config), client

    def test_no_hit_while_any_rank_is_away(self) -> None:
        side, client = self.side()
        side.take_report(reported(serving={0: True, 1: False}))
        request = FakeRequest(4)
        side.on_new_request(request)
        for _ in range(5):
            assert side.match(request, 0) == 0
            side.build_work(output())
        assert client.asked == 0
        side.take_report(reported(serving={0: False}))
        side.take_report(reported(serving={1: True}))
        assert side.match(request, 0) == 0, "the other one"
        assert side.take_stats()["lookups_without_rank"] == 1, "a request counts once"
        side.take_report(reported(serving={0: True}))
        assert side.match(request, 0) is None
        client.answer()
        side.build_work(output())
        assert side.match(request, 0) == 12

    def test_a_lookup_in_flight_is_dropped(self) -> None:
        side, client = self.side()
        request = FakeRequest(4)
        side.on_new_request(request)
        assert side.match(request, 0) is None
        side.take_report(reported(serving={1: False}))
        assert side.match(request, 0) == 0
        assert side.outstanding()["lookups"] == 0
        client.answer()
        side.build_work(output())
        assert side.match(request, 0) == 0
        side.forget(request.request_id)
        assert not any(side.outstanding().values())

    def test_old_news_is_worth_one_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An engine at rest hears nothing of its ranks, so the first request after the outage would be computed."""
        now = [1000.0]
        monkeypatch.setattr("kvpool.vllm.health.time", SimpleNamespace(monotonic=lambda: now[0]))
        side, client = self.side()
        side.take_report(reported(serving={1: False}))
        now[0] += STALE_S + 1
        still, back = FakeRequest(4), FakeRequest(4)
        assert side.match(still, 0) is None
        side.build_work(output())
        assert side.match(still, 0) == 0, "no rank has told anything, and nobody waits for ever"
        assert client.asked == 0
        assert side.match(back, 0) is None
        side.take_report(reported(serving={1: True}))
        side.build_work(output())
        assert side.match(back, 0) is None
        client.answer()
        side.build_work(output())
        assert side.match(back, 0) == 12

    def test_reports_of_ranks_add_up(self) -> None:
        total = WorkerReport(serving={0: True}).aggregate(WorkerReport(released={1: 1}, serving={1: False}))
        assert total.serving == {0: True, 1: False}
        assert WorkerReport(serving={1: True})


def test_a_rank_tells_that_its_store_is_away_and_that_it_is_back(tmp_path: Path) -> None:
    script = tmp_path / "faults.json"

    def faults(text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(script)

    faults("[]")
    store = {"url": "kvpool.testing.faults:FaultyStore", "store": f"file://{tmp_path}/kv", "script": str(script)}
    side = WorkerSide(Config.load({"store": store}), spec(2), None, rank=Rank(1), kv_heads=[8])
    side.start([BlockLayout.of_arrays(np.zeros((64, 32), np.uint8))], {"form": "test"})
    try:
        *_, total = until(side, lambda r: 1 in r.saved, work(saves=(job(1),)))
        assert total.serving.get(1, True)
        faults('[{"kind": "raise"}]')
        *_, total = until(side, lambda r: 2 in r.loaded, work((job(2),)))
        assert total.loaded == {2: (1, False)}
        assert total.serving == {1: False}
        for _ in range(3):
            assert step(side, work()).serving == {1: False}, "it says so in every step"
        faults("[]")
        until(side, lambda r: r.serving.get(1, False), work())
        *_, total = until(side, lambda r: 3 in r.loaded, work((job(3),)))
        assert total.loaded == {3: (1, True)}
    finally:
        side.close()


@pytest.mark.long
def test_one_of_two_ranks_of_an_engine(model: Path, tmp_path: Path) -> None:
    arguments = str(model), str(tmp_path)
    [result] = outputs_of("tests.vllm.rank_away", *arguments, multiprocessing=False, ranks=2)
    cold, before, away, back = (result[name] for name in ("cold", "before", "away", "back"))
    assert before["load_jobs"] == [1, 1]
    assert before["loaded"] == [15, 15]
    assert [run["load_jobs"] for run in away] == [[2, 2]] * RUNS, "one failed load tells; then no rank is asked"
    assert [run["loaded"][1] for run in away] == [15] * RUNS
    assert [run["without"] for run in away] == list(range(RUNS))
    assert back["loaded"][1] == 30
    assert all(run["tokens"] == cold["tokens"] and not run["left"] for run in (cold, before, *away, back))
