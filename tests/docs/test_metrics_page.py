"""docs/metrics.md has every counter with its HELP text."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTIONS = re.split(r"^## .*$", (ROOT / "docs" / "metrics.md").read_text(), flags=re.MULTILINE)


def counters(path: str, name: str) -> list[tuple[str, str]]:
    """The counters of a class and what they count, read from its source: that of the connector needs vLLM."""
    tree = ast.parse((ROOT / path).read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    fields = [node for node in found.body if isinstance(node, ast.AnnAssign)]
    return [(ast.unparse(f.target), ast.literal_eval(f.value.args[0])) for f in fields if isinstance(f.value, ast.Call)]


@pytest.mark.parametrize(
    ("section", "path", "name"),
    [(1, "kvpool/metrics.py", "Counters"), (2, "kvpool/vllm/stats.py", "ConnectorCounters")],
)
def test_every_counter_with_its_help(section: int, path: str, name: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", SECTIONS[section], re.MULTILINE)
    assert rows == counters(path, name)
    assert len(rows) > 5
