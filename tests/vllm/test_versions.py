"""Each supported release of vLLM, in a process of its own; the installed one has all the other tests."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvpool.errors import UnsupportedError
from kvpool.vllm import _versions
from tests.vllm.releases import OTHERS, run


def test_every_tested_release_is_run() -> None:
    installed = ".".join(vllm.__version__.split(".")[:2])
    assert {installed, *OTHERS} == set(_versions.TESTED)


@pytest.mark.parametrize("release", OTHERS)
@pytest.mark.parametrize(
    "kind", ["model", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("hybrid_model", "mamba_model"))]
)
def test_smoke(request: pytest.FixtureRequest, release: str, kind: str, tmp_path: Path) -> None:
    run("tests.vllm.one_version", request.getfixturevalue(kind), tmp_path, release=release)


def test_the_version_is_said_at_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvpool")
    _versions.say_version("0.31.2")
    assert caplog.records[-1].levelno == logging.INFO
    assert "0.31.2" in caplog.text
    for unknown in ("0.33.0", "0.3.1", "1.0", "dev"):
        caplog.clear()
        _versions.say_version(unknown)
        assert caplog.records[-1].levelno == logging.WARNING
        for text in (unknown, *_versions.TESTED):
            assert text in caplog.text


def test_a_vllm_that_is_too_old_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(base, "KVConnectorTransferResults")
        with pytest.raises(UnsupportedError, match=rf"{vllm.__version__}.*0\.30"):
            importlib.reload(_versions)
    importlib.reload(_versions)
