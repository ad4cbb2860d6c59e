"""What is special about lookups over ZeroMQ: addresses, keys, limits, and peers that speak something else."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio
import pytest
import zmq
import zmq.auth
from anyio.lowlevel import checkpoint

from kvpool.errors import ConfigError, LookupTimeout, ProtocolMismatch, TransportError
from kvpool.protocols import _lookup_table
from kvpool.protocols import zmq as module
from kvpool.protocols._lookup_wire import MAX_REPLY_BYTES, Clock, ServerWire, host_clock, pack_lookup
from kvpool.protocols.binary import BinaryCodec
from kvpool.protocols.zmq import ZmqTransport
from kvpool.registry import create_transport, parse_url
from kvpool.testing._lookups import (
    HANG_S,
    AsyncFace,
    Face,
    Handler,
    PolledFace,
    ServerProcess,
    expected,
    lookup,
    until_answered,
)
from kvpool.transport import LookupRequest, LookupResult


class OtherCodec(BinaryCodec):
    name = "other"


def transport_at(url: str) -> ZmqTransport:
    made = create_transport(url)
    assert isinstance(made, ZmqTransport)
    return made


@pytest.fixture
def transport() -> ZmqTransport:
    return transport_at("zmq+ipc://")


@contextmanager
def raw_socket(transport: ZmqTransport, kind: int) -> Iterator[zmq.Socket[bytes]]:
    """A bare ZeroMQ peer: connects as a DEALER, serves as anything else."""
    with zmq.Context() as context, context.socket(kind) as raw:
        raw.linger = 0
        endpoint = transport._link.endpoint
        if kind != zmq.DEALER:
            raw.bind(endpoint)
        else:
            raw.connect(endpoint)
        yield raw


async def until_received(raw: zmq.Socket[bytes]) -> list[bytes]:
    with anyio.fail_after(HANG_S):
        while True:
            if raw.poll(0):
                return raw.recv_multipart()
            await anyio.sleep(0.002)


def header(request: LookupRequest, request_id: int = 1) -> bytes:
    in_a_minute = time.monotonic_ns() + 60 * 10**9
    return pack_lookup(request_id, request, BinaryCodec(), host_clock().id, in_a_minute, 60 * 10**9)


# ---- addresses


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("zmq+ipc://a/b", "no path"),
        ("zmq+ipc://user:secret@a", "no user"),
        ("zmq+ipc://a:80", "name must be"),
        ("zmq+ipc://sp ace", "name must be"),
        ("zmq+ipc://" + "x" * 65, "1 to 64"),
        ("zmq+ipc://a?codecs=binary", "did you mean 'codec'"),
        ("zmq+ipc://a?codec=morse", "unknown codec 'morse'"),
        ("zmq+ipc://a?max_frame_bytes=1", "1KiB to 1GiB"),
        ("zmq+ipc://a?max_handlers=0", "1 to 10000"),
        ("zmq+ipc://a?reconnect_after_s=nan", "0.1 to 60"),
        ("zmq+tcp://127.0.0.1", "with a port"),
        ("zmq+tcp://:80", "with a port"),
        ("zmq+tcp://10.0.0.1:80", "not loopback"),
        ("zmq+tcp://0.0.0.0:80", "not loopback"),
        ("zmq+tcp://example.org:80", "not loopback"),
        ("zmq+tcp://[::]:80", "not loopback"),
        ("zmq+tcp://127.0.0.1:80?curve_server=/nowhere", "need curve_keys"),
        ("zmq+tcp://10.0.0.1:80?curve_keys=/nowhere", "needs curve_server"),
        ("zmq+tcp://10.0.0.1:80?curve_keys=/nowhere&curve_server=/nowhere", "curve_keys=/nowhere"),
    ],
)
def test_an_address_that_cannot_be_is_refused_by_name(url: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        create_transport(url)
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["zmq+tcp://localhost:80", "zmq+tcp://127.1.2.3:80", "zmq+tcp://[::1]:80"])
def test_loopback_needs_no_keys(url: str) -> None:
    create_transport(url)


def test_without_a_name_each_transport_has_an_address_of_its_own() -> None:
    one, other = transport_at("zmq+ipc://"), transport_at("zmq+ipc://?max_handlers=3")
    assert one.url.host != other.url.host
    again = pickle.loads(pickle.dumps(other))
    assert again.url == other.url
    assert dict(again.url.params) == {"max_handlers": "3"}
    assert str(other.url) in repr(other)


@pytest.mark.anyio
async def test_ipv6_loopback(anyio_backend: str) -> None:
    if not socket.has_ipv6:
        pytest.fail("this machine has no IPv6: give it ::1 to run this test")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as free:
        port = free.getsockname()[1]
    transport = transport_at(f"zmq+tcp://[::1]:{port}")
    async with transport.serve(Handler()), AsyncFace(transport) as client:
        assert await client.ask(lookup()) == [expected(lookup())]


@pytest.mark.anyio
async def test_other_users_are_not_let_in(
    anyio_backend: str, transport: ZmqTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = Handler()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: os.geteuid() + 1)  # the server's idea of its own user
        server = transport.serve(handler)
        await server.__aenter__()
    try:
        async with AsyncFace(transport) as client:
            [outcome] = await client.ask(lookup(), seconds=0.3)
        assert isinstance(outcome, LookupTimeout)
        assert handler.begun == {}
    finally:
        await server.__aexit__(None, None, None)


def test_users_do_not_share_names(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = transport_at("zmq+ipc://same")
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert transport_at("zmq+ipc://same")._link.endpoint != mine._link.endpoint


_FORKING_SERVER = """
import os, sys, time, anyio
from kvpool.registry import create_transport
from kvpool.testing._lookups import Handler
async def main():
    async with create_transport(sys.argv[1]).serve(Handler()):
        if os.fork() == 0:
            print("serving", flush=True)
            time.sleep(60)  # outlives the server
            os._exit(0)
        await anyio.sleep_forever()
anyio.run(main)
"""


@pytest.mark.anyio
async def test_a_name_does_not_live_on_in_a_forked_child(anyio_backend: str, transport: ZmqTransport) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _FORKING_SERVER, str(transport.url)]
    start = partial(subprocess.Popen, command, stdout=subprocess.PIPE, env=environment, process_group=0, text=True)
    with await anyio.to_thread.run_sync(start) as server:
        try:
            assert server.stdout is not None
            assert await anyio.to_thread.run_sync(server.stdout.readline) == "serving\n"
            server.kill()
            await anyio.to_thread.run_sync(server.wait)
            async with transport.serve(Handler()), AsyncFace(transport) as client:
                assert await client.ask(lookup()) == [expected(lookup())]
        finally:
            os.killpg(server.pid, signal.SIGKILL)


# ---- keys


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """server, friend and stranger, each with a *.key and a *.key_secret; the friend's key is in friends/."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("server", "friend", "stranger"):
        zmq.auth.create_certificates(folder, name)
    (folder / "friends").mkdir()
    (folder / "friends" / "friend.key").write_bytes((folder / "friend.key").read_bytes())
    (folder / "broken.key_secret").write_text("curve\n    public-key = 'short'\n    secret-key = 'very-secret'\n")
    return folder


@pytest.mark.anyio
@pytest.mark.parametrize("scheme", ["zmq+ipc", "zmq+tcp"])
async def test_curve_lets_in_who_is_known(anyio_backend: str, keys: Path, scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = f"zmq+tcp://127.0.0.1:{port}" if scheme == "zmq+tcp" else f"zmq+ipc://{uuid4().hex}"
    handler = Handler()
    server = transport_at(f"{place}?curve_keys={keys}/server.key_secret&curve_clients={keys}/friends")
    friend = transport_at(f"{place}?curve_keys={keys}/friend.key_secret&curve_server={keys}/server.key")
    async with server.serve(handler):
        async with AsyncFace(friend) as client:
            assert await client.ask(lookup(), lookup(9)) == [expected(lookup()), expected(lookup(9))]
        for stranger in (
            f"{place}?curve_keys={keys}/stranger.key_secret&curve_server={keys}/server.key",
            f"{place}?curve_keys={keys}/friend.key_secret&curve_server={keys}/stranger.key",
            place,
        ):
            async with AsyncFace(transport_at(stranger)) as client:
                [outcome] = await client.ask(lookup(), seconds=0.2)
                assert isinstance(outcome, LookupTimeout)
        async with AsyncFace(friend) as client:
            assert await client.ask(lookup()) == [expected(lookup())]
    assert handler.begun == {"answer": 3}


@pytest.mark.anyio
async def test_each_end_needs_its_own_keys(anyio_backend: str, keys: Path) -> None:
    server = transport_at(f"zmq+tcp://10.0.0.1:80?curve_keys={keys}/server.key_secret&curve_clients={keys}/friends")
    client = transport_at(f"zmq+tcp://10.0.0.1:80?curve_keys={keys}/friend.key_secret&curve_server={keys}/server.key")
    with pytest.raises(ConfigError, match="needs curve_server"):
        server.polled_client()
    with pytest.raises(ConfigError, match="needs curve_clients"):
        async with client.serve(Handler()):
            pytest.fail("a server that lets in nobody")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("curve_keys={k}/server.key&curve_server={k}/server.key", "holds no secret key"),
        ("curve_keys={k}/server.key_secret&curve_clients={k}/nobody", "no directory with"),
        ("curve_keys={k}/broken.key_secret&curve_server={k}/server.key", "Z85"),
        ("curve_keys={k}/server.key_secret&curve_server={k}/friends", "curve_server="),
    ],
)
def test_keys_that_cannot_be_are_refused_by_name(keys: Path, options: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        create_transport("zmq+tcp://10.0.0.1:80?" + options.format(k=keys))
    assert says in str(caught.value)
    assert "very-secret" not in str(caught.value)


# ---- peers that speak something else


@pytest.mark.anyio
async def test_a_server_survives_whatever_comes_in(anyio_backend: str, transport: ZmqTransport) -> None:
    handler, good = Handler(), lookup()
    body = b"".join(BinaryCodec().encode(good.hashes))
    async with transport.serve(handler), AsyncFace(transport) as client:
        for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), b"\xff" + bytes(8) + b"\x7f\x03" + bytes(53)):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect("\0" + transport._link.endpoint.removeprefix("ipc://@"))
                raw.sendall(noise)
                assert await client.ask(good) == [expected(good)]
        with raw_socket(transport, zmq.DEALER) as raw_peer:
            for message in (
                [b""],
                [b"", b""],
                [os.urandom(100), os.urandom(100)],
                [body, header(good)],
                [header(good)[:-1], body],
                [header(good)],
                [header(good), body, b""],
                [header(good), *[body] * 1000],
                [header(good), body[:-1]],
                [b"kvpl\x01\x02" + header(good)[6:], body],
            ):
                raw_peer.send_multipart(message)
                assert await client.ask(good) == [expected(good)]
            raw_peer.send_multipart([b"kvpl\x09\x01" + header(good, 77)[6:], body])
            replies = [await until_received(raw_peer) for _ in range(6)]
            assert sum(b"cannot read" in frames[0] for frames in replies) == 5
            assert replies[-1][0][:5] == b"kvpl\x01"
            assert replies[-1][0][8:16] == (77).to_bytes(8, "big")
            assert b"server speaks protocol version 1, the client version 9" in replies[-1][0]
            raw_peer.send_multipart([header(good), bytes((16 << 20) + 1)])  # over the limit: the connection is dropped
            assert await client.ask(good) == [expected(good)]
            raw_peer.send_multipart([header(good, 78), body])  # and made again
            assert (await until_received(raw_peer))[0][8:16] == (78).to_bytes(8, "big")
    assert handler.begun == {"answer": 4 + 10 + 1 + 1}


@pytest.mark.anyio
async def test_a_client_survives_whatever_comes_in(anyio_backend: str) -> None:
    transport = transport_at("zmq+ipc://?reconnect_after_s=0.3")
    with raw_socket(transport, zmq.ROUTER) as fake:
        async with AsyncFace(transport) as client:
            wire, good = ServerWire(BinaryCodec()), lookup()
            outcomes: list[object] = []
            peer = b""

            async def ask() -> None:
                outcomes.extend(await client.ask(good, good))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                peer, first, _ = await until_received(fake)
                _, second, _ = await until_received(fake)
                one, two = (int.from_bytes(h[8:16], "big") for h in (first, second))
                answer = wire.reply(one, expected(good))
                for noise in (
                    [b""],
                    [os.urandom(64)],
                    [answer, b""],
                    [b"xxxx" + answer[4:]],
                    [wire.reply(one ^ two, expected(good))],
                    [b"x"] * 1000,
                ):
                    fake.send_multipart([peer, *noise])
                fake.send_multipart([peer, b"kvpl\x07" + wire.reply(two, expected(good))[5:]])
                fake.send_multipart([peer, answer])
                fake.send_multipart([peer, answer])
            assert expected(good) in outcomes
            assert [type(o) for o in outcomes if o != expected(good)] == [ProtocolMismatch]
            outcomes.clear()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                _, first, _ = await until_received(fake)
                _, second, _ = await until_received(fake)
                fake.send_multipart([peer, b"kvpl\x01\x02\0\0" + first[8:16] + b"cut"])
                fake.send_multipart([peer, wire.reply(int.from_bytes(second[8:16], "big"), expected(good))])
            assert expected(good) in outcomes
            assert sum("cannot be read" in str(o) for o in outcomes) == 1
            fake.send_multipart([peer, bytes(MAX_REPLY_BYTES + 1)])  # over the limit: the connection is dropped

            async def answer_all() -> None:
                while True:
                    peer, head, _ = await until_received(fake)
                    fake.send_multipart([peer, wire.reply(int.from_bytes(head[8:16], "big"), expected(good))])

            with anyio.fail_after(HANG_S):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(answer_all)
                    await until_answered(client)
                    tasks.cancel_scope.cancel()


@pytest.mark.anyio
@pytest.mark.parametrize("face", [AsyncFace, PolledFace], ids=["async", "polled"])
async def test_a_stranger_on_the_address_is_outlived(anyio_backend: str, face: type[Face]) -> None:
    """ZeroMQ itself never connects again after a peer broke its protocol once."""
    transport = transport_at("zmq+ipc://?reconnect_after_s=0.3")
    async with face(transport) as client:
        with raw_socket(transport, zmq.PUB):  # speaks ZeroMQ, but not with a DEALER
            await client.ask(lookup(), seconds=0.3)
        async with transport.serve(Handler()):
            await until_answered(client)
            assert await client.ask(lookup(), lookup(9)) == [expected(lookup()), expected(lookup(9))]


@pytest.mark.anyio
async def test_another_codec_is_refused_by_name(anyio_backend: str, transport: ZmqTransport) -> None:
    url = transport.url
    other = ZmqTransport(parse_url({"url": f"zmq+ipc://{url.host}", "codec": f"{__name__}:OtherCodec"}))
    async with transport.serve(Handler()), AsyncFace(other) as client:
        [outcome] = await client.ask(lookup())
    assert isinstance(outcome, ProtocolMismatch)
    assert "'binary'" in str(outcome)
    assert "'other'" in str(outcome)
    assert transport.counts() == {"codec": 1}


# ---- limits and clocks


@pytest.mark.anyio
async def test_no_more_handlers_than_allowed(anyio_backend: str) -> None:
    transport = transport_at("zmq+ipc://?max_handlers=3")
    handler = Handler()
    most = 0

    async def watched(request: LookupRequest) -> LookupResult:
        nonlocal most
        most = max(most, handler.running + 1)
        return await handler(request)

    async with transport.serve(watched), AsyncFace(transport) as client:
        requests = [lookup(do="sleep", seed=i) for i in range(12)]
        assert await client.ask(*requests) == [expected(r) for r in requests]
    assert most == 3


@pytest.mark.anyio
async def test_a_flood_of_lookups_that_need_no_waiting_leaves_turns_to_others(
    anyio_backend: str, transport: ZmqTransport
) -> None:
    """The handler asks for more than it answers, so that the server always finds a request."""
    client, handled, most = transport.polled_client(), 0, 0
    work = time.sleep

    async def handler(request: LookupRequest) -> LookupResult:
        nonlocal handled
        handled += 1
        if handled < 500:
            client.submit(lookup(), timeout=HANG_S)
            work(0.0005)  # time for ZeroMQ to bring it
        return expected(request)

    async with transport.serve(handler):
        with anyio.fail_after(HANG_S):
            for _ in range(8):
                client.submit(lookup(), timeout=HANG_S)
            while handled < 500:
                before = handled
                await checkpoint()
                client.poll()
                most = max(most, handled - before)
    client.close()
    assert most <= 2 * module._BURST


@pytest.mark.anyio
async def test_a_request_over_the_limit_fails_at_once_by_name(anyio_backend: str) -> None:
    transport = transport_at("zmq+ipc://?max_frame_bytes=1KiB")
    async with transport.serve(Handler()), AsyncFace(transport) as client:
        [small, large] = await client.ask(lookup(31), lookup(32))
        assert small == expected(lookup(31))
        assert isinstance(large, TransportError)
        assert "1,026 bytes of hashes are over max_frame_bytes=1,024" in str(large)


@pytest.mark.anyio
async def test_a_client_on_another_host_is_held_to_the_servers_clock(
    anyio_backend: str, transport: ZmqTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the conformance suite, but the two ends' clocks have nothing in common."""
    elsewhere = Clock(b"farfaway", lambda: time.monotonic_ns() - 10**15)
    monkeypatch.setattr(_lookup_table, "host_clock", lambda: elsewhere)
    server = await anyio.to_thread.run_sync(ServerProcess, str(transport.url), anyio_backend)
    with server:
        async with AsyncFace(transport) as client:
            assert await client.ask(lookup()) == [expected(lookup())]
            server.signal(signal.SIGSTOP)
            outcomes = await client.ask(*(lookup(seed=i) for i in range(20)), seconds=0.15)
            assert {type(o) for o in outcomes} == {LookupTimeout}
            server.signal(signal.SIGCONT)
            [count] = await client.ask(lookup(do="count"))
            assert isinstance(count, LookupResult)
            assert count.hit_length == 1


class _Dropped:
    """A socket whose connection goes between the two frames of its first message, which ZeroMQ then takes back."""

    def __init__(self, real: zmq.Socket[bytes]) -> None:
        self.real = real
        self.drops = 1
        self.header = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def send(self, frame: bytes, flags: int) -> None:
        if flags & zmq.SNDMORE:
            self.header = frame
        elif self.drops:
            self.drops -= 1
            raise zmq.Again
        else:
            self.real.send_multipart([self.header, frame], flags)


@pytest.mark.anyio
async def test_a_connection_that_goes_in_mid_message(anyio_backend: str, transport: ZmqTransport) -> None:
    async with transport.serve(Handler()), AsyncFace(transport) as client:
        assert await client.ask(lookup()) == [expected(lookup())]
        channel = client.client._channel  # type: ignore[attr-defined]
        channel._dealer = flaky = _Dropped(channel._dealer)
        assert await client.ask(lookup(), lookup(5)) == [expected(lookup()), expected(lookup(5))]
        assert flaky.drops == 0
