"""A transformer as the planner counts it: matrix weights, FLOPs and bytes per layer, exactly.

Fields are numpy arrays (or plain numbers) that broadcast together, so that one call counts one model or a thousand.
Covers dense blocks, grouped-query attention, gated and plain feed-forward, mixture of experts with shared experts and
leading dense layers, multi-head latent attention (MLA), and the logits. Knows no hardware and no layout.

Legend: tokens T of one sequence, width h, layers L, heads a of size d, kv_heads g, feed-forward f, vocabulary V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from lakh.spec.model import Model

__all__ = ["Array", "Shape", "shape_of"]

Array: TypeAlias = Any
"""A float, or a numpy array of floats: everything here broadcasts."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    layers: Array
    width: Array
    heads: Array
    kv_heads: Array
    head_dim: Array
    ffn: Array
    vocab: Array
    gated: Array = 1.0
    """1 for SwiGLU (three matrices), 0 for a plain feed-forward (two)."""
    tied: Array = 0.0
    experts: Array = 0.0
    """Routed experts of a mixture layer; 0 is a dense model."""
    top_k: Array = 0.0
    expert_ffn: Array = 0.0
    shared_experts: Array = 0.0
    dense_layers: Array = 0.0
    """Leading layers of a mixture model that keep the dense feed-forward."""
    routed_nodes: Array = 0.0
    """Most nodes that the router sends a token to; 0 is no limit."""
    expert_bias: Array = 0.0
    """1 where experts have biases and clamped gates, as in GPT-OSS."""
    qk_norm: Array = 0.0
    """1 where queries and keys are normed head by head."""
    window: Array = 0.0
    """Tokens that layers with a sliding window look back; 0 is none."""
    windowed: Array = 0.0
    """Share of the layers that have one."""
    q_rank: Array = 0.0
    """MLA: rank of the compressed queries; 0 means ordinary attention."""
    kv_rank: Array = 0.0
    rope_dim: Array = 0.0
    """MLA: extra size of each query and key head that carries the position."""

    # --- matrix weights of one block ---

    @property
    def is_mla(self) -> Array:
        return np.asarray(self.kv_rank) > 0

    @property
    def attention_weights(self) -> Array:
        a, d, h = self.heads, self.head_dim, self.width
        plain = 2 * h * a * d + 2 * h * self.kv_heads * d
        heads = a * (d + self.rope_dim)
        query = np.where(np.asarray(self.q_rank) > 0, (h + heads) * self.q_rank, h * heads)
        key_value = h * (self.kv_rank + self.rope_dim) + self.kv_rank * a * 2 * d
        return np.where(self.is_mla, query + key_value + a * d * h, plain)

    @property
    def ffn_matrices(self) -> Array:
        return 2 + np.asarray(self.gated)

    @property
    def dense_ffn_weights(self) -> Array:
        return self.ffn_matrices * self.width * self.ffn

    @property
    def expert_weights(self) -> Array:
        """Matrix weights of one routed expert."""
        return self.ffn_matrices * self.width * self.expert_ffn

    @property
    def moe_layers(self) -> Array:
        return np.where(np.asarray(self.experts) > 0, self.layers - np.asarray(self.dense_layers), 0)

    @property
    def parameters(self) -> Array:
        """All parameters: blocks, norms, embedding and head."""
        moe = self.moe_layers
        block = self.layers * (self.attention_weights + 2 * self.width + self.q_rank + self.kv_rank)
        dense = (self.layers - moe) * self.dense_ffn_weights
        sparse = moe * ((self.experts + self.shared_experts) * self.expert_weights + self.experts * self.width)
        return block + dense + sparse + self.width + self.table_weights

    @property
    def table_weights(self) -> Array:
        return (2 - np.asarray(self.tied)) * self.vocab * self.width

    @property
    def active_parameters(self) -> Array:
        """Parameters that one token passes through."""
        return self.parameters - self.moe_layers * (self.experts - self.top_k) * self.expert_weights

    # --- FLOPs ---

    @property
    def attention_dim(self) -> Array:
        """Width of query-key products plus width of the weighted values, over all heads, halved."""
        return self.heads * (self.head_dim + np.where(self.is_mla, self.rope_dim, 0) / 2)

    def attended(self, sequence: Array) -> Array:
        """Width of the score matrix, halved by the causal mask: of a whole sequence, or of a window, averaged."""
        narrow = np.minimum(2 * np.asarray(self.window), sequence)  # a causal mask halves the triangle, not the band
        return (1 - np.asarray(self.windowed)) * sequence + self.windowed * narrow

    def flops_per_token(self, sequence: Array, *, causal: bool = True, frozen: Array = 0.0) -> Array:
        """Training FLOPs of one token (forward and backward, no recomputation), logits included; frozen weights need no
        product for their gradient."""
        moe = self.moe_layers
        weights = self.layers * self.attention_weights + (self.layers - moe) * self.dense_ffn_weights
        weights = weights + moe * ((self.top_k + self.shared_experts) * self.expert_weights + self.experts * self.width)
        scores = 12 * self.layers * self.attention_dim * self.attended(sequence)
        return (6.0 - 2.0 * frozen) * (weights + self.vocab * self.width) + (scores / 2 if causal else scores)


def shape_of(model: Model) -> Shape:
    """The planner's view of a run's model."""
    experts, latent = model.experts, model.latent
    extra: dict[str, float] = {}
    if experts:
        extra |= {
            "experts": experts.count,
            "top_k": experts.top_k,
            "expert_ffn": experts.ffn,
            "shared_experts": experts.shared,
            "dense_layers": experts.dense_layers,
            "routed_nodes": experts.most_nodes,
        }
    if latent:
        extra |= {"q_rank": latent.q_rank, "kv_rank": latent.kv_rank, "rope_dim": latent.rope_dim}
    return Shape(
        layers=float(model.layers),
        width=float(model.width),
        heads=float(model.heads),
        kv_heads=float(model.kv_heads),
        head_dim=float(model.head_dim),
        ffn=float(model.ffn),
        vocab=float(model.vocab),
        gated=1.0,
        tied=float(model.tied),
        qk_norm=float(model.qk_norm),
        **{name: float(value) for name, value in extra.items()},
    )
