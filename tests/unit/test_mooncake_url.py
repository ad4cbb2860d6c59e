"""URLs of Mooncake stores, the environment that Mooncake reads, and what it would silently ignore."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvpool.backends import _mooncake_url
from kvpool.backends._mooncake_url import (
    Settings,
    environment_advice,
    prepare_environment,
    settings_advice,
    settings_of,
)
from kvpool.errors import ConfigError
from kvpool.registry import create_store, known_names, parse_url


def settings(url: str) -> Settings:
    return settings_of(parse_url(url))


def test_a_url_names_the_master() -> None:
    assert "mooncake" in known_names("stores")
    assert settings("mooncake://10.0.0.1:50055").address == "10.0.0.1:50055"
    assert settings("mooncake://master").address == "master:50051"
    assert settings("mooncake://[fd00::1]:1").address == "[fd00::1]:1"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mooncake://", "mooncake://master"),
        ("mooncake://a:1,b:2", "mooncake://master"),
        ("mooncake://user@a", "without user and path"),
        ("mooncake://a/path", "without user and path"),
        ("mooncake://a?protocol=quic", "protocol='quic'"),
        ("mooncake://a?segment=1MiB", "no segment below 16 MiB"),
        ("mooncake://a?replicas=0", "replicas='0'"),
        ("mooncake://a?zero_copy=maybe", "zero_copy='maybe'"),
        ("mooncake://a?checksum=crc", "checksum='crc'"),
        ("mooncake://a?prefix=white%20space", "prefix="),
        ("mooncake://a?threads=0", "threads='0'"),
        ("mooncake://a?timeout_s=0", "timeout_s='0'"),
        ("mooncake://a?buffer=1", "buffer='1'"),
        ("mooncake://a?segment=99999999999999999999", "segment="),
        ("mooncake://a?local_buffer=1e30", "local_buffer="),
        ("mooncake://a?metadata=redis://b:6379", "only HTTP"),
        ("mooncake://a?metadata=", "only HTTP"),
        ("mooncake://a?metadata=http:///path", "only HTTP"),
        ("mooncake://a?metadata=http://b:port", "only HTTP"),
        ("mooncake://a?segmnt=1GiB", "did you mean 'segment'?"),
    ],
)
def test_what_is_wrong_is_named(url: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        create_store(url)
    assert words in str(caught.value)


def test_a_metadata_server_takes_no_secrets() -> None:
    """Mooncake logs its address."""
    with pytest.raises(ConfigError, match="only HTTP") as caught:
        create_store("mooncake://a?metadata=http://user:hunter2@b/metadata")
    assert "hunter2" not in str(caught.value)
    assert settings("mooncake://a?metadata=http://b:8080/metadata").metadata_server == ("b", 8080)
    assert settings("mooncake://a?metadata=https://b/metadata").metadata_server == ("b", 443)
    assert settings("mooncake://a").metadata_server is None


def test_what_a_url_decides() -> None:
    store = create_store("mooncake://a?zero_copy=yes&buffer=1MiB")
    assert store.capabilities.shared
    assert store.capabilities.zero_copy
    assert store.capabilities.max_value_bytes == (1 << 20) - 40


@pytest.mark.parametrize(
    ("protocol", "nic", "choice", "wanted"),
    [
        ("tcp", True, "auto", False),
        ("rdma", True, "auto", True),
        ("rdma", False, "auto", False),
        ("rdma", True, "no", False),
        ("tcp", False, "yes", True),
    ],
)
def test_zero_copy_is_for_rdma_or_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, protocol: str, nic: bool, choice: str, wanted: bool
) -> None:
    monkeypatch.setattr(_mooncake_url, "has_rdma", lambda: nic)
    assert settings(f"mooncake://a?protocol={protocol}&zero_copy={choice}").zero_copy is wanted


def test_the_environment_is_prepared_but_not_taken_over() -> None:
    environ = {"MC_RPC_TIMEOUT_MS": "1000", "HOME": "/root"}
    prepare_environment(settings("mooncake://a?timeout_s=2"), "10.0.0.2", environ)
    assert environ == {
        "HOME": "/root",
        "MC_RPC_TIMEOUT_MS": "1000",
        "MC_TCP_BIND_ADDRESS": "10.0.0.2",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_LOG_LEVEL": "ERROR",
    }


@pytest.mark.parametrize(
    ("before", "too_late", "words"),
    [
        ({}, False, []),
        ({"MC_RPC_TIMEOUT_MS": "9000", "MC_STORE_CLIENT_SETUP_RETRIES": "1"}, False, []),
        ({"MC_RPC_TIMEOUT_MS": "60000"}, False, ["MC_RPC_TIMEOUT_MS=60000"]),
        ({"MC_RPC_TIMEOUT_MS": "soon"}, False, ["MC_RPC_TIMEOUT_MS=soon"]),
        ({"MC_STORE_CLIENT_SETUP_RETRIES": "20"}, False, ["MC_STORE_CLIENT_SETUP_RETRIES=20"]),
        ({"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "64"}, False, ["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER=64"]),
        ({"MC_TCP_PROGRESS_TIMEOUT_SEC": "60"}, False, ["MC_TCP_PROGRESS_TIMEOUT_SEC=60"]),
        ({"MC_TCP_PROGRESS_TIMEOUT_SEC": "5"}, False, []),
        ({"MC_TCP_BIND_ADDRESS": "10.0.0.7", "MC_LOG_LEVEL": "INFO"}, False, []),
        (
            {},
            True,
            [
                "MC_TCP_MAX_Q",
                "MC_TCP_MAX_P",
                "SETUP_RETRIES=1 comes too late",
                "MC_RPC",
                "MC_TCP_PROGRESS",
                "MC_TCP_BIND",
            ],
        ),
    ],
)
def test_what_is_wrong_with_the_environment(before: dict[str, str], too_late: bool, words: list[str]) -> None:
    wanted = prepare_environment(settings("mooncake://a"), "10.0.0.2", dict(before))
    said = list(environment_advice(wanted, before, too_late=too_late))
    assert len(said) == len(words)
    assert all(word in text for word, text in zip(words, said, strict=True))


@pytest.mark.parametrize(
    ("options", "config", "words"),
    [
        ("soft_pin=true&preferred_segment=a:1", {"soft_pin_action": 0, "preferred_segment": ""}, []),
        ("soft_pin=true", {"with_soft_pin": False}, []),
        ("soft_pin=true", {}, ["soft_pin is ignored"]),
        ("preferred_segment=a:1", {}, ["preferred_segment is ignored"]),
        ("tenant=blue", {}, ["--enable_multi_tenants"]),
        ("host=10.0.0.7", {}, ["host=10.0.0.7 is ignored without segment="]),
        ("host=10.0.0.7&segment=1GiB", {}, []),
        ("device=mlx5_0", {}, ["device=mlx5_0 is ignored"]),
        ("protocol=rdma", {}, ["no RDMA device"]),
    ],
)
def test_settings_that_would_be_ignored_are_said(
    monkeypatch: pytest.MonkeyPatch, options: str, config: dict[str, object], words: list[str]
) -> None:
    monkeypatch.setattr(_mooncake_url, "has_rdma", lambda: False)
    said = list(settings_advice(settings(f"mooncake://a?{options}"), SimpleNamespace(**config)))
    assert len(said) == len(words)
    assert all(word in text for word, text in zip(words, said, strict=True))
