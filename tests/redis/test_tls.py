"""Everything over TLS: rediss:// with certificates that are good, foreign, or for another name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from kvpool.backends.redis import RedisStore
from kvpool.errors import StoreError
from kvpool.store import Status, Store
from kvpool.testing.stores import put
from tests.redis.server import RedisServer
from tests.redis.test_conformance import RedisConformance
from tests.redis.tls import WAYS, Certificates, tls_server

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def shared(certificates: Certificates) -> Iterator[tuple[RedisServer, str]]:
    with tls_server(WAYS[0], certificates) as (server, port):
        yield server, f"rediss://127.0.0.1:{port}?tls_ca={certificates.ca}"


class TestTLS(RedisConformance):
    open_close_cycles: ClassVar[int] = 20
    examples: ClassVar[int] = 2
    url: ClassVar[str]

    @pytest.fixture(autouse=True)
    def _servers(self, shared: tuple[RedisServer, str]) -> None:
        type(self).server, type(self).url = shared

    def store(self, place: str) -> Store:
        return RedisStore(f"{self.url}&prefix={place}&max_value=16MiB")


async def check_fails(url: str, *expected: str) -> None:
    async with RedisStore(url) as store:
        with pytest.raises(StoreError) as raised:
            await store.exists(["k"])
        results = await put(store, [("k", b"value")])
    assert results.status.tolist() == [Status.FAILED]
    assert any(text in str(raised.value) for text in expected), raised.value


@pytest.mark.parametrize("way", WAYS)
async def test_certificates(way: str, certificates: Certificates, tmp_path: Path) -> None:
    with tls_server(way, certificates) as (server, port):
        ca = f"tls_ca={certificates.ca}"
        async with RedisStore(f"rediss://127.0.0.1:{port}?{ca}") as store:
            assert (await put(store, [("k", bytes(3 << 20))])).ok.all()
        await check_fails(f"rediss://127.0.0.1:{port}", "certificate verify failed")
        foreign = Certificates(tmp_path)
        await check_fails(f"rediss://127.0.0.1:{port}?tls_ca={foreign.ca}", "certificate verify failed")
        await check_fails(f"rediss://127.0.0.1:{port}?{ca}&tls_hostname=other", "certificate is not valid for 'other'")
        # A plain server waits for the rest of a command.
        hint = "no connection within 0.2 s; does it speak TLS?"
        await check_fails(f"rediss://127.0.0.1:{server.port}?{ca}&timeout=0.2", hint)


async def opened(url: str, caplog: pytest.LogCaptureFixture) -> str:
    """What the log says when this store opens, and whether its doctor says the same."""
    caplog.clear()
    async with RedisStore(url) as store:
        [finding] = await store.diagnose()
    assert finding.text in caplog.text
    return caplog.text


@pytest.mark.parametrize("ask_client", [False, True])
@pytest.mark.parametrize("way", WAYS)
async def test_a_url_without_tls_for_a_server_with(
    way: str, ask_client: bool, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    hint = "the server seems to speak TLS: the URL must begin with rediss instead of redis"
    with tls_server(way, certificates, ask_client=ask_client) as (server, port):
        for form in ("redis://127.0.0.1:{}", "redis://:word@127.0.0.1:{}", "redis+cluster://127.0.0.1:{}"):
            assert hint in await opened(form.format(port), caplog)
        server.kill()
        assert "rediss" not in await opened(f"redis://127.0.0.1:{server.port}", caplog)


async def test_a_url_with_tls_for_a_server_without(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisServer() as server:
        server.raw("CONFIG", "SET", "maxclients", 1)  # others are told so before they have said anything
        said = await opened(f"rediss://127.0.0.1:{server.port}?tls_ca={certificates.ca}", caplog)
        assert "the server does not speak TLS: the URL must begin with redis instead of rediss" in said
        assert "max number of clients" in await opened(server.url, caplog)


@pytest.mark.parametrize("way", WAYS)
async def test_a_name_in_the_certificate_and_certificates_for_clients(way: str, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path, "redis.internal")
    with tls_server(way, certificates, ask_client=True) as (_, port):
        url = f"rediss://127.0.0.1:{port}?tls_ca={certificates.ca}&timeout=2"
        await check_fails(f"{url}&tls_cert={certificates.client}", "not valid for '127.0.0.1'")
        url += "&tls_hostname=redis.internal"
        async with RedisStore(f"{url}&tls_cert={certificates.client}") as store:
            assert (await put(store, [("k", b"value")])).ok.all()
        await check_fails(url, "certificate required" if way == "own" else "closed the connection")
