"""Shared fixtures: every async test runs on asyncio and on trio. What cannot run is named, never skipped in silence."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

#: Every test in these folders needs the real vLLM and gets the marker ``vllm``.
VLLM_FOLDERS = {Path(__file__).parent / "vllm", Path(__file__).parent / "differential"}


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The event loop of an ``anyio`` test."""
    return str(request.param)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without vLLM these folders cannot be imported: leave them out if ``-m`` does, else say what is missing."""
    if collection_path not in VLLM_FOLDERS or find_spec("vllm"):
        return None
    if "not vllm" in str(config.getoption("markexpr")):
        return True
    raise pytest.UsageError(
        f"{collection_path}: these tests need the real vLLM, which is not installed: `make test` installs it (for "
        "CPUs); `make test-fast` or -m 'not vllm' leaves them out"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if VLLM_FOLDERS.intersection(item.path.parents):
            item.add_marker(pytest.mark.vllm)
