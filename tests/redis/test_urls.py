"""What a redis URL may say, and what is said about one that cannot be."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trustme

from kvpool.backends._redis_url import settings_of
from kvpool.backends.redis import RedisStore
from kvpool.errors import ConfigError
from kvpool.registry import create_store, parse_url


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://", "localhost:6379"),
        ("redis://h", "h:6379"),
        ("redis://h/", "h:6379"),
        ("redis://h:1/3", "h:1"),
        ("redis://[::1]:7/0", "[::1]:7"),
        ("rediss://user:pw@h", "h:6379"),
        ("redis+unix:///run/redis.sock?db=3", "/run/redis.sock"),
        ("redis+unix://user:pw@/run/redis.sock", "/run/redis.sock"),
        ("redis+sentinel://a/main", "main of a:26379"),
        ("redis+sentinel://a:1,b,[::1]:3/main?db=2&sentinel_password=x", "main of a:1,b:26379,[::1]:3"),
        ("rediss+sentinel://a/main?tls_hostname=redis", "main of a:26379"),
        ("redis+cluster://a", "a:6379"),
        ("rediss+cluster://a:1,b:2/", "a:1,b:2"),
        ("redis://h?prefix=&ttl=0.5&timeout=0.1&connections=2&max_value=1MiB", "h:6379"),
    ],
)
def test_forms(url: str, place: str) -> None:
    assert settings_of(parse_url(url)).place == place
    assert isinstance(create_store(url), RedisStore)


def test_options_and_defaults() -> None:
    settings = settings_of(parse_url("redis://h"))
    assert (settings.prefix, settings.ttl_ms, settings.max_value) == ("kvpool:", None, 512 * 1024 * 1024 - 40)
    settings = settings_of(parse_url("redis://h?prefix=x&ttl=1.5&max_value=1MiB"))
    assert (settings.prefix, settings.ttl_ms, settings.max_value) == ("x", 1500, 1 << 20)
    store = create_store("redis://h?ttl=9&max_value=7")
    assert (store.capabilities.shared, store.capabilities.ttl, store.capabilities.scan) == (True, True, True)
    assert store.capabilities.max_value_bytes == 7


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://h?tls_ca=x", "unknown option tls_ca='x'"),
        ("redis://h?conections=3", "did you mean 'connections'?"),
        ("redis://h?connections=1", "connections='1'"),
        ("redis://h?timeout=0", "timeout='0'"),
        ("redis://h?timeout=inf", "timeout='inf'"),
        ("redis://h?ttl=nan", "ttl='nan'"),
        ("redis://h?ttl=0", "ttl='0'"),
        ("redis://h?max_value=1GiB", "max_value='1GiB'"),
        ("redis://h?prefix={x}", "prefix='{x}'"),
        ("redis://h?prefix=a%20b", "prefix='a b'"),
        ("redis://h?prefix=a%0a", "prefix="),
        ("redis://h/main", "'/main' is not the number of a database"),
        ("redis://h/1/2", "is not the number of a database"),
        ("redis://h?db=1", "unknown option db='1'"),
        ("redis://a:1,b:2", "several hosts are a cluster (redis+cluster://"),
        ("redis+unix://", "path of a socket is needed"),
        ("redis+unix://host/run/redis.sock", "path of a socket is needed"),
        ("redis+unix:///s?db=-1", "db='-1'"),
        ("redis+sentinel://a:1,b:2", "the name of the service must be the path"),
        ("redis+sentinel://a/main/0", "the name of the service must be the path"),
        ("redis+sentinel:///main", "no host"),
        ("redis+sentinel://a:1,b:99999/main", "'b:99999' is not host:port"),
        ("redis+sentinel://a:1,,b/main", "'' is not host:port"),
        ("redis+cluster://a/1", "a cluster has no databases"),
        ("redis+cluster://a?db=1", "unknown option db='1'"),
        ("rediss://h?tls_ca=/no/such/file", "tls_ca='/no/such/file': No such file"),
        ("rediss://h?tls_cert=/no/such/file", "tls_cert='/no/such/file': No such file"),
        ("rediss://h?tls_key=/k", "tls_key is given without tls_cert"),
        ("kvpool.backends.redis:RedisStore", "a redis store is one of redis://"),
    ],
)
def test_mistakes_are_named(url: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        create_store(url.replace("://", "://anna:hush-hush@", 1) if url.startswith("redis://h?") else url)
    assert said in str(raised.value)
    assert "hush" not in str(raised.value)


def test_files_that_are_no_certificates_and_keys_under_lock(tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    with pytest.raises(ConfigError, match="tls_ca="):
        create_store(f"rediss://h?tls_ca={junk}")
    with pytest.raises(ConfigError, match="tls_cert="):
        create_store(f"rediss://h?tls_cert={junk}")
    locked = tmp_path / "locked.pem"
    issued = trustme.CA().issue_cert("client")
    from cryptography.hazmat.primitives import serialization as s

    key = s.load_pem_private_key(issued.private_key_pem.bytes(), None)
    text = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"secret"))
    locked.write_bytes(issued.cert_chain_pems[0].bytes() + text)
    with pytest.raises(ConfigError, match=r"tls_cert=.*locked.pem"):  # and nothing is asked on the terminal
        create_store(f"rediss://h?tls_cert={locked}")


def test_a_password_is_in_no_text() -> None:
    for url in (
        "redis://anna:hush-hush@h",
        "redis+sentinel://anna:hush-hush@a:1,b:2/main?sentinel_username=u&sentinel_password=hush-hush",
        "redis+cluster://:hush-hush@a:1,b:2",
    ):
        store = RedisStore(url)
        assert "hush" not in repr(store) + str(store) + repr(vars(store)) + repr(vars(store._servers))


def test_tls_is_on_and_strict() -> None:
    settings = settings_of(parse_url("rediss+cluster://a"))
    context = vars(settings.servers)["_access"].tls
    assert isinstance(context, ssl.SSLContext)
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname
