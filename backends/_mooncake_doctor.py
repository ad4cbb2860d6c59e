"""What can be found out about a Mooncake cluster and this machine's way to it, and what should be changed."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path

import anyio

from kvpool._options import is_secret
from kvpool.backends._mooncake_url import SET_HERE, Settings
from kvpool.deadlines import fail_at
from kvpool.errors import StoreError
from kvpool.store import Finding

__all__ = ["look"]

#: Where a mooncake_master answers questions on HTTP, unless it is told otherwise (--metrics_port).
HTTP_PORT = 9003
_OLDEST = (0, 3, 11)
_ANSWER_S = 3.0
_SILENT = "what it keeps is computed until it does; the master forgets it when it has been silent for --client_ttl"


async def look(
    settings: Settings, host: str, trouble: str, advice: Sequence[str], silent: Iterable[str] = ()
) -> list[Finding]:
    """``host``: this client's address, once it is set up; else ``trouble`` is why it is not. ``advice``: what was found
    wrong at set-up. ``silent``: owners that do not answer."""
    if trouble:
        first = [Finding("fail", trouble)]
    else:
        first = [Finding("ok", f"set up as {host}, and it listens on all interfaces"), *await memory(settings)]
    return [
        *first,
        *versions(),
        *network(settings, host),
        *environment(),
        *(Finding("warn", text) for text in advice),
        *(Finding("warn", f"the owner of memory at {owner} does not answer", _SILENT) for owner in sorted(silent)),
    ]


async def memory(settings: Settings, port: int = HTTP_PORT) -> list[Finding]:
    """What has been lent to the master, if it says so."""
    host, _ = settings.master
    try:
        lines = [line.split() for line in (await _ask(host, port, "/metrics")).splitlines()]
        facts = {words[0]: float(words[1]) for words in lines if len(words) == 2 and words[0].startswith("master_")}
        capacity, used = facts["master_total_capacity_bytes"], facts["master_allocated_bytes"]
        segments = len((await _ask(host, port, "/get_all_segments")).split())
    except (StoreError, KeyError, ValueError):
        return [Finding("ok", f"the master says nothing on port {port} (--metrics_port), so its memory cannot be seen")]
    if not capacity:
        text = "no memory has been lent to the master, so nothing can be stored"
        return [Finding("fail", text, "start an owner of memory, or lend some of the engine's: ?segment=4GiB")]
    sizes = f"{used / (1 << 20):,.0f} of {capacity / (1 << 20):,.0f} MiB in use"
    return [Finding("ok", f"memory lent to the master: {segments} segment{'s' * (segments != 1)}, {sizes}")]


async def _ask(host: str, port: int, path: str) -> str:
    """The body of an answer. Raises StoreError."""
    answer = b""
    try:
        with fail_at(anyio.current_time() + _ANSWER_S):
            async with await anyio.connect_tcp(host, port) as stream:
                await stream.send(f"GET {path} HTTP/1.0\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                async for part in stream:
                    answer += part
    except (OSError, TimeoutError, anyio.BrokenResourceError) as error:
        raise StoreError(f"{host}:{port} does not answer {path}") from error
    head, _, body = answer.decode(errors="replace").partition("\r\n\r\n")
    if " 200 " not in head.partition("\n")[0]:
        raise StoreError(f"{host}:{port} does not know {path}")
    return body


def versions() -> list[Finding]:
    """Which of the builds is installed; all of them are one module, and the last one installed wins."""
    builds = {
        dist.name: dist.version for dist in distributions() if (dist.name or "").startswith("mooncake-transfer-engine")
    }
    named = ", ".join(f"{name} {version}" for name, version in sorted(builds.items()))
    if len(builds) > 1:
        text = f"several builds of Mooncake overwrite each other: {named}"
        return [Finding("warn", text, "uninstall all of them, and install one")]
    if not builds:
        return [Finding("ok", "Mooncake was not installed from a wheel, so its version is not known")]
    found = [Finding("ok", named)]
    version = tuple(map(int, re.findall(r"\d+", next(iter(builds.values())))[:3]))
    if version < _OLDEST:
        found.append(Finding("warn", "older than what is tested", "pip install -U: 0.3.11.post1 or newer"))
    return found


def network(settings: Settings, host: str, sys: Path = Path("/sys/class/infiniband")) -> Iterator[Finding]:
    """How values travel from here, and what is in their way."""
    options = settings.options
    devices = {path.name: _is_up(path) for path in sys.iterdir()} if sys.is_dir() else {}
    up = sorted(name for name, is_up in devices.items() if is_up)
    if options.protocol == "tcp":
        text = f"over TCP; {', '.join(up)} could do RDMA" if up else "over TCP; there is no RDMA device"
        yield Finding("warn", text, "?protocol=rdma") if up else Finding("ok", text)
    elif not up:
        if devices:
            yield Finding("fail", "there are RDMA devices, but none is up", ", ".join(sorted(devices)))
    else:
        yield Finding("ok", f"over RDMA: {', '.join(up)}")
        if missing := [name for name in options.device.split(",") if name and name not in up]:
            yield Finding("fail", f"{', '.join(missing)}: not there, or not up", "?device= names some of the others")
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        if 0 <= limit < int(options.buffer) + int(options.segment):
            text = f"this user may lock {limit >> 20} MiB of memory, and RDMA needs all registered memory locked"
            yield Finding("fail", text, "raise the limit (ulimit -l)")
    if int(options.segment) and host.startswith("127."):
        text = f"memory is lent as {host}, where only processes of this machine can reach it"
        yield Finding("warn", text, "?host= names an address that the others reach")


def _is_up(device: Path) -> bool:
    return any("ACTIVE" in state.read_text() for state in device.glob("ports/*/state"))


def environment() -> list[Finding]:
    """The variables for Mooncake that the user has set; those that kvpool has set are its own business."""
    names = sorted(name for name, value in os.environ.items() if name.startswith("MC_") and SET_HERE.get(name) != value)
    values = (f"{name}={'***' if is_secret(name) else os.environ[name]}" for name in names)
    return [Finding("ok", " ".join(values) or "no variable for Mooncake is set")]
