"""From a URL to settings, the environment that Mooncake reads, and what of both it would silently ignore."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ByteSize, Field, field_validator

from kvpool.backends._file_format import HEADER_BYTES, Checksum
from kvpool.errors import ConfigError
from kvpool.registry import URL

__all__ = ["Options", "Settings", "environment_advice", "prepare_environment", "settings_advice", "settings_of"]

MASTER_PORT = 50051
MIN_SEGMENT = 16 << 20  # Mooncake's allocation unit
_MOST = 1 << 50  # bytes: what Mooncake's 64 bits hold, and more than any machine has
_HANDSHAKE = "P2PHANDSHAKE"
_ROOM = 65_535
_PROGRESS_S = 3

#: The variables of this process that kvpool has set, not the user.
SET_HERE: dict[str, str] = {}


class Options(BaseModel):
    """The options of ``mooncake://master[:port]``."""

    protocol: Literal["tcp", "rdma"] = Field(default="tcp", description="tcp or rdma")
    device: str = Field(default="", description="RDMA devices, such as mlx5_0,mlx5_1; all that are found without it")
    segment: ByteSize = Field(
        default=ByteSize(0), ge=0, le=_MOST, description="memory given to the cluster: 0, or a size from 16MiB on"
    )
    local_buffer: ByteSize = Field(default=ByteSize(0), ge=0, le=_MOST, description="a size; kvpool itself needs none")
    buffer: ByteSize = Field(
        default=ByteSize(64 << 20), ge=1 << 20, le=1 << 30, description="a size of 1MiB to 1GiB, for values in flight"
    )
    replicas: int = Field(default=1, ge=1, le=16, description="1 to 16")
    preferred_segment: str = Field(default="", description="host:port of the client to whose memory values go first")
    soft_pin: bool = Field(default=False, description="true or false")
    metadata: str = Field(default=_HANDSHAKE, description="P2PHANDSHAKE, or http://host[:port]/path without user")
    host: str = Field(default="", description="this machine's address as the others see it")
    tenant: str = Field(default="", description="a tenant of a master that runs with --enable_multi_tenants")
    prefix: str = Field(default="kvpool:", pattern=r"^[!-~]{0,64}$", description="up to 64 visible ASCII characters")
    zero_copy: Literal["auto", "yes", "no"] = Field(default="auto", description="auto, yes or no")
    checksum: Checksum = Field(default="xxh3_64", description="xxh3_64 or none")
    presence_cache_s: float = Field(default=0.5, ge=0, le=60, description="seconds, 0 to 60")
    failed_key_s: float = Field(default=10.0, ge=0, le=3600, description="seconds, 0 to 3600")
    timeout_s: float = Field(default=5.0, ge=0.01, le=600, description="seconds, 0.01 to 600")
    hang_s: float = Field(default=15.0, ge=0.1, le=3600, description="seconds, 0.1 to 3600")
    threads: int = Field(default=3, ge=1, le=16, description="loads at the same time, and as many puts, 1 to 16")

    @field_validator("segment")
    @classmethod
    def _segment_is_large_enough(cls, value: ByteSize) -> ByteSize:
        if 0 < value < MIN_SEGMENT:
            raise ValueError("Mooncake takes no segment below 16 MiB")
        return value

    @field_validator("metadata")
    @classmethod
    def _metadata_is_of_a_kind_that_every_build_has(cls, value: str) -> str:
        """Mooncake ends the process when it does not know the kind, and logs the whole address when it fails."""
        if value != _HANDSHAKE and _server_of(value) is None:
            raise ValueError("Mooncake ends the process for some kinds of metadata server, so only HTTP is taken")
        return value


def _server_of(metadata: str) -> tuple[str, int] | None:
    """Host and port of an HTTP address without a user; None for what is none."""
    try:
        parts = urlsplit(metadata)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (KeyError, ValueError):
        return None
    plain = parts.scheme in ("http", "https") and parts.hostname and "@" not in metadata
    return (parts.hostname, port) if parts.hostname and plain else None


@dataclass(frozen=True)
class Settings:
    """What a URL says. ``master``: host and port."""

    master: tuple[str, int]
    options: Options

    @property
    def address(self) -> str:
        """The master as Mooncake wants it."""
        host, port = self.master
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def without_segment(self) -> Settings:
        """The same for a client that lends no memory."""
        return replace(self, options=self.options.model_copy(update={"segment": ByteSize(0)}))

    @property
    def metadata_server(self) -> tuple[str, int] | None:
        """Host and port, if there is one."""
        return _server_of(self.options.metadata)

    @property
    def max_value(self) -> int:
        """Bytes of the largest value: it must fit the store's own buffer."""
        return int(self.options.buffer) - HEADER_BYTES

    @property
    def zero_copy(self) -> bool:
        """Whether values move straight between registered memory and the store."""
        choice = self.options.zero_copy
        return choice == "yes" or (choice == "auto" and self.options.protocol == "rdma" and has_rdma())


def settings_of(url: URL) -> Settings:
    """Raises :class:`~kvpool.errors.ConfigError` that names the field, the value and what is allowed."""
    if not url.host or "," in url.host or url.username or url.path.strip("/"):
        raise ConfigError(f"{url}: a mooncake store is mooncake://master[:port]?option=value, without user and path")
    return Settings((url.host, MASTER_PORT if url.port is None else url.port), url.options(Options))


def has_rdma() -> bool:
    """Whether this machine has an RDMA device."""
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def settings_advice(settings: Settings, config: object) -> Iterator[str]:
    """What Mooncake would silently ignore, in words. ``config``: a ReplicateConfig of the installed version."""
    options = settings.options
    if options.protocol == "rdma" and not has_rdma():
        yield "protocol=rdma is ignored: this machine has no RDMA device, so Mooncake goes on over TCP"
    if options.protocol == "tcp" and options.device:
        yield f"device={options.device} is ignored with protocol=tcp"
    if options.host and not int(options.segment):
        yield f"host={options.host} is ignored without segment=: nobody asks a client that lends no memory"
    if options.tenant:
        yield f"tenant={options.tenant} isolates nothing unless the master runs with --enable_multi_tenants"
    if options.soft_pin and not (hasattr(config, "soft_pin_action") or hasattr(config, "with_soft_pin")):
        yield "soft_pin is ignored: the installed Mooncake has no soft pins"
    if options.preferred_segment and not hasattr(config, "preferred_segment"):
        yield "preferred_segment is ignored: the installed Mooncake cannot choose"


def _wanted(settings: Settings, host: str) -> dict[str, str]:
    """The variables that Mooncake reads when a process sets up its first client, as kvpool needs them."""
    return {
        # A queue that is full can wedge a client for good.
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": str(_ROOM),
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": str(_ROOM),
        # Setting up holds the interpreter lock, so it must fail soon.
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_RPC_TIMEOUT_MS": str(int(settings.options.timeout_s * 1000)),
        # A transfer to an owner that is frozen fails after so long without progress; else it hangs for 60 s.
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(_PROGRESS_S),
        "MC_TCP_BIND_ADDRESS": host,
        "MC_LOG_LEVEL": "ERROR",
    }


def prepare_environment(
    settings: Settings, host: str, environ: MutableMapping[str, str] | None = None
) -> dict[str, str]:
    """Set what is not set by the user; call it before Mooncake is imported. The values that kvpool wanted."""
    wanted = _wanted(settings, host)
    target = os.environ if environ is None else environ
    for name, value in wanted.items():
        if name not in target:
            target[name] = value
            if target is os.environ:
                SET_HERE[name] = value
    return wanted


def environment_advice(wanted: dict[str, str], before: dict[str, str], *, too_late: bool) -> Iterator[str]:
    """What is wrong with the environment, in words. ``before``: it as it was. ``too_late``: Mooncake was imported."""
    for name, value in wanted.items():
        has = before.get(name)
        if has is None:
            if too_late and name != "MC_LOG_LEVEL":
                yield f"{name}={value} comes too late: Mooncake was used before in this process; set it at its start"
        elif name in ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER"):
            if _number(has) < 2048:
                yield f"{name}={has} is small: Mooncake's transfers may fail or hang; unset it"
        elif name == "MC_STORE_CLIENT_SETUP_RETRIES" and _number(has) > 1:
            yield f"{name}={has}: with no master, setting up stops the process that often; set it to 1"
        elif name == "MC_TCP_PROGRESS_TIMEOUT_SEC" and not 0 < _number(has) <= 5 * _PROGRESS_S:
            yield f"{name}={has}: transfers to a frozen owner hang so long, or for 60 s; unset it"
        elif name == "MC_RPC_TIMEOUT_MS" and not 0 < _number(has) <= 2 * _number(value):
            yield f"{name}={has}: calls to a frozen master hang so long; unset it, timeout_s decides"


def mooncake_was_imported() -> bool:
    """Whether somebody in this process has used Mooncake already."""
    return "mooncake.store" in sys.modules or "mooncake.engine" in sys.modules


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return -1
