"""Real Mooncake masters and owners of memory, each a process that a test starts, kills, freezes and stops.

    with Mooncake() as mooncake:                    # a master and one owner of 64 MiB
        store = create_store(mooncake.url)          # mooncake://127.0.0.1:PORT
        owner = mooncake.owners[0]
        owner.raw("put", "key", b"value")           # any method of a raw Mooncake client, called in the owner's process
        with mooncake.master.frozen(): ...          # SIGSTOP and SIGCONT; an owner likewise
        mooncake.master.kill()                      # SIGKILL; master.start() starts it again on the same port
        mooncake.add_owner(memory=32 << 20)

Times are short, so that tests need not wait for long ones: leases of 2 s, a silent owner is forgotten after 3 s, the
place of a put that was never finished is given back after 5 s. ``Mooncake(default_kv_lease_ttl="200ms")`` sets these or
any other option of ``mooncake_master``. Run it inside a network namespace (tests/mooncake/namespace.py); tests in
tests/mooncake are there already.
"""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from tests.process import ServerProcess, die_with_parent

__all__ = ["Master", "Mooncake", "Owner", "free_port"]

ROOT = Path(__file__).parents[2]
_START_S = 30.0  # no server takes as long, unless it never comes
_CALL_S = 60.0
_FRAME = struct.Struct("<Q")


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def mooncake_file(name: str) -> Path:
    """A file of the installed package; fails with how to get it."""
    spec = find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("these tests need Mooncake: pip install 'kvpool[mooncake-cpu]' (make test does it)")
    return Path(spec.submodule_search_locations[0]) / name


class _Server(ServerProcess):
    """A process with a folder of its own for what it says. A context manager."""

    def __init__(self, name: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"kvpool-{name}-"))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        """Start, and wait until it can be used."""
        self.launch()
        self.wait()

    def launch(self) -> None:
        """Start. In the main thread: the process ends with the thread that started it."""
        raise NotImplementedError

    def wait(self) -> None:
        """Until it can be used."""
        raise NotImplementedError

    def kill(self) -> None:
        """As a crash: at once, whether it runs or is frozen."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout):
                if stream is not None:
                    stream.close()
            self.process = None

    def _run(self, command: Sequence[str | Path], pipes: bool = False, **environment: str) -> subprocess.Popen[bytes]:
        with open(self.folder / "log", "ab") as log:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | environment,
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else log,
                stderr=log,
                preexec_fn=die_with_parent,
            )

    def _said(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-2000:]


class Master(_Server):
    """A ``mooncake_master`` on a free loopback port, which it keeps when it is started again."""

    def __init__(self, **options: str | int | bool) -> None:
        super().__init__("mooncake-master")
        self.port, self.http_port = free_port(), free_port()
        self.options: dict[str, str | int | bool] = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self.port,
            "metrics_host": "127.0.0.1",
            "metrics_port": self.http_port,
            "enable_metric_reporting": False,
            "logtostderr": True,
            "default_kv_lease_ttl": "2s",
            "client_ttl": 3,
            "put_start_discard_timeout_sec": 5,
            "put_start_release_timeout_sec": 6,
        }
        self.options.update(options)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def launch(self) -> None:
        words = [f"--{name}={str(value).lower()}" for name, value in self.options.items()]
        self.process = self._run([mooncake_file("mooncake_master"), *words])

    def wait(self) -> None:
        assert self.process is not None
        give_up = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > give_up:
                    raise RuntimeError(f"mooncake_master does not start; it said:\n{self._said()}") from None
                time.sleep(0.01)

    def metrics(self) -> dict[str, float]:
        """What the master counts, by name; those with labels are left out."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/metrics", timeout=_START_S) as reply:
            lines = [line.split() for line in reply.read().decode().splitlines() if not line.startswith("#")]
        return {words[0]: float(words[1]) for words in lines if len(words) == 2 and "{" not in words[0]}


class Owner(_Server):
    """A process that lends ``memory`` bytes to the master at ``address``, and has a raw client for whoever asks."""

    def __init__(self, address: str, memory: int = 64 << 20) -> None:
        super().__init__("mooncake-owner")
        self.address = address
        self.memory = memory

    def launch(self) -> None:
        command = [sys.executable, "-m", "tests.mooncake.owner", self.address, str(self.memory)]
        self.process = self._run(command, pipes=True)

    def wait(self) -> None:
        ready = self._receive()
        if ready != "ready":
            raise RuntimeError(f"no memory was lent to {self.address}: {ready}\n{self._said()}")

    def raw(self, method: str, *args: Any) -> Any:
        """The result of ``method`` of a ``MooncakeDistributedStore`` in the owner's process."""
        assert self.process is not None
        assert self.process.stdin is not None
        write(self.process.stdin, (method, args))
        return self._receive()

    def value(self, key: str) -> bytes | None:
        """What is stored under a key. Mooncake's ``get`` gives b"" for failures too, such as a lease that has ended on
        the way."""
        for _ in range(50):
            found: bytes = self.raw("get", key)
            if found or self.raw("is_exist", key) != 1:
                return found or None
        return None

    def stop(self) -> None:
        """Take the memory back in good order, and end."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait(_CALL_S)
            self.kill()

    def _receive(self) -> Any:
        assert self.process is not None
        assert self.process.stdout is not None
        answer = read(self.process.stdout)
        if answer is None:
            raise RuntimeError(f"the owner has ended; it said:\n{self._said()}")
        return answer[0]


class Mooncake:
    """A master and ``owners`` processes that lend it ``memory`` bytes each. A context manager."""

    def __init__(self, owners: int = 1, memory: int = 64 << 20, **options: str | int | bool) -> None:
        self.master = Master(**options)
        self.owners = [Owner(self.master.address, memory) for _ in range(owners)]

    def __enter__(self) -> Self:
        try:
            for server in (self.master, *self.owners):
                server.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        for server in (*self.owners, self.master):
            server.__exit__(exc_type, exc, tb)

    def add_owner(self, memory: int = 64 << 20) -> Owner:
        """One more, started."""
        owner = Owner(self.master.address, memory)
        self.owners.append(owner)
        owner.start()
        return owner

    @property
    def url(self) -> str:
        return f"mooncake://{self.master.address}"


def write(stream: IO[bytes], value: Any) -> None:
    """One pickled value, with its length in front."""
    data = pickle.dumps(value)
    stream.write(_FRAME.pack(len(data)) + data)
    stream.flush()


def read(stream: IO[bytes]) -> tuple[Any] | None:
    """The next value, in a tuple; None at the end."""
    head = stream.read(_FRAME.size)
    if len(head) < _FRAME.size:
        return None
    data = stream.read(_FRAME.unpack(head)[0])
    return (pickle.loads(data),)
