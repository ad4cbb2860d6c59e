"""Real vLLM engines. One engine at a time lives in the test process; a module's engine is closed when it ends."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests.vllm.faults import Faults
from tests.vllm.models import write_deepseek_v3, write_llama, write_qwen3_next

_cache = tempfile.TemporaryDirectory(prefix="kvpool-tests-")  # kept until this process ends
os.environ["XDG_CACHE_HOME"] = _cache.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama-like model."""
    return write_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Full and sliding-window layers: three groups that share one block pool and the same bytes."""
    return write_llama(tmp_path_factory.mktemp("models") / "tiny-hybrid", pattern="SSFSSF")


@pytest.fixture(scope="session")
def mamba_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Linear attention, whose states vLLM keeps as Mamba groups do, and full attention; bf16."""
    return write_qwen3_next(tmp_path_factory.mktemp("models") / "tiny-qwen3-next")


@pytest.fixture(scope="session")
def mla_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Multi-head latent attention: one latent a token, shared by all heads."""
    return write_deepseek_v3(tmp_path_factory.mktemp("models") / "tiny-deepseek-v3")


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    """What the store of a module's engine does wrong."""
    return Faults(tmp_path_factory.mktemp("faults") / "script.json")
