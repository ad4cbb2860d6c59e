"""The benchmarks that start engines, in their smallest form: they run, and what they say of correctness holds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest


def _run(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, timeout=280, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout
    return done.stdout


def test_demo(tmp_path: Path) -> None:
    """``make demo-vllm``: B reuses all of A's prompts but the last block, and answers alike."""
    plot, results = tmp_path / "plot.svg", tmp_path / "results.json"
    out = _run("benchmarks.vllm_reuse", "--tiny", "--plot", str(plot), "--json", str(results))
    rows = re.findall(r"^ +(\d+) +\d+ ms +\d+ ms +[\d.]+x +(\d+)$", out, re.MULTILINE)
    assert rows == [("256", "224"), ("512", "480")]
    assert "Every answer of B is A's." in out
    result = json.loads(results.read_text())
    assert all(not run["cached"] and run["did"]["saved_chunks"] for runs in result["cold"].values() for run in runs)
    assert len(result["turns"]) == 2
    assert re.search(r"^with it .* us, ratio [\d.]+ \(quartiles [\d.]+ to [\d.]+\)$", out, re.MULTILINE)
    words = [element.text for element in ElementTree.parse(plot).iter() if element.text]
    assert {"256 tokens", "512 tokens"} <= set(words)


@pytest.mark.long
@pytest.mark.parametrize("how", [[], ["--apart"]], ids=["shared cores", "apart"])
def test_steps(how: list[str], tmp_path: Path) -> None:
    """All sides take their steps, and the pool is at work where it should be, and only there."""
    results = tmp_path / "results.json"
    out = _run("benchmarks.vllm_step", "--runs", "1", "--steps", "60", "--json", str(results), *how)
    for quantile in (50, 90, 99):
        found = re.findall(rf"^  p{quantile} (\w[\w ]+\w) +\d+ +[\d.]+ +[\d.]+ to [\d.]+ +\d+ +\d+$", out, re.MULTILINE)
        assert found == 2 * ["saves", "full speed", "idle store", "no kvpool"]
    result = json.loads(results.read_text())
    assert all(len(run["steps"]["decode"]) > 40 and run["steps"]["prefill"] for [run] in result.values())
    moved = {
        side: {what for what in ("saved", "loaded") if run["did"].get(f"{what}_bytes")}
        for side, [run] in result.items()
    }
    both = {"saved", "loaded"}
    assert moved == {
        "without": set(),
        "saves": {"saved"},
        "full speed": both,
        "idle store": both,
        "no kvpool": set(),
    }
