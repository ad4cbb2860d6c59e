"""TLS in front of a server: its own, or a proxy's where the build of the server knows no TLS."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import trustme

from tests.redis.server import RedisServer, find_server, free_port

#: "own": the server's own TLS, where there is any. "proxy": something in front of it.
WAYS = ["own", "proxy"] if b"tls-cert-file" in Path(find_server()).read_bytes() else ["proxy"]


class Certificates:
    """A certificate authority with a certificate for a server on 127.0.0.1 and one for a client, as files."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.authority = trustme.CA()
        self.ca, self.cert, self.key, self.client = (folder / f"{n}.pem" for n in ("ca", "cert", "key", "client"))
        self.authority.cert_pem.write_to_path(self.ca)
        issued = self.authority.issue_cert(*(names or ("127.0.0.1",)))
        issued.cert_chain_pems[0].write_to_path(self.cert)
        issued.private_key_pem.write_to_path(self.key)
        self.authority.issue_cert("client").private_key_and_cert_chain_pem.write_to_path(self.client)


@contextmanager
def tls_server(way: str, certificates: Certificates, *, ask_client: bool = False) -> Iterator[tuple[RedisServer, int]]:
    """A server and the port where it speaks TLS. ``ask_client``: whoever connects must show a certificate, too."""
    port = free_port()
    own: dict[str, str | int] = {
        "tls_port": port,
        "tls_cert_file": str(certificates.cert),
        "tls_key_file": str(certificates.key),
        "tls_ca_cert_file": str(certificates.ca),
        "tls_auth_clients": "yes" if ask_client else "no",
    }
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer(**(own if way == "own" else {})))
        if way == "proxy":
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates.ca))
            context.load_cert_chain(certificates.cert, certificates.key)
            if ask_client:
                context.verify_mode = ssl.CERT_REQUIRED
            stack.enter_context(_proxy(server.socket, port, context))
        yield server, port


@contextmanager
def _proxy(target: Path, port: int, context: ssl.SSLContext) -> Iterator[None]:
    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        sink.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server = await asyncio.open_unix_connection(str(target))
        await asyncio.gather(copy(reader, to_server[1]), copy(to_server[0], writer))

    async def serve() -> None:
        async with await asyncio.start_server(connected, "127.0.0.1", port, ssl=context):
            ready.set()
            while not done.is_set():  # noqa: ASYNC110  an event of another thread
                await asyncio.sleep(0.02)

    ready, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(20)
        yield
    finally:
        done.set()
        thread.join()
