"""Where a ZeroMQ lookup channel is and how its sockets are set up."""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

import zmq
from pydantic import BaseModel, ByteSize, ConfigDict, Field

from kvpool.errors import ConfigError, TransportError
from kvpool.protocols._lookup_wire import MAX_REPLY_BYTES
from kvpool.protocols._zmq_context import SharedContext
from kvpool.protocols._zmq_curve import ZAP_ENDPOINT, load_keys
from kvpool.registry import URL

__all__ = ["NOBLOCK", "POLLIN", "POLLOUT", "SNDMORE_NOBLOCK", "Link", "Options", "receive"]

# Plain numbers: arithmetic on the enums costs more than the calls they are for.
NOBLOCK, SNDMORE_NOBLOCK = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
POLLIN, POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MAX_FRAMES = 8
_RECONNECT_MS = 50
_BACKLOG = 128
# Requests may be large and are worth little when late: few may wait in a socket. More wait with the client.
_REQUESTS_HWM = 64

_listeners: set[int] = set()


def _close_inherited_listeners() -> None:
    while _listeners:
        os.close(_listeners.pop())


# A forked child that outlives a killed server must not hold on to its address.
os.register_at_fork(after_in_child=_close_inherited_listeners)


class Options(BaseModel):
    """What may stand behind the ``?`` of a zmq URL."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    codec: str = Field("binary", min_length=1, description="a codec name, or module:Class")
    #: The largest hashes frame; equal at both ends.
    max_frame_bytes: Annotated[ByteSize, Field(ge=1024, le=1 << 30, description="1KiB to 1GiB")] = ByteSize(16 << 20)
    #: Lookups that a server handles at the same time; more wait in the sockets.
    max_handlers: int = Field(64, ge=1, le=10_000, description="1 to 10000")
    #: A client whose lookups stay unanswered for so long connects anew.
    reconnect_after_s: float = Field(3.0, ge=0.1, le=60, description="seconds, 0.1 to 60")
    #: Own key pair: a secret certificate file as zmq.auth.create_certificates writes it.
    curve_keys: Path | None = None
    #: For clients: the server's public certificate file.
    curve_server: Path | None = None
    #: For a server: a directory with the public certificate file of every client that may ask.
    curve_clients: Path | None = None


class Link:
    """One address, and the sockets at it. Thread-safe.

    Raises :class:`~kvpool.errors.ConfigError` for an address or option that cannot be.
    """

    def __init__(self, url: URL) -> None:
        self.options = url.options(Options)
        if url.username or url.password or url.path.strip("/"):
            raise ConfigError(f"{url}: a zmq URL has no user and no path; write zmq+ipc://name or zmq+tcp://host:port")
        self.url = replace(url, host=secrets.token_hex(8)) if url.scheme == "zmq+ipc" and not url.host else url
        #: How messages name the other end.
        self.peer = f"{url.scheme}://{self.url.host}" + (f":{url.port}" if url.port else "")
        #: What ZeroMQ connects to.
        self.endpoint = _ipc_endpoint(self.url) if url.scheme == "zmq+ipc" else _tcp_endpoint(self.url, self.options)
        o = self.options
        #: Set if both ends prove who they are.
        self.keys = load_keys(url, o.curve_keys, o.curve_server, o.curve_clients)
        # Closing a socket is done only with its context, so a server has one without clients.
        self._asking, self._serving = SharedContext(), SharedContext()

    def dealer(self) -> zmq.Socket[bytes]:
        """A client's socket, connecting in the background. Close it with :meth:`close`."""
        keys = self.keys
        if keys and not keys.server:
            raise ConfigError(
                f"{self.url}: a client with curve_keys needs curve_server, the server's public certificate"
            )
        with self._new_socket(zmq.DEALER) as dealer:
            if keys and keys.server:
                dealer.curve_publickey, dealer.curve_secretkey = keys.own
                dealer.curve_serverkey = keys.server
            dealer.set(zmq.SNDHWM, _REQUESTS_HWM)
            dealer.set(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
            # Send only to a server that is there: otherwise a restarted one gets the requests of its predecessor.
            dealer.set(zmq.IMMEDIATE, 1)
            dealer.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
            dealer.set(zmq.RECONNECT_IVL_MAX, 0)
            dealer.connect(self.endpoint)
        return dealer

    def router(self) -> zmq.Socket[bytes]:
        """The server's socket, listening. Raises TransportError if the address is taken."""
        keys = self.keys
        if keys and not keys.clients:
            raise ConfigError(f"{self.url}: a server with curve_keys needs curve_clients, the certificates it lets in")
        with self._new_socket(zmq.ROUTER) as router:
            if keys:
                router.curve_server = True
                router.curve_publickey, router.curve_secretkey = keys.own
            router.set(zmq.RCVHWM, _REQUESTS_HWM)
            router.set(zmq.MAXMSGSIZE, self.options.max_frame_bytes)
            if self.endpoint.startswith("ipc:"):
                router.set(zmq.IPC_FILTER_UID, os.getuid())
            # Our own listening socket: the kernel refuses a name that is taken, and a fork can close it.
            fd = self._listen()
            router.set(zmq.USE_FD, fd)
            try:
                router.bind(self.endpoint)
            except zmq.ZMQError:
                os.close(fd)
                raise
            _listeners.add(fd)
        return router

    def authenticator(self) -> zmq.Socket[bytes]:
        """With CURVE: the socket on which a server is asked about each client; open it before the router."""
        with self._new_socket(zmq.REP) as rep:
            rep.bind(ZAP_ENDPOINT)
        return rep

    def _listen(self) -> int:
        """A listening socket's descriptor, for ZeroMQ to own."""
        transport, _, place = self.endpoint.partition("://")
        try:
            if transport == "ipc":
                with socket.socket(socket.AF_UNIX) as listener:
                    listener.bind(place.replace("@", "\0", 1))
                    listener.listen(_BACKLOG)
                    return listener.detach()
            host, _, port = place.rpartition(":")
            family, *_, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=family, backlog=_BACKLOG).detach()
        except OSError as error:
            hint = "another server is live there; stop it or choose another address"
            reason = hint if error.errno == errno.EADDRINUSE else error.strerror or str(error)
            raise TransportError(f"{self.peer}: cannot serve: {reason}") from error

    @contextmanager
    def _new_socket(self, kind: int) -> Iterator[zmq.Socket[bytes]]:
        try:
            new = (self._asking if kind == zmq.DEALER else self._serving).socket(kind)
        except zmq.ZMQError as error:
            raise TransportError(f"{self.peer}: {error}") from error
        try:
            new.set(zmq.LINGER, 0)
            # No heartbeats: when one is due on a connection that broke while its queue was full, libzmq 4.3 aborts the
            # process (zeromq/libzmq#4767, #3937). A client that gets no answers connects anew instead.
            new.set(zmq.HEARTBEAT_IVL, 0)
            new.set(zmq.TCP_KEEPALIVE, 1)
            new.set(zmq.HANDSHAKE_IVL, int(max(self.options.reconnect_after_s, 1.0) * 1000))
            new.set(zmq.IPV6, "[" in self.endpoint)
            yield new
        except zmq.ZMQError as error:
            self.close(new)
            raise TransportError(f"{self.peer}: {error}") from error
        except BaseException:
            self.close(new)
            raise

    @contextmanager
    def using(self, opened: zmq.Socket[bytes]) -> Iterator[zmq.Socket[bytes]]:
        """Close a socket of this link at the end."""
        try:
            yield opened
        finally:
            self.close(opened)

    def close(self, closing: zmq.Socket[bytes]) -> None:
        """Close a socket of this link. A server's address is free when this returns."""
        if closing.type == zmq.ROUTER:
            _listeners.discard(closing.get(zmq.USE_FD))
        (self._asking if closing.type == zmq.DEALER else self._serving).close(closing)


def receive(source: zmq.Socket[bytes]) -> list[memoryview] | None:
    """The next message without a copy, or None if there is none now. Of absurdly many frames, only the first few."""
    try:
        frame = source.recv(NOBLOCK, copy=False)
    except zmq.Again:
        return None
    frames = [frame.buffer]
    while frame.more:
        frame = source.recv(NOBLOCK, copy=False)
        if len(frames) < _MAX_FRAMES:
            frames.append(frame.buffer)
    return frames


def _ipc_endpoint(url: URL) -> str:
    if sys.platform != "linux":
        raise ConfigError(f"{url}: zmq+ipc needs Linux (abstract socket names); use zmq+tcp://127.0.0.1:port")
    if url.port is not None or not _NAME.fullmatch(url.host):
        raise ConfigError(f"{url}: the name must be 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    # The user's id keeps users apart. Abstract: the name goes with its process, and no file is left behind.
    return f"ipc://@kvpool/{os.getuid()}/{url.host}"


def _tcp_endpoint(url: URL, options: Options) -> str:
    host = "127.0.0.1" if url.host == "localhost" else url.host
    if not host or not url.port:
        raise ConfigError(f"{url}: write zmq+tcp://host:port with a port above 0")
    try:
        address = ip_address(host)
    except ValueError:
        address = None
    if not (address and address.is_loopback) and options.curve_keys is None:
        raise ConfigError(
            f"{url}: host {url.host!r} is not loopback, so anybody on the network could ask; give curve_keys "
            "(and curve_server for a client, curve_clients for a server), or use 127.0.0.1"
        )
    return f"tcp://[{host}]:{url.port}" if ":" in host else f"tcp://{host}:{url.port}"
