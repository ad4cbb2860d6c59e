"""Every lookup transport that ships with kvpool keeps the contract, on asyncio and trio."""

from __future__ import annotations

import socket
from uuid import uuid4

from kvpool.testing.transports import RemoteTransportConformance, TransportConformance


class TestInProcess(TransportConformance):
    def url(self) -> str:
        return f"inprocess://{uuid4().hex}"


class TestZmqIpc(RemoteTransportConformance):
    def url(self) -> str:
        return f"zmq+ipc://{uuid4().hex}"


class TestZmqTcp(RemoteTransportConformance):
    loops = frozenset({"asyncio"})  # what differs from ipc is the address
    open_close_cycles = 100

    def url(self) -> str:
        with socket.create_server(("127.0.0.1", 0)) as free:
            return f"zmq+tcp://127.0.0.1:{free.getsockname()[1]}"
