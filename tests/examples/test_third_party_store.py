"""A store that nobody registered, used by its URL alone."""

from __future__ import annotations

from pathlib import Path

import anyio
import numpy as np
import pytest
from third_party_store import SQLiteStore
from tiny_engine.engine import Engine
from tiny_engine.model import Model, ModelConfig
from tiny_engine.sharing import Sharing

from kvpool.errors import ConfigError, StoreClosed, StoreError
from kvpool.memory import Buffers
from kvpool.registry import create_store
from kvpool.store import ABSENT, PRESENT, UNKNOWN, Status

pytestmark = pytest.mark.anyio
SMALL = ModelConfig(hidden_size=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn_size=96, max_tokens=1024)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"third_party_store:SQLiteStore?path={tmp_path / 'kv.db'}"


async def test_engines_share_through_it(url: str) -> None:
    model, prompt = Model(SMALL), list(range(200))
    answers = []
    for expected in (0, 192):
        memory = model.new_kv(32, 16)
        async with Sharing.open(url, model, memory) as sharing:
            answer = await Engine(model, memory, sharing=sharing).generate(prompt, 3)
            assert answer.loaded_tokens == expected
            answers.append(answer)
    np.testing.assert_array_equal(answers[0].logits, answers[1].logits)


async def test_two_stores_see_one_database(url: str) -> None:
    value = bytearray(b"0123456789")
    into = [bytearray(10), bytearray(10), bytearray(9)]
    async with create_store(url) as one, create_store(url) as other:
        assert (await one.put(["a"], Buffers.of(value))).nbytes.tolist() == [10]
        again = await other.put(["a"], Buffers.of(bytearray(b"something else")))
        assert (again.status.tolist(), again.nbytes.tolist()) == ([Status.OK], [0])
        assert (await other.exists(["b", "a", "b"])).tolist() == [ABSENT, PRESENT, ABSENT]
        got = await other.get_into(["a", "b", "a"], Buffers.of(*into))
        assert got.status.tolist() == [Status.OK, Status.ABSENT, Status.CORRUPT]
        assert into[0] == value
        assert (await one.delete(["a", "a"])).status.tolist() == [Status.OK, Status.ABSENT]
        assert (await other.exists(["a"])).tolist() == [ABSENT]


async def test_a_passed_deadline_is_not_an_answer(url: str) -> None:
    async with create_store(url) as store:
        past = anyio.current_time() - 1
        assert (await store.exists(["a"], deadline=past)).tolist() == [UNKNOWN]
        put = await store.put(["a"], Buffers.of(bytearray(3)), deadline=past)
        assert put.status.tolist() == [Status.TIMED_OUT]
        assert (await store.exists(["a"])).tolist() == [ABSENT]


async def test_it_opens_once_and_says_what_is_wrong(url: str, tmp_path: Path) -> None:
    store = create_store(url)
    with pytest.raises(StoreClosed, match="not open yet"):
        await store.exists(["a"])
    async with store:
        pass
    with pytest.raises(StoreClosed, match="closed"):
        await store.exists(["a"])
    with pytest.raises(StoreClosed, match="opened before"):
        await store.__aenter__()
    with pytest.raises(ConfigError, match="path"):
        create_store("third_party_store:SQLiteStore")
    with pytest.raises(StoreError, match="unable to open"):
        async with SQLiteStore(str(tmp_path / "no" / "such" / "directory.db")):
            pass
