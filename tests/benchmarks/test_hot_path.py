"""The benchmark of the hot paths runs, compares the answers of both sides, and names every row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = {
    "lookup_full16_hit": 8,
    "lookup_full16_miss": 300,
    "lookup_full16_local90": 30,
    "lookup_full16_first10": 20,
    "lookup_five_hit": 50,
    "lookup_five_miss": 300,
    "load_mask_five": 20,
    "store_mask_five": 10,
    "save_keys_five": 5,
    "save_keys_five_last256": 5,
    "addresses_warm": 50,
    "addresses_cold": 1.2,
    "lookup_server_cpu": 2,
    "lookup_32_concurrent_p99": 8,
}


@pytest.mark.vllm
def test_every_row_is_measured(tmp_path: Path) -> None:
    """With a short prompt: what the ratios are is for ``make bench``, on a machine that does nothing else."""
    found, plot = tmp_path / "found.json", tmp_path / "plot.svg"
    options = ["--tokens", "4096", "--runs", "1", "--run-seconds", "0", "--json", str(found), "--plot", str(plot)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.hot_path", *options], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(found.read_text())
    assert set(told["ratios"]) == set(ROWS)
    assert {name: row["at_least"] for name, row in told["rows"].items()} == ROWS
    assert all(ratio > 0 for ratio in told["ratios"].values())
    assert set(told["delayed"]) == {"0.5", "2.0"}
    assert all(name in plot.read_text() for name in ROWS)
    for name, row in told["rows"].items():
        if name.startswith("lookup"):
            assert row["counts"]["keys"] <= row["counts"]["reference keys"]
            assert row["counts"]["reference waves"] == 1
            assert row["counts"]["waves"] <= 3
