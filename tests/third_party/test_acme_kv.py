"""A third party's store is used by configuration alone, and the shipped suite checks it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest

from kvpool.errors import ConfigError
from kvpool.registry import create_store
from kvpool.store import Store
from kvpool.testing.stores import StoreConformance
from tests.third_party.acme_kv.acme_kv import AcmeStore, raw

PACKAGE = Path(__file__).parent / "acme_kv"

USER = """
import anyio
from kvpool.config import Config
from kvpool.memory import Buffers
from kvpool.registry import create_store

async def main():
    async with create_store(Config.load().store) as store:
        target = bytearray(5)
        await store.put(["key"], Buffers.of(bytearray(b"value")))
        await store.get_into(["key"], Buffers.of(target))
        print(type(store).__name__, target.decode())

anyio.run(main)
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder for the import path, as if the package had been installed there from its pyproject.toml."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    folder = tmp_path / "site"
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (folder / "acme_kv.py").write_text((PACKAGE / "acme_kv.py").read_text())
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in groups]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize("name", ["acme://", "acme_kv:AcmeStore"])
def test_used_by_configuration_alone(name: str, installed: Path, tmp_path: Path) -> None:
    environment = {
        "PYTHONPATH": f"{installed}:{Path(__file__).parents[2]}",
        "KVPOOL_STORE": f"{name}?path={tmp_path}/db",
    }
    done = subprocess.run(
        [sys.executable, "-c", USER],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("AcmeStore value\n", 0), done.stderr
    assert raw(f"{tmp_path}/db", "SELECT value FROM kv WHERE key = 'key'") == [(b"value",)]


def test_its_options_are_checked_like_ours() -> None:
    with pytest.raises(ConfigError, match=r"unknown option pth='/x'; did you mean 'path'\?"):
        create_store("tests.third_party.acme_kv.acme_kv:AcmeStore?pth=/x")


class TestAcmeStore(StoreConformance[str]):
    open_close_cycles: ClassVar[int] = 100

    @contextmanager
    def place(self) -> Iterator[str]:
        with tempfile.TemporaryDirectory() as folder:
            yield f"{folder}/db"

    def store(self, place: str) -> Store:
        return AcmeStore(place)

    def raw_read(self, place: str, key: str) -> bytes | None:
        rows = raw(place, "SELECT value FROM kv WHERE key = ?", key)
        return bytes(rows[0][0]) if rows else None

    def raw_write(self, place: str, key: str, value: bytes) -> None:
        raw(place, "INSERT INTO kv VALUES (?, ?)", key, value)
