"""A small, real decoder-only transformer in numpy, over paged KV memory.

RMSNorm, grouped-query attention with rotary positions, SwiGLU. The weights are random but seeded, and of such a size
that the output depends on the whole context: with tiny weights, or with attention so sharp that it sees one token only,
a corrupted KV cache would go unnoticed.

**The bits depend on the tokens alone.** A matrix product may round differently when its shape changes, so everything is
computed in tiles of ``TILE`` rows at absolute positions ``[k * TILE, (k + 1) * TILE)``. A token always meets the same
shapes, whether its prompt was read at once, in chunks, one token at a time, or behind a prefix that came from a cache.
So "reused equals computed" can be checked bit by bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["TILE", "KVCache", "Model", "ModelConfig"]

F32 = npt.NDArray[np.float32]
#: One array a layer: float32[num_blocks, 2 (key, value), block_size, kv_heads, head_dim].
KVCache = tuple[F32, ...]
#: Rows of one tile.
TILE = 64


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of the model. ``heads`` query heads share ``kv_heads`` key/value heads; ``seed`` decides the weights."""

    vocab_size: int = 256
    hidden_size: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    ffn_size: int = 512
    max_tokens: int = 8192
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: F32  # [hidden, (heads + 2 kv_heads) * head_dim]
    out: F32  # [heads * head_dim, hidden]
    gate_up: F32  # [hidden, 2 * ffn]
    down: F32  # [ffn, hidden]


class Model:
    """The weights and the forward pass. Stateless between calls: all that is remembered is in the KV cache."""

    def __init__(self, config: ModelConfig | None = None) -> None:
        self.config = c = config or ModelConfig()
        rng = np.random.default_rng(c.seed)

        def matrix(rows: int, *columns: tuple[int, float]) -> F32:
            parts = [rng.standard_normal((rows, n), np.float32) * np.float32(gain * rows**-0.5) for n, gain in columns]
            return np.concatenate(parts, axis=1)

        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.embedding = rng.standard_normal((c.vocab_size, c.hidden_size), dtype=np.float32)
        self.layers = [
            _Layer(
                qkv=matrix(c.hidden_size, (q, 2.0), (kv, 2.0), (kv, 2.0)),
                out=matrix(q, (c.hidden_size, 2.0)),
                gate_up=matrix(c.hidden_size, (2 * c.ffn_size, 1.0)),
                down=matrix(c.ffn_size, (c.hidden_size, 1.0)),
            )
            for _ in range(c.layers)
        ]
        self.unembedding = matrix(c.hidden_size, (c.vocab_size, 1.0))
        angle = np.outer(
            np.arange(-(-c.max_tokens // TILE) * TILE), 10_000.0 ** (-np.arange(0, c.head_dim, 2) / c.head_dim)
        )
        self._cos, self._sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def new_kv(self, num_blocks: int, block_size: int) -> KVCache:
        """Block memory for ``num_blocks`` blocks of ``block_size`` tokens, zeroed."""
        c = self.config
        return tuple(np.zeros((num_blocks, 2, block_size, c.kv_heads, c.head_dim), np.float32) for _ in range(c.layers))

    def fingerprint(self) -> str:
        """Digest of the weights themselves: KV computed by other weights must never be taken for this model's."""
        digest = hashlib.sha256()
        for layer in self.layers:
            for weight in (layer.qkv, layer.out, layer.gate_up, layer.down):
                digest.update(weight.data)
        digest.update(self.embedding.data)
        return digest.hexdigest()

    def forward(self, tokens: Sequence[int], start: int, stop: int, table: Sequence[int], kv: KVCache) -> F32:
        """Write the KV of ``tokens[start:stop]`` and return the logits after ``tokens[stop - 1]``, float32[vocab].

        ``table`` names the sequence's blocks in order; the KV of ``tokens[:start]`` must be there already. Rows of the
        tiles outside ``[start, stop)`` are computed along to keep the shapes, and dropped.
        """
        c, block_size = self.config, kv[0].shape[2]
        if not 0 <= start < stop <= min(len(tokens), len(table) * block_size, c.max_tokens):
            raise ValueError(f"cannot run tokens {start}..{stop} of {len(tokens)} with {len(table)} blocks")
        first, last = start // TILE * TILE, -(-stop // TILE) * TILE
        ids = np.zeros(last - first, np.intp)
        ids[: stop - first] = tokens[first:stop]
        new = np.arange(start, stop)
        slots = (np.asarray(table, np.intp)[new // block_size], new % block_size)
        blocks = np.asarray(table[: -(-stop // block_size)], np.intp)

        x: F32 = self.embedding[ids].reshape(-1, TILE, c.hidden_size)
        for layer, cache in zip(self.layers, kv, strict=True):
            q, k, v = self._project(_norm(x) @ layer.qkv, first)
            cache[slots[0], 0, slots[1]] = k[start - first : stop - first]
            cache[slots[0], 1, slots[1]] = v[start - first : stop - first]
            x += self._attend(q, cache[blocks], first, stop) @ layer.out
            gate, up = np.split(_norm(x) @ layer.gate_up, 2, axis=-1)
            gate *= 1 / (1 + np.exp(-gate))
            x += (gate * up) @ layer.down
        logits: F32 = (_norm(x[-1]) @ self.unembedding)[stop - 1 - (last - TILE)].copy()
        return logits

    def _project(self, qkv: F32, first: int) -> tuple[F32, F32, F32]:
        """Split into rotated queries and keys and plain values: [rows, heads or kv_heads, head_dim] each."""
        c = self.config
        heads = qkv.reshape(-1, c.heads + 2 * c.kv_heads, c.head_dim)
        turned, v = heads[:, : c.heads + c.kv_heads], heads[:, c.heads + c.kv_heads :]
        cos, sin = (t[first : first + len(heads), None] for t in (self._cos, self._sin))
        even, odd = turned[..., 0::2], turned[..., 1::2]
        turned[...] = np.concatenate((even * cos - odd * sin, even * sin + odd * cos), axis=-1)
        return turned[:, : c.heads], turned[:, c.heads :], v

    def _attend(self, q: F32, paged: F32, first: int, stop: int) -> F32:
        """Causal attention of each tile over all keys up to its own end: [tiles, TILE, heads * head_dim]."""
        c = self.config
        rows, group = len(q), c.heads // c.kv_heads
        keys = np.zeros((2, first + rows, c.kv_heads, c.head_dim), np.float32)  # slots behind `stop` stay zero
        keys[:, :stop] = paged.swapaxes(0, 1).reshape(2, -1, c.kv_heads, c.head_dim)[:, :stop]
        k, v = keys.swapaxes(1, 2)  # [kv_heads, tokens, head_dim] each
        future = np.tile(np.triu(np.full((TILE, TILE), -np.inf, np.float32), 1), (group, 1))
        out = np.empty((rows // TILE, TILE, c.heads * c.head_dim), np.float32)
        for tile in range(rows // TILE):
            end = first + (tile + 1) * TILE
            query = q[tile * TILE : (tile + 1) * TILE].reshape(TILE, c.kv_heads, group, c.head_dim)
            query_rows = query.transpose(1, 2, 0, 3).reshape(c.kv_heads, group * TILE, c.head_dim)
            scores: F32 = query_rows @ k[:, :end].swapaxes(1, 2)
            scores *= np.float32(c.head_dim**-0.5)
            scores[..., end - TILE :] += future
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            mixed = (scores @ v[:, :end]) / scores.sum(axis=-1, keepdims=True)
            out[tile] = mixed.reshape(c.heads, TILE, c.head_dim).swapaxes(0, 1).reshape(TILE, -1)
        return out


def _norm(x: F32) -> F32:
    """RMSNorm with unit weight."""
    scale: F32 = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-6))
    return x * scale
