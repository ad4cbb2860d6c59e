"""The benchmark that compares connectors, in its smallest form: both reuse, and every answer is what was computed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_beside_vllms_own_connector(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.vllm_mooncake", "--tiny", "--json", str(results)],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout
    rows = re.findall(r"^ +(\d+)(?: +\d+){4} +[\d.]+ +(\d+)/(\d+)$", done.stdout, re.MULTILINE)
    assert rows == [("256", "224", "224"), ("512", "480", "480")]
    assert "Every answer of B is what A computed." in done.stdout
    assert re.search(r"^kvpool +[\d.]+ us, ratio [\d.]+ \(quartiles", done.stdout, re.MULTILINE)
    result = json.loads(results.read_text())
    assert not any(run["cached"] for side in result["reuse"]["A"].values() for runs in side.values() for run in runs)
    assert all(run["did"]["loaded_chunks"] for runs in result["reuse"]["B"]["kvpool"].values() for run in runs)
    assert len(result["cpu"]) == 2
