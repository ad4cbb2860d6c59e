"""Each supported release of vLLM, in a process of its own; the installed one has all the other tests."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvpool.errors import UnsupportedError
from kvpool.vllm import _versions
from tests.vllm.engine import ENVIRONMENT

ROOT = Path(__file__).parents[2]
#: What `make` has unpacked, by release.
OTHERS = {f"0.{minor}": f"0.{minor}.0" for minor in (30, 31)}


def test_every_tested_release_is_run() -> None:
    installed = ".".join(vllm.__version__.split(".")[:2])
    assert {installed, *OTHERS} == set(_versions.TESTED)


@pytest.mark.parametrize("release", OTHERS)
@pytest.mark.parametrize("kind", ["model", pytest.param("hybrid_model", marks=pytest.mark.long)])
def test_smoke(request: pytest.FixtureRequest, release: str, kind: str, tmp_path: Path) -> None:
    version = OTHERS[release]
    wheel = Path(sys.prefix) / f"vllm-{version}"
    assert wheel.is_dir(), f"vLLM {version} is not unpacked in {wheel}: run `make vllm-versions`"
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": f"{wheel}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tests.vllm.one_version"]
    done = subprocess.run(
        [*command, str(request.getfixturevalue(kind)), str(tmp_path), version],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.stdout.rstrip().endswith("PASSED"), done.stdout[-2000:] + done.stderr[-4000:]


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
