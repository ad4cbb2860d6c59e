"""What a user gets: the sdist, the wheel built from it, and an editable install, each in a clean environment."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: The rooms that the core install cannot import, and what they lack: the extras `vllm` and `testing` bring it.
NEEDS = {"kvpool.vllm": {"torch", "vllm"}, "kvpool.testing": {"hypothesis", "pytest"}}
TOP_LEVEL = ("backends", "protocols", "tests", "examples", "benchmarks", "docs")

#: Runs in the installed environment, in an empty folder: import everything, say what failed for want of which module.
PROBE = """
import importlib, importlib.util, json, pkgutil, sys
import kvpool
missing = {}
def load(name):
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing[name] = error.name
def walk(package):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        names.append(module.name)
        loaded = load(module.name)
        if module.ispkg and loaded:
            walk(loaded)
names = ["kvpool"]
walk(kvpool)
tops = [name for name in sys.argv[1:] if importlib.util.find_spec(name)]
print(json.dumps({"file": kvpool.__file__, "names": names, "missing": missing, "tops": tops}))
"""


def modules(*, without: Container[str]) -> set[str]:
    """Every module of the checkout by import name; folders that are links are followed."""
    found = set()

    def walk(folder: Path, name: str) -> None:
        if name in without:
            return
        found.add(name)
        for path in folder.iterdir():
            if (path / "__init__.py").exists():
                walk(path, f"{name}.{path.name}")
            elif path.suffix == ".py" and path.name != "__init__.py":
                found.add(f"{name}.{path.stem}")

    walk(ROOT / "kvpool", "kvpool")
    return found


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of this checkout and the wheel that was built from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a clean virtual environment."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    return folder / "venv" / "bin" / "python"


@dataclass(frozen=True)
class Installed:
    """``file``: where kvpool was imported from. ``names``: modules seen. ``missing``: by module, what it lacked."""

    file: Path
    names: set[str]
    missing: dict[str, str]
    tops: list[str]


@pytest.fixture(scope="module", params=["wheel", "editable"])
def installed(request: pytest.FixtureRequest, environment: Path, dist: Path) -> Installed:
    """The clean environment with kvpool installed one way; the second way replaces the first."""
    what = [next(dist.glob("*.whl"))] if request.param == "wheel" else ["--editable", ROOT]
    cwd = dist / "elsewhere"
    cwd.mkdir(exist_ok=True)
    run(environment, "-m", "pip", "--disable-pip-version-check", "install", "-qq", *what, cwd=cwd)
    seen = json.loads(run(environment, "-I", "-c", PROBE, *TOP_LEVEL, cwd=cwd))
    assert Path(seen["file"]).is_relative_to(ROOT) == (request.param == "editable")
    return Installed(Path(seen["file"]), set(seen["names"]), seen["missing"], seen["tops"])


def test_every_public_module_imports(installed: Installed) -> None:
    for name, lacks in installed.missing.items():
        room = ".".join(name.split(".")[:2])
        assert lacks.split(".")[0] in NEEDS.get(room, ()), f"{name} needs {lacks}, not in the core install"
    closed = set(installed.missing)  # a package that does not load shows nothing of its inside
    assert installed.names - closed == modules(without=closed) - closed


def test_nothing_else_is_installed_at_top_level(installed: Installed) -> None:
    assert installed.tops == []


def test_sdist_and_wheel_hold_the_same_package(dist: Path) -> None:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        in_wheel = {name for name in wheel.namelist() if ".dist-info/" not in name}
    with tarfile.open(next(dist.glob("*.tar.gz"))) as sdist:
        members = {member.name.split("/", 1)[1]: member for member in sdist.getmembers()}
    assert in_wheel == {name for name in members if name.startswith("kvpool/")}
    assert all(member.isfile() for member in members.values())
    assert {"kvpool/py.typed", "kvpool/backends/memory.py", "kvpool/protocols/binary.py"} <= in_wheel
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "Makefile"} <= set(members)
    assert any(name.startswith("tests/") for name in members)


def test_the_core_loads_no_optional_package() -> None:
    """Here, where they are installed: importing all of the core loads none of them, and no backend or protocol."""
    outside = ("kvpool.backends", "kvpool.protocols", "kvpool.vllm", "kvpool.testing")
    core = sorted(modules(without=outside))
    probe = f"import sys, importlib; [importlib.import_module(n) for n in {core}]; print(*sys.modules)"
    loaded = run(
        sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {probe}", cwd=ROOT.parent
    ).split()
    assert set(core) <= set(loaded)
    heavy = {"hypothesis", "mooncake", "pytest", "redis", "rich", "torch", "transformers", "trio", "vllm", "zmq"}
    assert heavy.isdisjoint(loaded)
    assert not [name for name in loaded if name.startswith(outside)]
