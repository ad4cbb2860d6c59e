"""Which requests the scheduler's half looks up, loads and saves, with vLLM's own requests and block hashes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, maybe_convert_block_hash
from vllm.v1.request import Request

from kvpool.errors import LookupTimeout, TransportError
from kvpool.transport import LookupResult
from kvpool.vllm.kv_events import KVEvents
from tests.vllm.halves import BLOCK, EPOCH, FakeClient, FakePool, output, reported, scheduler, spec

_ids = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def hash_seed() -> None:
    init_none_hash(sha256)


def request(tokens: int = 17, *, skip: bool = False, image: str = "", **options: Any) -> Any:
    """A request of vLLM with ``tokens`` prompt tokens, always the same."""
    sampling = SamplingParams(max_tokens=100, skip_reading_prefix_cache=skip)
    features = None
    if image:
        place = PlaceholderRange(offset=2, length=4)
        features = [MultiModalFeatureSpec(data=None, modality="image", identifier=image, mm_position=place)]
    return Request(
        f"request-{next(_ids)}",
        list(range(tokens)),
        sampling,
        None,
        mm_features=features,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
        **options,
    )


def hit(tokens: int, age: float = 100.0) -> FakeClient:
    return FakeClient(LookupResult(tokens, (tokens,), EPOCH, age))


def answered(side: Any, client: FakeClient, asking: Any, local: int = 0) -> int:
    """What the second match call says, once the answer is there."""
    side.on_new_request(asking)
    side.match(asking, local)
    client.answer()
    side.build_work(output())
    found: int = side.match(asking, local)
    return found


class TestLookup:
    def test_a_request_that_skips_the_prefix_cache_starts_no_lookup(self) -> None:
        client = hit(12)
        side = scheduler(FakePool(64), client=client, lookup_grace_ms=0)
        assert answered(side, client, request(skip=True)) == 0
        assert client.asked == 0
        assert answered(side, client, request()) == 12

    def test_a_request_with_an_adapter_bypasses_the_pool(self) -> None:
        client = hit(12)
        side = scheduler(FakePool(64), client=client, lookup_grace_ms=0)
        adapted = request(lora_request=LoRARequest("adapter", 1, "/nowhere"))
        assert answered(side, client, adapted) == 0
        assert client.asked == 0
        assert not side.build_work(output(adapted, 16)).saves

    def test_a_small_hit_is_not_loaded(self) -> None:
        for local, expected in ((0, 12), (4, 8), (8, 0)):
            client = hit(12)
            side = scheduler(FakePool(64), client=client, lookup_grace_ms=0, min_load_tokens=8)
            assert answered(side, client, request(), local) == expected

    def test_asked_in_every_step_it_submits_once(self) -> None:
        """Under preemption vLLM asks in every step, with less and less of its own."""
        client = hit(16)
        side = scheduler(FakePool(64), client=client, lookup_grace_ms=0)
        asking = request(41)
        side.on_new_request(asking)
        for _ in range(39):
            assert side.match(asking, 12) is None
            side.build_work(output())
        assert client.asked == 1
        client.answer()
        side.build_work(output())
        for local in (12, 13, 12):
            assert side.match(asking, local) == 16 - local
        assert client.asked == 1
        # Below what was asked for the answer says nothing: the store may lack the chunks in between. The second time
        # everything is asked for, so that a count that goes on shrinking needs no third.
        for _ in range(39):
            assert side.match(asking, 8) is None
            side.build_work(output())
        assert client.asked == 2
        assert client.requests[-1].local_tokens == 0
        client.answer()
        side.build_work(output())
        for local in (8, 7, 5, 3, 0):
            assert side.match(asking, local) == 16 - local
            side.build_work(output())
        assert client.asked == 2
        assert side.outstanding()["lookups"] == 0

    def test_what_the_engine_holds_itself_is_not_asked_for(self) -> None:
        client = hit(12)
        side = scheduler(FakePool(64), client=client)
        for tokens, local in ((17, 16), (3, 0), (0, 0)):
            asking = request(tokens)
            side.on_new_request(asking)
            assert side.match(asking, local) == 0
        assert client.asked == 0

    def test_all_requests_of_a_step_share_one_grace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [0.0]
        monkeypatch.setattr("kvpool.vllm.lookups.time", SimpleNamespace(monotonic=lambda: now[0]))
        client = hit(12)
        poll = client.poll

        def waits(*, wait: float = 0.0) -> Any:
            now[0] += wait
            return poll(wait=wait)

        monkeypatch.setattr(client, "poll", waits)
        side = scheduler(FakePool(64), client=client, lookup_grace_ms=2)
        for _ in range(5):
            began = now[0]
            for asking in [request() for _ in range(20)]:
                side.on_new_request(asking)
                assert side.match(asking, 0) is None
            assert now[0] - began == pytest.approx(0.002)
            side.build_work(output())

    @pytest.mark.parametrize(
        ("error", "counted"),
        [(LookupTimeout("late"), "lookups_unanswered"), (TransportError("no"), "lookups_refused")],
    )
    def test_lookups_that_end_without_an_answer_are_counted(self, error: Any, counted: str) -> None:
        client = FakeClient(error)
        side = scheduler(FakePool(64), client=client, lookup_grace_ms=0)
        assert answered(side, client, request()) == 0
        assert side.take_stats() == {counted: 1, "lookup_replies_dropped": 2}
        assert side.take_stats() == {}


class TestFailedLoads:
    def test_after_one_a_request_is_not_looked_up_again_in_that_generation(self) -> None:
        client = hit(12)
        side = scheduler(FakePool(64), client=client, lookup_grace_ms=0)
        loading = request()
        assert answered(side, client, loading) == 12
        side.after_alloc(loading, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4],)), 12)
        (job,) = side.build_work(output()).loads
        side.take_report(reported(loaded={job.number: (1, False)}))
        for _ in range(10):
            assert side.match(loading, 0) == 0
            side.build_work(output())
        assert client.asked == 1
        side.forget(loading.request_id)
        assert answered(side, client, loading) == 12, "the same id again is a new request"
        assert side.outstanding()["loads"] == 0

    def test_what_had_been_saved_is_saved_again(self) -> None:
        """A request that was thrown out finds its own blocks gone from the store when it comes back."""
        client = hit(12)
        side = scheduler(FakePool(64), client=client, lookup_grace_ms=0)
        loading = request()
        side.on_new_request(loading)
        (saving,) = side.build_work(output(loading, 16)).saves
        side.take_report(reported(released={saving.number: 1}, saved={saving.number: (1, True)}))
        assert not side.build_work(output(loading, 16)).saves
        assert side.match(loading, 0) is None
        client.answer()
        side.build_work(output())
        assert side.match(loading, 0) == 12
        side.after_alloc(loading, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4],)), 12)
        (job,) = side.build_work(output()).loads
        side.take_report(reported(loaded={job.number: (1, False)}))
        (saving,) = side.build_work(output(loading, 16)).saves
        assert saving.parts[0].chunk_ids.tolist() == [0, 1, 2, 3]
        side.forget(loading.request_id)
        side.take_report(reported(released={saving.number: 1}, saved={saving.number: (1, True)}))
        assert not any(side.outstanding().values())

    def test_one_rank_s_failure_is_enough(self) -> None:
        client = hit(12)
        side = scheduler(FakePool(64), client=client, tensor=2, lookup_grace_ms=0)
        loading = request()
        assert answered(side, client, loading) == 12
        side.after_alloc(loading, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4],)), 12)
        (job,) = side.build_work(output()).loads
        side.take_report(reported(loaded={job.number: (1, False)}))
        side.take_report(reported(loaded={job.number: (1, True)}))
        assert side.match(loading, 0) == 0
        assert side.outstanding()["loads"] == 0

    def test_reports_of_jobs_that_nobody_knows_change_nothing(self) -> None:
        side = scheduler(FakePool(64))
        before = side.outstanding()
        side.take_report(reported(loaded={7: (1, False)}, saved={8: (1, True)}, released={9: 1}))
        assert side.outstanding() == before


class TestRanks:
    def test_ranks_of_different_layouts_switch_the_pool_off_by_name(self, caplog: pytest.LogCaptureFixture) -> None:
        client = hit(12)
        pool = FakePool(64)
        side = scheduler(pool, client=client, tensor=2, lookup_grace_ms=0)
        running = request()
        side.on_new_request(running)
        (saving,) = side.build_work(output(running, 16)).saves
        side.take_report(reported(layouts={"avx512": 1}))
        assert not caplog.records
        side.take_report(reported(layouts={"avx2": 1}))
        assert "avx2, avx512" in caplog.text
        assert answered(side, client, request()) == 0
        assert not side.build_work(output(running, 16)).saves
        side.take_report(reported(released={saving.number: 2}, saved={saving.number: (2, True)}))
        assert pool.pinned == 0, "what was in flight still ends"


class TestRoles:
    def test_a_producer_saves_and_never_asks(self) -> None:
        client = hit(12)
        side = scheduler(FakePool(64), client=client, reads=False, lookup_grace_ms=0)
        producing = request()
        assert answered(side, client, producing) == 0
        assert client.asked == 0
        assert side.build_work(output(producing, 16)).saves

    def test_a_consumer_loads_and_never_saves(self) -> None:
        client = hit(12)
        side = scheduler(FakePool(64), client=client, writes=False, lookup_grace_ms=0)
        consuming = request()
        assert answered(side, client, consuming) == 12
        assert not side.build_work(output(consuming, 16)).saves

    @pytest.mark.parametrize("switch", ["load_enabled", "save_enabled"])
    def test_a_switch_turns_off_one_direction(self, switch: str) -> None:
        client = hit(12)
        off: dict[str, Any] = {switch: False}
        side = scheduler(FakePool(64), client=client, lookup_grace_ms=0, **off)
        asking = request()
        assert bool(answered(side, client, asking)) == (switch != "load_enabled")
        assert bool(side.build_work(output(asking, 16)).saves) == (switch != "save_enabled")


class TestSave:
    @pytest.mark.parametrize(("decoded", "expected"), [(False, 4), (True, 6)])
    def test_answers_are_saved_if_that_is_wanted(self, decoded: bool, expected: int) -> None:
        side = scheduler(FakePool(64), save_decoded=decoded)
        talking = request(17)
        side.on_new_request(talking)
        stored: list[int] = []
        for step in range(8):
            for saving in side.build_work(output(talking, 17 + step)).saves:
                stored += saving.parts[0].chunk_ids.tolist()
                side.take_report(reported(released={saving.number: 1}, saved={saving.number: (1, True)}))
            talking.append_output_token_ids([900 + step])
        assert stored == list(range(expected)), "each block once, in order"

    @pytest.mark.parametrize("drafts", [False, True])
    def test_after_a_streaming_session_with_drafts_nothing_more_is_stored(
        self, drafts: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Which block vLLM hands on with wrong KV is not to be seen, so other requests of this engine count too."""
        client = hit(12)
        side = scheduler(FakePool(64), client=client, lookup_grace_ms=0, drafts=drafts)
        other = request(33)
        side.on_new_request(other)
        assert side.build_work(output(other, 16)).saves
        for session in (request(resumable=True), request(resumable=True)):
            side.on_new_request(session)
            assert bool(side.build_work(output(session, 16)).saves) is not drafts
        assert bool(side.build_work(output(other, 32)).saves) is not drafts
        assert caplog.text.count("stores nothing more") == drafts
        assert answered(side, client, request()) == 12

    def test_a_save_past_its_deadline_is_counted_and_keeps_its_pins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [1000.0]
        monkeypatch.setattr("kvpool.vllm.saves.time", SimpleNamespace(monotonic=lambda: now[0]))
        pool = FakePool(64)
        side = scheduler(pool)
        saving = request()
        side.on_new_request(saving)
        (job,) = side.build_work(output(saving, 16)).saves
        assert side.has_pending_saves()
        now[0] += side.config.save_timeout_s + 10
        assert not side.has_pending_saves()
        side.build_work(output())
        assert side.take_stats()["quarantined_saves"] == 1
        assert pool.pinned == 4
        side.take_report(reported(released={job.number: 1}, saved={job.number: (1, False)}))
        assert pool.pinned == 0

    def test_a_session_that_drops_its_last_token_saves_what_it_has_then(self) -> None:
        """With the next piece of a streamed prompt vLLM drops the last sampled token, and the hash that covers it."""
        client = hit(12, age=0.0)
        side = scheduler(FakePool(64), client=client, lookup_grace_ms=0, save_decoded=True)
        session = request(19)
        assert answered(side, client, session) == 12
        session.append_output_token_ids([900])  # completes the fifth block, and nothing was computed from it yet
        assert side.match(session, 0) is None  # thrown out, and asked for with all that it has
        dropped = session.block_hashes[4]
        assert [*client.requests[-1].hashes][4] == dropped
        del session._all_token_ids[19:], session.block_hashes[4:]
        session._all_token_ids.extend([1, 2, 3, 4, 5])
        session.update_block_hashes()
        session.num_prompt_tokens = session.num_tokens
        (saving,) = side.build_work(output(session, 24)).saves
        assert [bytes(h) for h in saving.parts[0].hashes] == session.block_hashes
        assert dropped not in session.block_hashes


class TestWhatHashesCover:
    def hashes(self, **options: Any) -> list[bytes]:
        return list(request(**options).block_hashes)

    def test_requests_of_two_salts_share_nothing(self) -> None:
        plain, one, two = self.hashes(), self.hashes(cache_salt="one"), self.hashes(cache_salt="two")
        assert one == self.hashes(cache_salt="one")
        assert not {*plain} & {*one} | {*one} & {*two} | {*plain} & {*two}

    def test_requests_of_two_images_share_nothing_from_the_image_on(self) -> None:
        plain, one, two = self.hashes(), self.hashes(image="1"), self.hashes(image="2")
        assert one == self.hashes(image="1")
        assert not {*plain} & {*one} | {*one} & {*two} | {*plain} & {*two}

    def test_what_is_saved_and_asked_for_carries_them(self) -> None:
        salted = request(cache_salt="one")
        client = hit(12)
        side = scheduler(FakePool(64), client=client, lookup_grace_ms=0)
        side.on_new_request(salted)
        assert side.match(salted, 0) is None
        assert [bytes(h) for h in client.requests[0].hashes] == salted.block_hashes
        (saving,) = side.build_work(output(salted, 16)).saves
        assert [bytes(h) for h in saving.parts[0].hashes] == salted.block_hashes


def told(hashes: list[Any]) -> list[Any]:
    return [maybe_convert_block_hash(block_hash) for block_hash in hashes]


class TestEvents:
    def side(self, client: FakeClient | None = None) -> Any:
        return scheduler(FakePool(64), client=client, lookup_grace_ms=0, events=KVEvents(spec(), "STORAGE"))

    def save(self, side: Any, saving: Any, *, ok: bool = True, **report: Any) -> None:
        (job,) = side.build_work(output(saving, 16)).saves
        report = {"skipped": {job.number}} if report.get("skipped") else {}
        side.take_report(reported(released={job.number: 1}, saved={job.number: (1, ok)}, **report))

    def test_blocks_are_told_once_they_are_stored(self) -> None:
        side, saving = self.side(), request(cache_salt="salt")
        side.on_new_request(saving)
        assert side.take_events() == []
        self.save(side, saving)
        (event,) = side.take_events()
        assert isinstance(event, BlockStored)
        assert event.block_hashes == told(saving.block_hashes)
        assert event.parent_block_hash is None
        assert event.token_ids == list(range(16))
        assert (event.block_size, event.medium, event.group_idx) == (BLOCK, "STORAGE", 0)
        assert event.extra_keys is not None
        assert "salt" in str(event.extra_keys[0])
        assert side.take_events() == []

    def test_a_later_part_names_its_parent(self) -> None:
        side, saving = self.side(), request(33)
        side.on_new_request(saving)
        for computed in (16, 32):
            (job,) = side.build_work(output(saving, computed)).saves
            side.take_report(reported(released={job.number: 1}, saved={job.number: (1, True)}))
        _, event = side.take_events()
        assert [event.parent_block_hash] == told(saving.block_hashes[3:4])
        assert event.block_hashes == told(saving.block_hashes[4:])
        assert event.token_ids == list(range(16, 32))

    def test_what_was_not_stored_is_not_told(self) -> None:
        for report in ({"ok": False}, {"skipped": True}):
            side, saving = self.side(), request()
            side.on_new_request(saving)
            self.save(side, saving, **report)
            assert side.take_events() == []

    def test_a_failed_load_takes_them_back(self) -> None:
        client = hit(12)
        side, loading = self.side(client), request()
        assert answered(side, client, loading) == 12
        side.after_alloc(loading, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4],)), 12)
        (job,) = side.build_work(output()).loads
        side.take_report(reported(loaded={job.number: (1, False)}))
        (event,) = side.take_events()
        assert isinstance(event, BlockRemoved)
        assert event.block_hashes == told(loading.block_hashes[:3])
        assert event.medium == "STORAGE"

    def test_a_reset_clears_and_what_ends_after_it_is_not_told(self) -> None:
        side, saving = self.side(), request()
        side.on_new_request(saving)
        (job,) = side.build_work(output(saving, 16)).saves
        side.reset()
        side.take_report(reported(released={job.number: 1}, saved={job.number: (1, True)}))
        assert side.take_events() == [AllBlocksCleared()]
