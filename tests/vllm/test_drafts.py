"""Speculative decoding by n-grams; :mod:`tests.vllm.drafts` says what must hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.releases import OTHERS, run


@pytest.mark.parametrize("name", ["model", pytest.param("hybrid_model", marks=pytest.mark.long)])
def test_drafts(request: pytest.FixtureRequest, name: str, tmp_path: Path) -> None:
    run("tests.vllm.drafts", request.getfixturevalue(name), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("release", sorted(set(OTHERS) - {"0.30"}))  # which cannot speculate on CPU, pool or not
def test_drafts_with_another_release(model: Path, release: str, tmp_path: Path) -> None:
    run("tests.vllm.drafts", model, tmp_path, release=release)
