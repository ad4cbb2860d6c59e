"""What the pages say holds: every ```python block runs as it stands, every link between files leads somewhere."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from types import CodeType
from typing import Any

import anyio
import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md"), *(ROOT / "examples").glob("*.md")])
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[CodeType]:
    """The ```python blocks of a page, compiled so that a failure names the line of the page."""
    text = page.read_text()
    return [
        compile("\n" * text.count("\n", 0, fence.start(2)) + fence[2], page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for fence in FENCE.finditer(text)
        if fence[1] == "python"
    ]


CODE = {page: found for page in PAGES if (found := blocks(page))}


def test_pages_are_found() -> None:
    assert {"README.md", "CHANGELOG.md", "docs/index.md"} <= {name(page) for page in PAGES}
    assert ROOT / "README.md" in CODE


@pytest.mark.parametrize("page", CODE, ids=name)
def test_code_runs(page: Path, anyio_backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run in order and share their names; if one awaits, all run in one async program."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__page__"}

    async def program() -> None:
        with anyio.fail_after(60):
            for code in CODE[page]:
                result = eval(code, names)
                if inspect.isawaitable(result):
                    await result

    if any(code.co_flags & inspect.CO_COROUTINE for code in CODE[page]):
        anyio.run(program, backend=anyio_backend)
    else:
        for code in CODE[page]:
            exec(code, names)


@pytest.mark.parametrize("page", CODE, ids=name)
def test_a_page_says_where_its_awaits_belong(page: Path) -> None:
    """Such a block does not run when it is pasted into a script."""
    awaits = any(code.co_flags & inspect.CO_COROUTINE for code in CODE[page])
    assert not awaits or "`async def`, run by `anyio.run`" in page.read_text()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.*)$", FENCE.sub("", target.read_text()), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, link


def test_index_names_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if f"]({page.name})" not in index]
    assert missing == ["index.md"]


def test_architecture_names_every_room() -> None:
    """Modules of the core, stores and protocols; private ones are their owner's business."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = [path.stem for path in (ROOT / "kvpool").glob("[a-z]*.py")]
    rooms += [f"{path.parent.name}/" for path in (ROOT / "kvpool").glob("[a-z]*/__init__.py")]
    rooms += [path.stem for path in ROOT.glob("backends/[a-z]*.py")] + [
        p.stem for p in ROOT.glob("protocols/[a-z]*.py")
    ]
    assert [room for room in rooms if f"`{room}`" not in text] == []
