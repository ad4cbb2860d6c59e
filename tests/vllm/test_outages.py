"""A real Redis and a lookup server that die, freeze, talk nonsense and come back under a running engine.

Every request ends and gives what a cold run gave (fp32, log probabilities within 1e-3), nothing is left behind, and
once the server is back the engine saves, finds and loads as before.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.redis.server import RedisServer
from tests.vllm.engine import BLOCK, Engine, prompt
from tests.vllm.switched import State, SwitchedTransport

TOKENS = 1000
Outage = Callable[[RedisServer], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module", params=["hybrid_model", pytest.param("model", marks=pytest.mark.long)])
def engine(request: pytest.FixtureRequest, server: RedisServer) -> Iterator[Engine]:
    model: Path = request.getfixturevalue(request.param)
    config = {
        "store": f"{server.url}?timeout=1",
        "transport": f"tests.vllm.switched:SwitchedTransport?channel=zmq%2Bipc://outages-{os.getpid()}",
        "load_timeout_s": 1.5,
        "save_timeout_s": 1.5,
        "lookup_timeout_ms": 1000,
        "failed_key_ttl_s": 0,
    }
    engine = Engine(model, config, kv_bytes=64 << 20)
    yield engine
    engine.close()


@contextmanager
def dies(server: RedisServer) -> Iterator[None]:
    server.kill()
    try:
        yield
    finally:
        server.start()


@contextmanager
def restarts(server: RedisServer) -> Iterator[None]:
    """It is back at once, and has lost everything."""
    server.kill()
    server.start()
    yield


@contextmanager
def freezes(server: RedisServer) -> Iterator[None]:
    with server.frozen():
        yield


@contextmanager
def loses_its_keys(server: RedisServer) -> Iterator[None]:
    server.raw("FLUSHALL")
    yield


@contextmanager
def is_full(server: RedisServer) -> Iterator[None]:
    """It has evicted everything and takes no more."""
    server.raw("FLUSHALL")
    server.raw("CONFIG", "SET", "maxmemory", 1)
    try:
        yield
    finally:
        server.raw("CONFIG", "SET", "maxmemory", 0)


@contextmanager
def values_are_damaged(server: RedisServer) -> Iterator[None]:
    for key in server.raw("KEYS", "*"):
        server.raw("SETRANGE", key, 100, b"garbage")
    yield


@contextmanager
def talks_nonsense(server: RedisServer) -> Iterator[None]:
    """Something else has its port, and answers every request with bytes that mean nothing."""
    server.kill()
    listener = socket.create_server(("127.0.0.1", server.port))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                connection.settimeout(1)
                while connection.recv(1 << 16):
                    connection.sendall(b"\x00\xff:-1\r\n$-5\r\ngarbage" * 8)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        server.start()


OUTAGES: list[Outage] = [dies, restarts, freezes, loses_its_keys, is_full, values_are_damaged, talks_nonsense]
TIMES = ["before the lookup", "before the load", "during the save"]
#: Each outage once; all at all times take part in the long tests.
SHORT = {
    (dies, "before the load"),
    (dies, "during the save"),
    (restarts, "before the load"),
    (freezes, "before the lookup"),
    (freezes, "during the save"),
    (loses_its_keys, "before the load"),
    (is_full, "during the save"),
    (values_are_damaged, "before the load"),
    (talks_nonsense, "before the lookup"),
}


@contextmanager
def _after(engine: Engine, when: str, strike: Callable[[], object]) -> Iterator[None]:
    """Calls ``strike`` once: at once, between the lookup's answer and the load, or when the first save job is out."""
    if when == "before the lookup":
        strike()
        yield
        return
    side, name = (engine.connector, "after_alloc") if when == "before the load" else (engine.worker, "submit")
    original = getattr(side, name)
    struck: list[object] = []

    def hooked(*args: Any, **options: Any) -> None:
        original(*args, **options)
        if not struck and (args[2] if when == "before the load" else args[0].saves):
            struck.append(strike())

    setattr(side, name, hooked)
    try:
        yield
        assert struck, f"nothing happened {when}"
    finally:
        delattr(side, name)


@pytest.mark.parametrize(
    ("outage", "when"),
    [
        pytest.param(outage, when, marks=[] if (outage, when) in SHORT else pytest.mark.long)
        for outage in OUTAGES
        for when in TIMES
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_redis(engine: Engine, server: RedisServer, outage: Outage, when: str) -> None:
    engine.forget()
    server.raw("FLUSHALL")
    tokens, fresh = prompt(TOKENS, seed=1), prompt(600, seed=2)
    cold, cold_fresh = engine.run(tokens), engine.run(fresh)
    engine.forget()
    if when == "during the save":
        server.raw("FLUSHALL")
    under = outage(server)
    try:
        with _after(engine, when, under.__enter__):
            names = [engine.add(tokens), engine.add(fresh)]
            done = engine.finish(names)
            assert done[names[0]].near(cold)
            assert done[names[1]].near(cold_fresh)
            engine.assert_at_rest()
    finally:
        under.__exit__(None, None, None)
    _heals(engine, tokens)


@pytest.mark.parametrize("state", ["gone", "silent", "failing", "boasting", "other-epoch"])
def test_lookup_server(engine: Engine, server: RedisServer, state: State) -> None:
    engine.forget()
    server.raw("FLUSHALL")
    tokens, fresh = prompt(TOKENS, seed=3), prompt(600, seed=4)
    cold, cold_fresh = engine.run(tokens), engine.run(fresh)
    engine.forget()
    if state == "boasting":
        server.raw("FLUSHALL")
    with SwitchedTransport.switched(state):
        names = [engine.add(tokens), engine.add(fresh)]
        done = engine.finish(names)
        assert done[names[0]].near(cold)
        assert done[names[1]].near(cold_fresh)
        engine.assert_at_rest()
    _heals(engine, tokens)


def test_a_lookup_server_that_dies_in_the_middle(engine: Engine, server: RedisServer) -> None:
    """It goes with lookups in flight and comes back under the same address."""
    engine.forget()
    server.raw("FLUSHALL")
    prompts = [prompt(700, seed=10 + i) for i in range(4)]
    cold = [engine.run(tokens) for tokens in prompts]
    engine.forget()
    with server.frozen():  # so that no lookup is answered
        names = [engine.add(tokens) for tokens in prompts]
        engine.step()
        assert engine.connector.outstanding()["lookups"] == 4
        with SwitchedTransport.switched("gone"):
            done = engine.finish(names)
    assert all(done[name].near(wanted) for name, wanted in zip(names, cold, strict=True))
    engine.assert_at_rest()
    _heals(engine, prompts[0])


def _heals(engine: Engine, tokens: list[int]) -> None:
    """With everything back, a prompt is saved (again) and loaded, bit for bit as from the engine's own cache."""
    engine.forget()
    engine.run(tokens)
    engine.drain()
    local = engine.run(tokens)
    engine.forget()
    external = engine.run(tokens)
    assert external.cached == local.cached == len(tokens) // BLOCK * BLOCK
    assert external.like(local)
    engine.assert_at_rest()
