"""Scripts in a process of their own, with the installed vLLM or another release that is supported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import vllm

from tests.vllm.engine import ENVIRONMENT, environment

__all__ = ["OTHERS", "run"]

ROOT = Path(__file__).parents[2]
#: What `make` has unpacked, by release.
OTHERS = {f"0.{minor}": f"0.{minor}.0" for minor in (30, 31)}


def run(module: str, *arguments: object, release: str | None = None) -> None:
    """``python -m MODULE ARGUMENTS... VERSION``; fails with what it printed unless that ends with PASSED."""
    path, version = [str(ROOT)], vllm.__version__
    if release is not None:
        version = OTHERS[release]
        wheel = Path(sys.prefix) / f"vllm-{version}"
        assert wheel.is_dir(), f"vLLM {version} is not unpacked in {wheel}: run `make vllm-versions`"
        path.insert(0, str(wheel))
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments), version],
        cwd=ROOT,
        env=environment() | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.stdout.rstrip().endswith("PASSED"), done.stdout[-2000:] + done.stderr[-4000:]
