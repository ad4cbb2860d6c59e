"""What the doctor says of hardware and installations that this machine does not have."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpool.backends import _mooncake_doctor as doctor
from kvpool.backends._mooncake_url import settings_of
from kvpool.registry import parse_url


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """Two RDMA devices, one of them up."""
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    return tmp_path


def said(devices: Path, options: str, host: str = "10.0.0.1") -> list[tuple[str, str]]:
    settings = settings_of(parse_url(f"mooncake://10.0.0.9?{options}"))
    return [(finding.level, finding.text) for finding in doctor.network(settings, host, devices)]


def test_how_values_travel(devices: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert said(devices, "") == [("warn", "over TCP; mlx5_0 could do RDMA")]
    assert said(devices / "nothing", "") == [("ok", "over TCP; there is no RDMA device")]
    assert said(devices, "protocol=rdma") == [("ok", "over RDMA: mlx5_0")]
    assert said(devices, "protocol=rdma&device=mlx5_0,mlx5_1,mlx5_7")[1:] == [
        ("fail", "mlx5_1, mlx5_7: not there, or not up")
    ]
    (devices / "mlx5_0/ports/1/state").write_text("1: DOWN")
    assert said(devices, "protocol=rdma") == [("fail", "there are RDMA devices, but none is up")]


def test_memory_that_may_not_be_locked(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    assert said(devices, "protocol=rdma")[1:] == [
        ("fail", "this user may lock 8 MiB of memory, and RDMA needs all registered memory locked")
    ]


def test_memory_that_others_cannot_reach(devices: Path) -> None:
    level, text = said(devices / "nothing", "segment=1GiB", "127.0.0.1")[1]
    assert (level, text.partition(",")[0]) == ("warn", "memory is lent as 127.0.0.1")


@pytest.mark.parametrize(
    ("installed", "levels"),
    [
        ({}, ["ok"]),
        ({"mooncake-transfer-engine": "0.3.13"}, ["ok"]),
        ({"mooncake-transfer-engine": "0.3.9.post2"}, ["ok", "warn"]),
        ({"mooncake-transfer-engine": "0.3.13", "mooncake-transfer-engine-non-cuda": "0.3.12"}, ["warn"]),
    ],
)
def test_builds(installed: dict[str, str], levels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = [SimpleNamespace(name=name, version=version) for name, version in {"numpy": "2.0", **installed}.items()]
    monkeypatch.setattr(doctor, "distributions", lambda: found)
    findings = doctor.versions()
    assert [finding.level for finding in findings] == levels
    assert all(name in findings[0].text for name in installed)


def test_no_secret_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_REDIS_PASSWORD", "hush")
    [finding] = doctor.environment()
    assert "MC_REDIS_PASSWORD=***" in finding.text
