"""Shared fixtures: every async test runs on asyncio and on trio. What cannot run is named, never skipped in silence."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.vllm.engine import ENVIRONMENT

# Here, since torch and what vLLM imports read some of it once, and the first folder that is collected imports them.
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

#: Every test in these folders needs the real vLLM and gets the marker ``vllm``.
VLLM_FOLDERS = {Path(__file__).parent / name for name in ("vllm", "differential", "mooncake/vllm")}


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The event loop of an ``anyio`` test."""
    return str(request.param)


def pytest_configure(config: pytest.Config) -> None:
    """Tests that were asked for and need vLLM cannot go unnoticed where there is none."""
    if find_spec("vllm") or "not vllm" in str(config.getoption("markexpr")):
        return
    asked = [(config.invocation_params.dir / arg.partition("::")[0]).resolve() for arg in config.args]
    if any(path.is_relative_to(folder) or folder.is_relative_to(path) for path in asked for folder in VLLM_FOLDERS):
        raise pytest.UsageError(
            "some of these tests need the real vLLM, which is not installed: `make test` installs it (for CPUs); "
            "`make test-fast` or -m 'not vllm' leaves them out"
        )


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without vLLM these folders cannot even be imported."""
    return True if collection_path in VLLM_FOLDERS and not find_spec("vllm") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if VLLM_FOLDERS.intersection(item.path.parents):
            item.add_marker(pytest.mark.vllm)
