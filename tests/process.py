"""Processes of servers that tests freeze, and that end with the test run."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ServerProcess", "die_with_parent"]

_libc = ctypes.CDLL(None, use_errno=True)


class ServerProcess:
    """``process``: None while there is none."""

    process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Connections stand, and nothing is answered."""
        self.signal(signal.SIGSTOP)
        if self.process is not None:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def signal(self, number: signal.Signals) -> None:
        """Nothing happens if there is no process."""
        if self.process is not None:
            self.process.send_signal(number)


def die_with_parent() -> None:
    """For ``preexec_fn``: a test run that is killed leaves no process behind (PR_SET_PDEATHSIG)."""
    _libc.prctl(1, signal.SIGKILL)
