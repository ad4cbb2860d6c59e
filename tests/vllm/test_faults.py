"""What happens to a real engine when the store loses or damages what it promised.

Policy "recompute": outputs equal to cold within fp32 rounding, every request ends, no block leaks. Policy "fail": the
request ends with an error and the engine goes on.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.vllm.engine import BLOCK, Engine, prompt

BLOCKS = 1000 // BLOCK


class Directory:
    """The file store's directory, seen from outside: the objects of the full-attention group."""

    def __init__(self, root: Path, group: int) -> None:
        self.root = root
        self.name = f"{group}.0"

    def objects(self) -> list[Path]:
        """The files of stored blocks, oldest first."""
        return sorted((p for p in self.root.rglob("*") if p.is_file() and self.name in p.parts), key=_written)

    def group(self) -> Path:
        """The folder that holds all blocks of the one group."""
        (folder,) = {Path(*p.parts[: p.parts.index(self.name) + 1]) for p in self.objects()}
        return folder

    def clear(self) -> None:
        for path in list(self.root.iterdir()):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns


def missing(store: Directory) -> None:
    store.objects()[10].unlink()


def truncated(store: Directory) -> None:
    path = store.objects()[10]
    path.write_bytes(path.read_bytes()[:-100])


def header_cut(store: Directory) -> None:
    path = store.objects()[10]
    path.write_bytes(path.read_bytes()[:7])


def empty(store: Directory) -> None:
    store.objects()[10].write_bytes(b"")


def flipped(store: Directory) -> None:
    path = store.objects()[10]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def foreign(store: Directory) -> None:
    """Whole and well-formed, but another block's bytes."""
    one, other = store.objects()[10:12]
    one.write_bytes(other.read_bytes())


def a_directory(store: Directory) -> None:
    path = store.objects()[10]
    path.unlink()
    path.mkdir()


def unreadable(store: Directory) -> None:
    """A file stands where the directory was: every access fails, for root too."""
    folder = store.group()
    shutil.rmtree(folder)
    folder.write_text("not a directory")


def deleted(store: Directory) -> None:
    store.clear()


#: How a chunk can fail to load.
FAILURES = ("missing", "late", "failed", "corrupt")
FAULTS = [missing, truncated, header_cut, empty, flipped, foreign, a_directory, unreadable, deleted]


LONG = pytest.param("hybrid_model-fail", marks=pytest.mark.long)


@pytest.fixture(scope="module", params=["model-recompute", "model-fail", "hybrid_model-recompute", LONG])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    name, policy = request.param.split("-")
    root = tmp_path_factory.mktemp("store")
    config = {"store": f"file://{root}", "failed_key_ttl_s": 0}
    engine = Engine(request.getfixturevalue(name), config, policy=policy, kv_bytes=64 << 20)
    engine.directory = Directory(root, engine.groups - 1)  # type: ignore[attr-defined]
    engine.policy = policy  # type: ignore[attr-defined]
    yield engine
    engine.close()


@pytest.fixture
def store(engine: Engine) -> Directory:
    """An empty store for each test."""
    directory: Directory = engine.directory  # type: ignore[attr-defined]
    engine.forget()
    directory.clear()
    return directory


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("when", ["before-lookup", "before-load"])
def test_damage(engine: Engine, store: Directory, fault: Callable[[Directory], None], when: str) -> None:
    tokens = prompt(1000, seed=20)
    cold = engine.run(tokens)
    engine.forget()
    assert len(store.objects()) == BLOCKS
    hurt: list[int] = []
    before = engine.counters

    def strike() -> None:
        if not hurt:
            hurt.append(1)
            fault(store)

    if when == "before-lookup":
        strike()
        done = engine.run(tokens)
    else:
        with _before_load(engine, strike):
            done = engine.run(tokens)
    assert hurt
    told = engine.counters
    failures = sum(told[f"load_{kind}_chunks"] - before[f"load_{kind}_chunks"] for kind in FAILURES)
    # A miss that the lookup already sees is no failure: then the engine computes the rest under either policy.
    seen_early = when == "before-lookup" and fault not in (truncated, flipped, foreign)
    assert (failures > 0) == (not seen_early)
    if engine.policy == "recompute" or seen_early:  # type: ignore[attr-defined]
        assert done.near(cold)
        assert done.finish == "length"
    else:
        assert done.finish == "error"
    engine.assert_at_rest()
    # The engine goes on, and what was damaged can be stored and loaded again.
    engine.forget()
    store.clear()
    assert engine.run(tokens).near(cold)
    engine.forget()
    again = engine.run(tokens)
    assert again.near(cold)
    assert again.cached == 1000 // BLOCK * BLOCK
    engine.assert_at_rest()


def test_a_failed_load_stores_what_was_computed_again(engine: Engine, store: Directory) -> None:
    tokens = prompt(1000, seed=21)
    engine.run(tokens)
    engine.forget()
    flipped(store)
    engine.run(tokens)
    engine.forget()
    # Under "fail" the request ended before anything was computed; the damaged object is gone either way.
    assert len(store.objects()) == (BLOCKS if engine.policy == "recompute" else BLOCKS - 1)  # type: ignore[attr-defined]
    done = engine.run(tokens)
    assert done.finish == "length"
    assert (done.cached == 1000 // BLOCK * BLOCK) == (engine.policy == "recompute")  # type: ignore[attr-defined]


class _before_load:  # noqa: N801
    """Runs ``strike`` after the lookup has answered and before the load begins."""

    def __init__(self, engine: Engine, strike: Callable[[], None]) -> None:
        self.connector, self.strike = engine.connector, strike

    def __enter__(self) -> None:
        original = self.connector.after_alloc

        def hooked(request: object, blocks: object, external: int) -> None:
            original(request, blocks, external)
            if external > 0:
                self.strike()

        self.connector.after_alloc = hooked

    def __exit__(self, *exc: object) -> None:
        del self.connector.after_alloc
