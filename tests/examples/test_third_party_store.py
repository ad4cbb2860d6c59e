"""A store that nobody registered, used by its URL alone."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from kvpool.errors import ConfigError, StoreClosed, StoreError
from kvpool.registry import create_store
from kvpool.store import Store
from kvpool.testing.stores import StoreConformance
from third_party_store import SQLiteStore
from tiny_engine.engine import Engine
from tiny_engine.model import Model, ModelConfig
from tiny_engine.sharing import Sharing

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


class TestSQLiteStore(StoreConformance[Path]):
    """What a third party runs to know that its store keeps the contract."""

    open_close_cycles: ClassVar[int] = 30
    examples: ClassVar[int] = 5

    @contextmanager
    def place(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as directory:
            yield Path(directory) / "kv.db"

    def store(self, place: Path) -> Store:
        return SQLiteStore(str(place))

    def raw_read(self, place: Path, key: str) -> bytes | None:
        with closing(sqlite3.connect(place)) as db:
            row = db.execute("SELECT value FROM kv WHERE key = ?", (key,)).fetchone()
        return None if row is None else bytes(row[0])

    def raw_write(self, place: Path, key: str, value: bytes) -> None:
        with closing(sqlite3.connect(place)) as db, db:
            db.execute("INSERT INTO kv VALUES (?, ?)", (key, value))


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
