"""The examples are scripts next to each other, not an installed package: make them importable."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # many small products: threads would only wait for each other


@pytest.fixture
def examples() -> Path:
    """The directory of the examples."""
    return EXAMPLES


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late lookup is a miss: on a busy machine that would look like a fault."""
    monkeypatch.setenv("KVPOOL_LOOKUP_TIMEOUT_MS", "10000")


@pytest.fixture
def example_environment(patient: None) -> dict[str, str]:
    """An environment in which an example runs as a script from a checkout."""
    path = os.pathsep.join(filter(None, (str(EXAMPLES.parent), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}
