"""The import contract is kept, and it would notice if it were not."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT = "import sys; from importlinter.cli import lint_imports_command; sys.path.insert(0, '.'); lint_imports_command()"


def lint(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the package in ``folder``."""
    return subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache", "--no-logo", *args],
        cwd=folder,
        env={"COLUMNS": "400"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package to break, the links of kvpool/ as folders."""
    folder = tmp_path_factory.mktemp("contract")
    shutil.copytree(ROOT / "kvpool", folder / "kvpool", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_the_contract_is_kept(copy: Path) -> None:
    done = lint(copy)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    ("contract", "module", "line"),
    [
        ("backends", "kvpool/anything.py", "from kvpool.backends.memory import MemoryStore"),
        ("backends", "kvpool/vllm/anything.py", "import kvpool.backends.memory"),
        ("backends", "kvpool/protocols/anything.py", "import kvpool.backends.memory"),
        ("protocols", "kvpool/anything.py", "import kvpool.protocols.binary"),
        ("protocols", "kvpool/backends/anything.py", "import kvpool.protocols.binary"),
        ("outer", "kvpool/anything.py", "import kvpool.vllm"),
        ("outer", "kvpool/backends/anything.py", "import kvpool.vllm"),
        ("command-line", "kvpool/anything.py", "import kvpool.replay.trace"),
        ("below-the-pool", "kvpool/backends/anything.py", "import kvpool.pool"),
        ("engines", "kvpool/anything.py", "def f() -> None:\n    import torch"),
        ("engines", "kvpool/attention/anything.py", "import vllm.config"),
        ("engines", "kvpool/backends/anything.py", "import vllm"),
    ],
)
def test_a_violation_is_named(copy: Path, contract: str, module: str, line: str) -> None:
    (copy / module).write_text(line + "\n")
    try:
        done = lint(copy, "--contract", contract)
    finally:
        (copy / module).unlink()
    source = module.removesuffix(".py").replace("/", ".")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(rf"\b{source} -> ", done.stdout), done.stdout + done.stderr
