"""A third party's store is used by configuration alone: by the scheme that its package registers, or by its class."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import tomllib
from contextlib import closing
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]

USER = """
import anyio
from kvpool.config import Config
from kvpool.memory import Buffers
from kvpool.registry import create_store, known_names

async def main():
    async with create_store(Config.load().store) as store:
        target = bytearray(5)
        await store.put(["key"], Buffers.of(bytearray(b"value")))
        await store.get_into(["key"], Buffers.of(target))
        print(type(store).__name__, target.decode(), "sqlite" in known_names("stores"))

anyio.run(main)
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder for the import path, as if the package had been installed there from its pyproject.toml."""
    project = tomllib.loads((Path(__file__).parent / "pyproject.toml").read_text())["project"]
    folder = tmp_path / "site"
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (folder / "third_party_store.py").write_text((PROJECT / "examples" / "third_party_store.py").read_text())
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in groups]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize("name", ["sqlite://", "third_party_store:SQLiteStore"])
def test_used_by_configuration_alone(name: str, installed: Path, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": f"{installed}:{PROJECT}", "KVPOOL_STORE": f"{name}?path={tmp_path}/db"}
    done = subprocess.run(
        [sys.executable, "-c", USER],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("SQLiteStore value True\n", 0), done.stderr
    with closing(sqlite3.connect(tmp_path / "db")) as db:
        assert db.execute("SELECT key, value FROM kv").fetchall() == [("key", b"value")]
