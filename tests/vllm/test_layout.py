"""From vLLM's configuration and tensors to groups and block layouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvpool.errors import LayoutError
from kvpool.vllm.layout import block_layouts, cache_spec
from tests.vllm.configs import caches, full, vllm_config


class TestLayout:
    def test_a_tensor_whose_blocks_are_not_dense_is_refused_by_name(self) -> None:
        config = caches(full())
        with pytest.raises(LayoutError, match=r"layer\.0"):
            block_layouts({"layer.0": torch.zeros(2, 8, 32, 64).transpose(0, 1)}, config)
        with pytest.raises(LayoutError, match=r"layer\.0"):
            block_layouts({"layer.0": torch.zeros(9, 32, 64)}, config)

    def test_layers_that_share_one_tensor_are_moved_once(self) -> None:
        config = caches(full())
        config.kv_cache_groups[0].layer_names.append("layer.1")
        memory = torch.zeros(8, 32, 64)
        (layout,) = block_layouts({"layer.0": memory, "layer.1": memory}, config)
        assert layout.block_bytes == 32 * 64 * 4

    def test_a_block_of_several_kernel_blocks(self) -> None:
        """They stand one after the other in the first dimension."""
        config = caches(full())
        memory = torch.arange(16 * 2 * 16, dtype=torch.float32).reshape(16, 2, 16)  # each of the 8 blocks is two
        (layout,) = block_layouts({"layer.0": memory}, config)
        out = np.zeros((2, layout.block_bytes), np.uint8)
        layout.gather([5, 2], out)
        assert out.tobytes() == memory[[10, 11, 4, 5]].numpy().tobytes()
        with pytest.raises(LayoutError, match=r"layer\.0"):  # a gap between the two
            block_layouts({"layer.0": torch.zeros(16, 32)[:, :16]}, config)

    def test_pages_of_one_allocation(self) -> None:
        """vLLM on CPU backs all layers with one allocation; a layer is a strided view."""
        config = caches(full())
        config.kv_cache_groups[0].layer_names.append("layer.1")
        memory = torch.arange(8 * 2 * 64, dtype=torch.float32).reshape(8, 2, 64)
        (layout,) = block_layouts({"layer.0": memory[:, 0], "layer.1": memory[:, 1]}, config)
        out = np.zeros((2, layout.block_bytes), np.uint8)
        layout.gather([5, 2], out)
        assert out.tobytes() == memory[[5, 2]].numpy().tobytes()


def test_the_spec_takes_the_engine_s_own_hash_block(model: Path) -> None:
    config = caches(full())
    config.hash_block_size = 16
    spec = cache_spec(vllm_config(model), config)
    assert (spec.groups[0].block_size, spec.hash_block_size) == (32, 16)
