"""Runs the tests of a folder in a pytest of their own, inside a network namespace, and passes on its reports.

A namespace belongs to a thread, and the client makes threads where it likes, so a whole process must be inside; and a
crash of native code then fails one test, not the run. Whoever wants the tests in the pytest at hand (``-s``, ``--pdb``)
starts that inside: ``python -m tests.mooncake.namespace python -m pytest tests/mooncake -s``.
"""

from __future__ import annotations

import ast
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.mooncake.namespace import INSIDE

__all__ = ["install"]

ROOT = Path(__file__).parents[2]
_REPORTS = "TESTS_MOONCAKE_REPORTS"  # the environment variable with the descriptor for reports, one a line
_GRACE_S = 60.0  # to start; and a test that hangs is ended by its own pytest, unless native code holds that up
_seconds = pytest.StashKey[float]()


def install(config: pytest.Config, folder: Path) -> None:
    """Call it in ``pytest_configure`` of the folder's conftest.py."""
    if INSIDE not in os.environ:
        config.pluginmanager.register(_Apart(config, folder))
    elif _REPORTS in os.environ:
        config.pluginmanager.register(_Teller(config))


class _Apart:
    """Here: starts the other pytest with the tests that are wanted, and after a crash again with the rest."""

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._files = tempfile.TemporaryDirectory(prefix="kvpool-tests-")
        self._log = Path(self._files.name) / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._unread = b""
        self._reports: defaultdict[str, list[pytest.TestReport]] = defaultdict(list)
        self._finished: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """The limits on time are kept where a test runs, and not here once more."""
        for item in self._ours(items):
            marker = item.get_closest_marker("timeout")
            item.stash[_seconds] = float(marker.args[0] if marker else self._config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(0), append=False)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        items = item.session.items
        if not self._ours([item]):
            return None
        wanted = [other.nodeid for other in self._ours(items[items.index(item) :])]
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._run(wanted, item.stash[_seconds]):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_unconfigure(self) -> None:
        self._kill()
        self._files.cleanup()

    def _ours(self, items: Sequence[pytest.Item]) -> list[pytest.Item]:
        return [item for item in items if self._folder in item.path.parents]

    def _run(self, wanted: Sequence[str], seconds: float) -> list[pytest.TestReport]:
        """The reports of the first of these tests (node ids). A crash, or more than ``seconds``, is a failure."""
        test = wanted[0]
        if test not in self._finished and self._process is None:
            self._start(wanted)
        give_up = time.monotonic() + seconds + _GRACE_S
        while test not in self._finished:
            if not self._receive(give_up - time.monotonic()):
                self._reports[test].append(self._failed(test))
                break
        return self._reports.pop(test, [])

    def _start(self, wanted: Sequence[str]) -> None:
        names = Path(self._files.name) / "names"
        names.write_text("\n".join(wanted))
        options = ["-p", "no:cacheprovider", "-m", "", f"--tb={self._config.option.tbstyle}", f"@{names}"]
        self._pipe, theirs = os.pipe()
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.mooncake.namespace", sys.executable, "-m", "pytest", *options],
                cwd=self._config.rootpath,
                env=os.environ | {_REPORTS: str(theirs), "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs],
            )
        os.close(theirs)

    def _receive(self, seconds: float) -> bool:
        """Take what is reported next; False if there is nothing, in time or for ever."""
        if not select.select([self._pipe], [], [], max(0.0, seconds))[0]:
            return False
        data = os.read(self._pipe, 1 << 20)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            told = ast.literal_eval(line.decode())
            if isinstance(told, str):
                self._finished.add(told)
                continue
            report = self._config.hook.pytest_report_from_serializable(config=self._config, data=told)
            self._reports[report.nodeid].append(report)
        return bool(data)

    def _failed(self, test: str) -> pytest.TestReport:
        assert self._process is not None
        try:
            how = f"ended its pytest (exit code {self._process.wait(1.0)})"
        except subprocess.TimeoutExpired:
            how = "hangs"
        self._kill()
        text = f"{test} {how}; that said:\n{self._log.read_text(errors='replace')[-4000:]}"
        return pytest.TestReport(test, (test.partition("::")[0], None, test), {}, "failed", text, "call")

    def _kill(self) -> None:
        """End the other pytest, which has done its work or is no longer wanted."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            os.close(self._pipe)
            self._process, self._unread = None, b""


class _Teller:
    """In the other pytest: passes on what happens."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tell(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._tell(nodeid)

    def _tell(self, what: dict[str, Any] | str) -> None:
        data = f"{what!r}\n".encode()
        while data:
            data = data[os.write(int(os.environ[_REPORTS]), data) :]
