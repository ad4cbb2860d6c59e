"""Mooncake's own client: how one is set up, asked for a sign of life, put aside and used again.

``setup`` and ``close`` of the native client hold the interpreter lock, so that nothing else runs in the process
meanwhile. Setting up takes about 0.1 s with a master that answers, so that is asked first. Closing takes about 1 s, so
a client that gives no memory to the cluster is not closed but put aside: the next store with the same settings uses it
again, and Mooncake closes what is left when the process ends.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import anyio
import anyio.abc

from kvpool.backends._mooncake_codes import described
from kvpool.backends._mooncake_threads import after_fork
from kvpool.backends._mooncake_url import (
    Settings,
    environment_advice,
    mooncake_was_imported,
    prepare_environment,
    settings_advice,
)
from kvpool.deadlines import fail_at
from kvpool.errors import ConfigError, StoreError

__all__ = [
    "Connected",
    "Native",
    "close",
    "connect",
    "gives_sign_of_life",
    "local_address",
    "placement_advice",
    "put_aside",
]

#: A request of Mooncake's RPC protocol (coro_rpc) for no function; a master that is alive answers with an error.
_PING = b"\x15" + bytes(19)
#: A request of its transfer engine's handshake, for metadata: length, kind, an empty JSON object.
_OWNER_PING = b"\x03" + bytes(7) + b"\x01{}"
_PORT = re.compile("[0-9]{1,5}")
#: Clients put aside in one process, at most; for more the oldest is closed.
_MOST_ASIDE = 8
#: Options that a client is set up with, or puts with.
_OF_A_CLIENT = {
    "protocol", "device", "segment", "local_buffer", "replicas", "preferred_segment", "soft_pin", "metadata", "tenant",
    "timeout_s",
}  # fmt: skip

HINT = (
    "pip install 'kvpool[mooncake-cpu]' (no GPU), 'kvpool[mooncake]' (CUDA 12) or 'kvpool[mooncake-cuda13]'; "
    "Debian also needs libibverbs1, libnuma1 and libcurl4"
)


class Native(Protocol):
    """What a store needs of ``MooncakeDistributedStore``. All calls block, ``close`` with the interpreter lock held."""

    def batch_is_exist(self, keys: list[str]) -> list[int]: ...

    def batch_put_from_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]], config: Any, /
    ) -> list[int]: ...

    def batch_get_into_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]], /
    ) -> list[int]: ...

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Any]]: ...  # of newer versions

    def get_size(self, key: str) -> int: ...

    def remove(self, key: str, force: bool, /) -> int: ...

    def register_buffer(self, pointer: int, nbytes: int, /) -> int: ...

    def unregister_buffer(self, pointer: int, /) -> int: ...

    def close(self) -> int: ...


@dataclass(frozen=True)
class Connected:
    """A client that is set up, the ReplicateConfig for its puts, and what is to be said about the settings."""

    native: Native
    config: Any
    advice: tuple[str, ...] = ()
    kept: bool = False  #: it has one reference more, which :func:`close` takes back


_aside: list[tuple[tuple[int, str, str, str], Connected]] = []  # the oldest first
_aside_lock = threading.Lock()
_inherited = False  # this process was forked from one that has used Mooncake


async def local_address(settings: Settings, deadline: float) -> str:
    """Ask the master, and the metadata server if there is one, for a sign of life; the address of this machine on the
    way to the master.

    Raises StoreError if there is none before the deadline: then no client may be set up, for that would stop the whole
    process until Mooncake's own time-outs.
    """
    host, port = settings.master
    place = settings.address
    if settings.metadata_server is not None:
        await _reached(*settings.metadata_server, deadline)
    try:
        with fail_at(deadline):
            async with await anyio.connect_tcp(host, port) as stream:
                await stream.send(_PING)
                reply = await stream.receive(1)
                name: str = stream.extra(anyio.abc.SocketAttribute.local_address)[0]
    except TimeoutError:
        raise StoreError(f"the master at {place} does not answer") from None
    except (OSError, anyio.EndOfStream, anyio.BrokenResourceError) as error:
        reason = str(error) or "it hung up"
        raise StoreError(f"no master at {place}: {reason}") from error
    if reply != _PING[:1]:
        raise StoreError(f"what answers at {place} is no mooncake_master")
    return settings.options.host or name


async def gives_sign_of_life(owner: str, deadline: float) -> bool | None:
    """Whether an owner of memory (``host:port``) answers before the deadline. One that is frozen takes connections.

    None for what is no such address.
    """
    host, _, port = owner.rpartition(":")
    if not host or not _PORT.fullmatch(port) or not 0 < int(port) < 1 << 16:
        return None
    try:
        with fail_at(deadline):
            async with await anyio.connect_tcp(host.strip("[]"), int(port)) as stream:
                await stream.send(_OWNER_PING)
                await stream.receive(1)
    except anyio.EndOfStream:
        return True  # it did not like the question
    except (OSError, TimeoutError, ValueError, anyio.BrokenResourceError):
        return False
    return True


async def _reached(host: str, port: int, deadline: float) -> None:
    """Raises StoreError if nobody listens there."""
    try:
        with fail_at(deadline):
            await (await anyio.connect_tcp(host, port)).aclose()
    except (OSError, TimeoutError) as error:
        raise StoreError(f"no metadata server at {host}:{port}: {str(error) or 'it does not answer'}") from error


def connect(settings: Settings, host: str) -> Connected:
    """A client, put aside before or set up now; in a thread, because it blocks. Raises ConfigError or StoreError."""
    wanted = _kind(settings, host)
    with _aside_lock:
        for i, (kind, connected) in enumerate(_aside):
            if kind == wanted:
                del _aside[i]
                return connected
    return _set_up(settings, host)


def put_aside(connected: Connected, settings: Settings, host: str) -> Connected | None:
    """Keep a client at rest for the next store that needs one like it. What must be closed instead, if anything."""
    if int(settings.options.segment):
        return connected
    with _aside_lock:
        _aside.append((_kind(settings, host), connected))
        return _aside.pop(0)[1] if len(_aside) > _MOST_ASIDE else None


def _kind(settings: Settings, host: str) -> tuple[int, str, str, str]:
    """Clients of one kind can stand in for each other."""
    return os.getpid(), host, settings.address, settings.options.model_dump_json(include=_OF_A_CLIENT)


def _set_up(settings: Settings, host: str) -> Connected:
    if _inherited:
        raise ConfigError(
            "Mooncake was used by the parent of this process before the fork, and would hang here; start processes "
            "with spawn, or open stores in the children only"
        )
    options = settings.options
    before, too_late = dict(os.environ), mooncake_was_imported()
    wanted = prepare_environment(settings, host)
    try:
        module: Any = importlib.import_module("mooncake.store")
    except ImportError as error:
        raise ConfigError(f"a mooncake store needs Mooncake's client: {error}; {HINT}") from error
    if not hasattr(module.MooncakeDistributedStore, "batch_get_into_multi_buffers"):
        raise ConfigError("a mooncake store needs Mooncake 0.3.11 or newer; the installed one is older")
    config = _config(module, settings)
    advice = (
        *environment_advice(wanted, before, too_late=too_late),
        *settings_advice(settings, config),
    )
    _guard_forks()
    native = module.MooncakeDistributedStore()
    given: list[Any] = [
        host,
        options.metadata,
        int(options.segment),
        int(options.local_buffer),
        options.protocol,
        options.device,
        settings.address,
    ]
    tenant = {"tenant_id": options.tenant} if options.tenant else {}
    failure = ""
    try:
        if code := native.setup(*given, **tenant):
            failure = described(code)
    except TypeError as error:  # pybind's, for a version without tenants, before anything has been done
        failure = f"the installed Mooncake cannot be set up so, leave out tenant=: {error}"
    except Exception as error:  # of C++, such as a lack of memory
        failure = f"{type(error).__name__}: {error}; segment= or local_buffer= may be too large"
    if failure:
        del native  # frees it and its threads; the exception would keep it
        raise StoreError(f"setting up a client of the master at {settings.address} failed: {failure}")
    # Not freed by Python before it is closed: that closes it, and would hang in a forked child.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))
    return Connected(native, config, advice, kept=True)


def close(connected: Connected) -> None:
    """Close a client that nobody uses, and let its memory go; in a thread, because it blocks."""
    connected.native.close()
    if connected.kept:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(connected.native))


@cache
def _guard_forks() -> None:
    """A child that is forked from here has the clients, but not their threads."""
    os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    global _inherited
    _inherited = True
    after_fork()


def _config(module: Any, settings: Settings) -> Any:
    """The ReplicateConfig of these settings, as far as the installed version knows them."""
    options = settings.options
    config = module.ReplicateConfig()
    config.replica_num = options.replicas
    if options.preferred_segment and hasattr(config, "preferred_segment"):
        config.preferred_segment = options.preferred_segment
    if options.soft_pin and hasattr(config, "soft_pin_action"):
        config.soft_pin_action = module.SoftPinAction.ENABLE
    elif options.soft_pin and hasattr(config, "with_soft_pin"):
        config.with_soft_pin = True
    return config


def placement_advice(native: Any, config: Any, settings: Settings, key: str, pointer: int) -> list[str]:
    """Whether replicas and preferred segment are what was asked for; tried with one byte, which is removed."""
    options = settings.options
    if options.replicas == 1 and not options.preferred_segment:
        return []
    try:
        if native.batch_put_from_multi_buffers([key], [[pointer]], [[1]], config)[:1] != [0]:
            return []  # full, or nobody gives memory yet: puts will tell
        copies: Sequence[Any] = native.get_replica_desc(key)
        native.remove(key, False)
        places = {copy.get_memory_descriptor().buffer_descriptor.transport_endpoint for copy in copies}
    except AttributeError:
        return []
    advice = []
    if len(copies) < options.replicas:
        advice.append(f"replicas={options.replicas}: Mooncake made {len(copies)}; more need as many segments")
    # A segment is named by another port of its host than the one that is told here.
    wanted = options.preferred_segment.rpartition(":")[0] or options.preferred_segment
    if wanted and wanted not in {place.rpartition(":")[0] for place in places}:
        advice.append(f"preferred_segment={options.preferred_segment} is ignored: values go to {', '.join(places)}")
    return advice
