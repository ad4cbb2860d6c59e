"""What the facts of an engine's namespace do and do not depend on."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm.config import MultiModalConfig
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
)

from kvpool.config import Config
from kvpool.errors import ConfigError
from kvpool.keys import Namespace
from kvpool.vllm import weights
from kvpool.vllm.namespace import model_facts, seed_facts
from kvpool.vllm.weights import file_digest, weights_fingerprint
from tests.vllm.configs import caches, full, vllm_config
from tests.vllm.models import write_llama


class TestNamespace:
    """What the facts of a namespace do and do not depend on."""

    def facts(self, model: Path, **options: Any) -> dict[str, Any]:
        config = vllm_config(model, **options)
        return dict(model_facts(config, caches(full()), Config.load({})))

    def test_the_folder_name_does_not_matter_the_weights_do(self, tmp_path: Path) -> None:
        one, same = write_llama(tmp_path / "a" / "x"), write_llama(tmp_path / "b" / "y")
        other = write_llama(tmp_path / "c" / "x", seed=1)
        assert self.facts(one) == self.facts(same)
        differing = {k for k, v in self.facts(one).items() if self.facts(other)[k] != v}
        assert differing == {"weights"}

    def test_one_changed_weight_is_another_namespace(self, tmp_path: Path) -> None:
        folder = write_llama(tmp_path / "m")
        before = self.facts(folder)["weights"]
        file = folder / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[len(data) * 2 // 3] ^= 1
        file.write_bytes(data)
        assert self.facts(folder)["weights"] != before

    def test_a_kv_dtype_is_another_namespace(self, model: Path) -> None:
        assert self.facts(model) != self.facts(model, dtype="bfloat16")

    @pytest.mark.parametrize(
        ("owner", "name", "value", "fact"),
        [
            ("model_config", "dtype", torch.bfloat16, "dtype"),
            ("model_config", "quantization", "fp8", "quantization"),
            ("model_config", "quantization_config", {"bits": 4}, "quantization_config"),
            ("model_config", "model_impl", "transformers", "code"),
            ("model_config", "code_revision", "v2", "code"),
            ("cache_config", "cache_dtype", "fp8", "kv_dtype"),
            ("cache_config", "kv_cache_dtype_skip_layers", ["0"], "kv_options"),
            ("parallel_config", "tensor_parallel_size", 2, "tensor_parallel"),
            ("parallel_config", "pipeline_parallel_size", 2, "pipeline_parallel"),
        ],
    )
    def test_what_decides_the_bytes_is_a_fact(
        self, model: Path, owner: str, name: str, value: object, fact: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = vllm_config(model)
        before = model_facts(config, caches(full()), Config.load({}))
        monkeypatch.setattr(getattr(config, owner), name, value, raising=False)
        after = model_facts(config, caches(full()), Config.load({}))
        assert {k for k in before if before[k] != after[k]} == {fact}
        assert Namespace.of(before).digest != Namespace.of(after).digest

    @pytest.mark.parametrize(("fact", "change"), [
        ("groups", lambda c: setattr(c.kv_cache_groups[0], "kv_cache_spec", full(num_kv_heads=4))),
        ("groups", lambda c: setattr(c.kv_cache_groups[0], "kv_cache_spec", full(dtype=torch.bfloat16))),
        ("layers", lambda c: c.kv_cache_groups[0].layer_names.append("another")),
        ("layout", lambda c: setattr(c, "kv_cache_layout", "NHD")),
        ("hash_block_size", lambda c: setattr(c, "hash_block_size", 16)),
    ])  # fmt: skip
    def test_so_is_the_form_of_the_cache(self, model: Path, fact: str, change: Callable[[KVCacheConfig], None]) -> None:
        config, changed = vllm_config(model), caches(full())
        change(changed)
        before = model_facts(config, caches(full()), Config.load({}))
        after = model_facts(config, changed, Config.load({}))
        assert {k for k in before if before[k] != after[k]} == {fact}

    def test_so_are_the_model_s_configuration_the_tenant_and_the_version(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = vllm_config(model)
        before = model_facts(config, caches(full()), Config.load({}))

        def differing(**options: Any) -> set[str]:
            after = model_facts(config, caches(full()), Config.load(options))
            return {k for k in before if before[k] != after[k]}

        assert differing(tenant="other") == {"tenant"}
        assert differing(min_load_tokens=99, save_after_uses=2) == set()
        with monkeypatch.context() as patch:
            patch.setattr(vllm, "__version__", "0.99")
            assert differing() == {"engine_version"}
        monkeypatch.setattr(config.model_config.hf_config, "rms_norm_eps", 0.5)
        assert differing() == {"model"}

    def test_so_is_the_hash_chain(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1.core import kv_cache_utils

        monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"1" * 32, raising=False)
        before = seed_facts(vllm_config(model))
        assert seed_facts(vllm_config(model)) == before
        assert seed_facts(vllm_config(model, prefix_caching_hash_algo="xxhash")) != before
        monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"2" * 32)
        assert seed_facts(vllm_config(model)) != before

    def test_so_is_how_images_are_read(self, tmp_path: Path) -> None:
        folder = write_llama(tmp_path / "m")
        config = vllm_config(folder)
        assert "multimodal" not in model_facts(config, caches(full()), Config.load({}))
        config.model_config.multimodal_config = MultiModalConfig()
        seen = [model_facts(config, caches(full()), Config.load({}))["multimodal"]]
        (folder / "preprocessor_config.json").write_text("{}")
        seen.append(model_facts(config, caches(full()), Config.load({}))["multimodal"])
        (folder / "preprocessor_config.json").write_text('{"size": 7}')
        seen.append(model_facts(config, caches(full()), Config.load({}))["multimodal"])
        config.model_config.multimodal_config.mm_processor_kwargs = {"do_resize": False}
        seen.append(model_facts(config, caches(full()), Config.load({}))["multimodal"])
        assert all(a != b for a, b in itertools.combinations(seen, 2))

    def test_a_label_takes_the_place_of_reading_the_weights(self, model: Path) -> None:
        facts = model_facts(vllm_config(model), caches(full()), Config.load({"model_fingerprint": "v7"}))
        assert facts["weights"] == "v7"

    def test_weights_that_cannot_be_found_are_refused_with_the_way_out(self, tmp_path: Path) -> None:
        folder = write_llama(tmp_path / "m")
        config = vllm_config(folder)
        os.remove(folder / "model.safetensors")
        with pytest.raises(ConfigError, match="model_fingerprint"):
            weights_fingerprint(config)

    @pytest.mark.parametrize("option", ["load_format", "model_weights"])
    def test_weights_that_come_from_elsewhere_need_a_label(self, model: Path, option: str) -> None:
        config = vllm_config(model)
        if option == "load_format":
            config.load_config.load_format = "tensorizer"
        else:
            config.model_config.model_weights = "s3://bucket/model"
        with pytest.raises(ConfigError, match="model_fingerprint"):
            weights_fingerprint(config)
        facts = model_facts(config, caches(full()), Config.load({"model_fingerprint": "v7"}))
        assert facts["weights"] == "v7"

    def test_weights_are_looked_for_where_the_engine_has_put_them(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two caches may hold different states of one model."""
        config, found = vllm_config(model), {}
        for name in ("", "elsewhere"):
            folder = tmp_path / "hub" / name / "models--a--b"
            snapshot = write_llama(folder / "snapshots" / "1", seed=len(name))
            (folder / "refs").mkdir()
            (folder / "refs" / "main").write_text("1")
            monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
            monkeypatch.setattr(config.load_config, "download_dir", str(tmp_path / "hub" / name) if name else None)
            monkeypatch.setattr(config.model_config, "model", "a/b")
            found[name] = weights_fingerprint(config)
            assert found[name] == weights_fingerprint(vllm_config(snapshot))
        assert found[""] != found["elsewhere"]

    @pytest.mark.parametrize(("one", "two"), [("01" * 32, "23" * 32), ("01" * 20, "23" * 20)])
    def test_files_of_a_hub_cache_are_known_by_their_content_name(self, tmp_path: Path, one: str, two: str) -> None:
        folder = write_llama(tmp_path / "snapshots" / "abc")
        blobs = tmp_path / "blobs"
        blobs.mkdir()
        (folder / "model.safetensors").rename(blobs / one)
        (folder / "model.safetensors").symlink_to(blobs / one)
        before = weights_fingerprint(vllm_config(folder))
        (blobs / one).rename(blobs / two)
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to(blobs / two)
        assert weights_fingerprint(vllm_config(folder)) != before

    def test_a_folder_that_happens_to_be_called_blobs_is_no_hub_cache(self, tmp_path: Path) -> None:
        one, other = write_llama(tmp_path / "a" / "blobs"), write_llama(tmp_path / "b" / "blobs", seed=1)
        assert weights_fingerprint(vllm_config(one)) != weights_fingerprint(vllm_config(other))


class TestFilesThatWereReadBefore:
    """The digest of a weight file is noted, so that a restart does not read gigabytes again."""

    @pytest.fixture
    def file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(weights, "SETTLED_S", -1.0)
        file = tmp_path / "model.safetensors"
        file.write_bytes(b"weights" * 1000)
        return file

    def notes(self, tmp_path: Path) -> list[Path]:
        return sorted((tmp_path / "cache" / "kvpool" / "weights").glob("*"))

    def test_one_is_not_read_again(self, file: Path, tmp_path: Path) -> None:
        first = file_digest(file)
        (note,) = self.notes(tmp_path)
        assert file_digest(file) == first == note.read_text()
        note.write_text("0" * 31 + "7")
        assert file_digest(file) == "0" * 31 + "7", "it was read again"

    def test_one_that_changed_is(self, file: Path, tmp_path: Path) -> None:
        first = file_digest(file)
        stat = file.stat()
        file.write_bytes(b"Weights" * 1000)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as rsync and tar leave it
        assert file_digest(file) != first
        assert len(self.notes(tmp_path)) == 2

    @pytest.mark.parametrize("text", ["", "0", "-1", "7" * 33, "g" * 32])
    def test_a_note_that_makes_no_sense_is_replaced(self, file: Path, tmp_path: Path, text: str) -> None:
        first = file_digest(file)
        (note,) = self.notes(tmp_path)
        note.write_text(text)
        assert file_digest(file) == first == note.read_text()

    def test_one_that_was_just_written_is_not_noted(
        self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(weights, "SETTLED_S", 1000.0)
        file_digest(file)
        assert not self.notes(tmp_path)

    def test_without_a_place_for_notes_nothing_is_lost(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = file_digest(file)
        monkeypatch.setenv("XDG_CACHE_HOME", str(file))
        assert file_digest(file) == first

    def test_a_user_without_a_home_needs_none(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As in a container that runs under a number of its own."""
        first = file_digest(file)
        for name in ("XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name)
        monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)
        assert file_digest(file) == first
