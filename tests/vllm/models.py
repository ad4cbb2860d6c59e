"""Tiny models with seeded weights whose greedy output depends on the whole context.

vLLM's dummy weights are so small that attention contributes almost nothing, and corrupted KV would pass unseen. Here
queries and keys are scaled up so that attention is peaked, and the tests prove with a negative control that a wrong
block changes the output.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB = 1000
SPECIAL = {0: "<pad>", 1: "<s>", 2: "</s>"}  #: tokens that are no text
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


def dtype(model: Path) -> Any:
    """What a model directory says of itself; vLLM would make 16 bits out of fp32 by itself."""
    config = json.loads((model / "config.json").read_text())
    return config.get("dtype") or config["torch_dtype"]


def write_tokenizer(folder: Path) -> None:
    """A tokenizer beside the model: token ``n`` is the word ``wn``, words are split at white space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {SPECIAL.get(token, f"w{token}"): token for token in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##")  # words apart by spaces
    _save_tokenizer(folder, tokenizer)


def write_byte_tokenizer(folder: Path) -> None:
    """A tokenizer beside the model, in which any text can be said: each byte is a token, the others are two letters."""
    from itertools import islice, product
    from string import ascii_lowercase, ascii_uppercase

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pairs = ("".join(two) for letters in (ascii_lowercase, ascii_uppercase) for two in product(letters, repeat=2))
    texts = [*SPECIAL.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    texts += islice(pairs, VOCAB - len(texts))
    tokenizer = Tokenizer(models.BPE({text: token for token, text in enumerate(texts)}, [], unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    _save_tokenizer(folder, tokenizer)


def _save_tokenizer(folder: Path, tokenizer: Any) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<pad>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_qwen3_next(folder: Path) -> Path:
    """A Qwen3-Next-like model directory: linear attention (Mamba groups in vLLM) and full attention, by turns; bf16."""
    options: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "full_attention_interval": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    }
    gains = {"v_proj": 2.0, "o_proj": 4.0, "out_proj": 4.0, "in_proj": 2.0, "lm_head": 2.0}
    return _write(folder, "qwen3_next", options, gains, torch.bfloat16)


def write_deepseek_v3(folder: Path) -> Path:
    """A DeepSeek-V3-like model directory: multi-head latent attention, dense layers only; fp32.

    The latent has the size of the real one, which is the only one that vLLM's CPU kernels take.
    """
    options: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "first_k_dense_replace": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 64,
    }
    gains = {"q_b": 3.0, "kv_a": 3.0, "kv_b": 2.0, "o_proj": 2.0}
    return _write(folder, "deepseek_v3", options, gains, torch.float32)


def write_deepseek_v4(folder: Path) -> Path:
    """A DeepSeek-V4-like model directory without weights: for the layout of its KV cache, not to be run."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB,
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 256,
        "o_lora_rank": 256,
        "o_groups": 4,
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 512,
        "sliding_window": 128,
        "compress_ratios": [0, 4, 128, 4],
        "compress_rope_theta": 160000.0,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "moe_intermediate_size": 256,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "num_hash_layers": 1,
        "norm_topk_prob": True,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _write(folder: Path, kind: str, options: dict[str, Any], gains: dict[str, float], dtype: torch.dtype) -> Path:
    """A model directory through transformers' own class, which knows the names and shapes of the weights.

    ``gains``: of the matrices whose name contains the key; 1 for the others.
    """
    import transformers

    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = transformers.AutoConfig.for_model(kind, **common, **options)
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                gain = next((g for key, g in gains.items() if key in name), 1.0) / weight.shape[1] ** 0.5
                weight.copy_(torch.randn(weight.shape, generator=random) * gain)
            elif weight.dim() >= 2:
                weight.copy_(torch.randn(weight.shape, generator=random) * (1.0 if "embed" in name else 0.5))
            elif "q_norm" in name or "k_norm" in name:  # weights around 0 in Qwen3-Next; this makes attention peaked
                weight.fill_(1.0)
            elif "dt_bias" in name:  # states that forget slowly, so that the first tokens still count at the end
                weight.copy_(torch.rand(weight.shape, generator=random) * 4 - 6)
    model.to(dtype).save_pretrained(folder)
    return folder
