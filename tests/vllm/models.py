"""Tiny models with seeded weights whose greedy output depends on the whole context.

vLLM's dummy weights are so small that attention contributes almost nothing, and corrupted KV would pass unseen. Here
queries and keys are scaled up so that attention is peaked, and the tests prove with a negative control that a wrong
block changes the output.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB = 1000
#: Tokens of the sliding window in hybrid models.
WINDOW = 256


def write_llama(
    folder: Path,
    *,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    seed: int = 0,
    pattern: str = "",
    window: int = WINDOW,
) -> Path:
    """A Llama-like model directory: fp32, head size 32, half as many KV heads, no tokenizer.

    ``pattern``: one letter a layer, F for full attention and S for a sliding window; full attention without it.
    """
    layers = len(pattern) or layers
    kv_heads, head, inner = heads // 2, hidden // heads, hidden * 2
    folder.mkdir(parents=True)
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": VOCAB,
        "hidden_act": "silu",
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if pattern:
        kinds = {"F": "full_attention", "S": "sliding_attention"}
        config |= {"layer_types": [kinds[letter] for letter in pattern], "sliding_window": window}
    (folder / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random).mul_(gain / columns**0.5)

    weights = {
        "model.embed_tokens.weight": torch.randn(VOCAB, hidden, generator=random),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(VOCAB, hidden),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}."
        weights |= {
            name + "self_attn.q_proj.weight": matrix(heads * head, hidden, 3.0),
            name + "self_attn.k_proj.weight": matrix(kv_heads * head, hidden, 3.0),
            name + "self_attn.v_proj.weight": matrix(kv_heads * head, hidden, 2.0),
            name + "self_attn.o_proj.weight": matrix(hidden, heads * head, 2.0),
            name + "mlp.gate_proj.weight": matrix(inner, hidden),
            name + "mlp.up_proj.weight": matrix(inner, hidden),
            name + "mlp.down_proj.weight": matrix(hidden, inner),
            name + "input_layernorm.weight": torch.ones(hidden),
            name + "post_attention_layernorm.weight": torch.ones(hidden),
        }
    save_file({k: v.contiguous() for k, v in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_tokenizer(folder: Path) -> None:
    """A tokenizer beside the model: token ``n`` is the word ``wn``, words are split at white space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = {0: "<pad>", 1: "<s>", 2: "</s>"}
    words = {names.get(token, f"w{token}"): token for token in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##")  # words apart by spaces
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<pad>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
