"""docs/mooncake.md has every option with its default, and a row for every fault that is tested."""

from __future__ import annotations

import re
from pathlib import Path

from kvpool.backends._mooncake_url import Options
from tests.mooncake.faults import SCENARIOS

PAGE = (Path(__file__).parents[2] / "docs" / "mooncake.md").read_text()


def test_options_and_their_defaults() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|([^|]*)\|", PAGE, re.MULTILINE))
    assert list(rows) == list(Options.model_fields)
    written = {name: text.strip(" `") for name, text in rows.items() if "`" in text}
    assert Options.model_validate(written) == Options()
    assert {name for name in rows if name not in written} == {name for name, value in Options() if value == ""}


def test_faults() -> None:
    for scenario in SCENARIOS.values():
        assert f"\n| {scenario.what} |" in PAGE
