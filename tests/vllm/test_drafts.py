"""Speculative decoding by n-grams; :mod:`tests.vllm.drafts` says what must hold."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine import Output
from tests.vllm.models import write_byte_tokenizer
from tests.vllm.other_process import outputs_of
from tests.vllm.releases import OTHERS, run
from tests.vllm.structured import CHOICES, GRAMMARS, PATTERN, SCHEMA


@pytest.mark.parametrize("name", ["model", pytest.param("hybrid_model", marks=pytest.mark.long)])
def test_drafts(request: pytest.FixtureRequest, name: str, tmp_path: Path) -> None:
    run("tests.vllm.drafts", request.getfixturevalue(name), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("release", sorted(set(OTHERS) - {"0.30"}))  # which cannot speculate on CPU, pool or not
def test_drafts_with_another_release(model: Path, release: str, tmp_path: Path) -> None:
    run("tests.vllm.drafts", model, tmp_path, release=release)


@pytest.mark.long
@pytest.mark.parametrize("name", ["model", "hybrid_model"])
def test_drafts_under_a_grammar(request: pytest.FixtureRequest, name: str, tmp_path: Path) -> None:
    """With the pool all is answered as without it. Wrong drafts that do not fit are dropped, others are rejected."""
    model = shutil.copytree(request.getfixturevalue(name), tmp_path / "model")
    write_byte_tokenizer(model)
    (tmp_path / "pool").mkdir()
    arguments = [str(model)], [str(model), str(tmp_path / "pool")]
    alone, pool = (outputs_of("tests.vllm.structured", *a, multiprocessing=False, ranks=1) for a in arguments)
    assert [a["kind"] for a in alone] == [p["kind"] for p in pool] == list(GRAMMARS)
    for expected, got in zip(alone, pool, strict=True):
        assert got["text"] == expected["text"]
        _fits(got["kind"], got["text"])
        for step, answer in got["said"].items():
            assert _output(answer).near(_output(expected["said"][step])), step
        said = got["said"]
        assert _output(said["loaded"]).like(_output(said["local"]))
        assert said["loaded"]["cached"] == said["local"]["cached"] == 992
        assert said["follow-up"]["cached"] == (1000 + len(said["cold"]["tokens"])) // 32 * 32
        assert not expected["said"]["loaded"]["cached"], "there is nothing to load from"
        for step in ("local", "loaded", "lost"):
            assert said[step]["accepted"] > 15
            assert said[step]["rejected"] > 1


def _fits(kind: str, text: str) -> None:
    if kind == "json":
        value: dict[str, Any] = json.loads(text)
        assert set(value) == set(SCHEMA["required"])
    elif kind == "regex":
        assert re.fullmatch(PATTERN, text)
    else:
        assert text in CHOICES


def _output(answer: dict[str, Any]) -> Output:
    fields = {name: answer[name] for name in ("cached", "finish")}
    return Output(tuple(answer["tokens"]), tuple(answer["logprobs"]), **fields)
