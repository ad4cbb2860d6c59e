"""The code in the engine guide runs as it stands, block by block."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "bring-your-own-engine.md"


@pytest.mark.anyio
async def test_engine_guide() -> None:
    text = GUIDE.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) >= 7
    names: dict[str, Any] = {}
    for block in blocks:
        lines = "\n" * text.count("\n", 0, block.start(1))  # so that a failure names the line of the page
        code = compile(lines + block[1], str(GUIDE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, names)
        if inspect.isawaitable(result):
            await result


def test_links_of_the_guide_and_the_readme_exist() -> None:
    for page in (GUIDE, GUIDE.parents[1] / "examples" / "README.md"):
        links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
        assert links
        for link in links:
            assert (page.parent / link).exists(), f"{page.name}: {link}"
