"""`ModelOps`: the operations of a decoder, each of which a faster or a parallel form can replace.

A model takes one frozen `ModelOps`. The defaults here are plain torch and define what every other form must compute:
acceleration.py replaces them by fused kernels, parallelism/ by operations over several ranks, the server by operations
on its paged KV cache.

Shapes: `...` any leading dims (B batch and T tokens in training, N tokens in serving), W width, F ffn, H query heads, K
key/value heads, D head size, X = (H + 2 K) D.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lakh.spec.model import Model, RopeScaling
from lakh.workloads.code.attention import AttentionVariant, sdpa_attention, variant_attention
from lakh.workloads.code.kernels.experts import can_group, grouped_experts

__all__ = [
    "ModelOps",
    "Rope",
    "apply_rotary",
    "clamped_swiglu",
    "halves",
    "joint_norm",
    "joint_norm_over",
    "limit_groups",
    "local",
    "looped_experts",
    "norm_add",
    "rms_norm",
    "rotary_tables",
    "run_experts",
    "softcap",
    "split_rotary",
    "swiglu",
]

SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702
"""Of GPT-OSS (its released configuration and transformers)."""

Rope = tuple[Tensor, ...]
"""Cosines and sines, `... 1 D` in float32, of the elements that rotate; the second half of D repeats the first. Where
queries have tables of their own (`Model.has_query_tables`), those follow."""


def local(weight: Tensor) -> Tensor:
    """This rank's part of a weight: all of it, unless tensor parallelism sharded it."""
    from torch.distributed.tensor import DTensor  # a second of imports that a server does not need

    return weight.to_local() if isinstance(weight, DTensor) else weight


def identity(x: Tensor) -> Tensor:
    return x


def full_linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)


def joint_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """One norm over all heads of a token, in float32."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).type_as(x)


def joint_norm_over(
    ranks: int, sum_over_ranks: Callable[[Tensor], Tensor]
) -> Callable[[Tensor, Tensor, float], Tensor]:
    """`joint_norm` of x and weights whose parts are on several ranks."""

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        squares = sum_over_ranks(x.float().square().sum(dim=-1, keepdim=True))
        return (x.float() * torch.rsqrt(squares / (x.shape[-1] * ranks) + eps) * weight.float()).type_as(x)

    return norm


def norm_add(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, and its norm."""
    x = x if delta is None else x + delta
    return x, rms_norm(x, weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def softcap(x: Tensor, cap: float | None) -> Tensor:
    """Bounds x to (-cap, cap) smoothly; None leaves it as it is."""
    return x if cap is None else cap * torch.tanh(x / cap)


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """Of GPT-OSS: gate and up alternate, and are bounded; the gate has a steeper sigmoid, and up is shifted by 1."""
    gate, up = gate_up.unflatten(-1, (-1, 2)).unbind(-1)
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1) * gate * torch.sigmoid(SWIGLU_ALPHA * gate)


def limit_groups(scores_NE: Tensor, groups: int, kept: int) -> Tensor:
    """-inf for all experts but those of the `kept` groups whose two best scores have the largest sums."""
    grouped = scores_NE.unflatten(-1, (groups, -1))
    best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(kept, dim=-1).indices
    is_left_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
    return grouped.masked_fill(is_left_out[..., None], -torch.inf).flatten(-2)


def run_experts(
    x_NW: Tensor,
    gate_up: Tensor,
    down: Tensor,
    index_NK: Tensor,
    weight_NK: Tensor,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """The weighted sum over each token's K experts: gate_up `E 2F W`, down `E W F`. No token is dropped.

    `bias` (`E 2F`) is that of gate_up; experts with one have the clamped SwiGLU of GPT-OSS.

    Tokens are sorted by expert. In bf16 on a GPU all experts are one grouped product (kernels/experts.py); elsewhere a
    loop reads only the experts that have tokens.
    """
    if bias is None and can_group(x_NW, down):
        return grouped_experts(x_NW, gate_up, down, index_NK, weight_NK)
    top_k = index_NK.shape[1]
    order = index_NK.flatten().argsort(stable=True)
    rows = order // top_k
    counts = torch.bincount(index_NK.flatten(), minlength=len(gate_up))
    y = looped_experts(x_NW[rows], gate_up, down, counts, bias)
    y = y * weight_NK.flatten()[order, None].to(y.dtype)
    return torch.zeros_like(x_NW).index_add(0, rows, y)


def looped_experts(x: Tensor, gate_up: Tensor, down: Tensor, counts_E: Tensor, bias: Tensor | None = None) -> Tensor:
    """SwiGLU of tokens sorted by expert; experts without tokens are not read."""
    if bias is not None and x.is_cuda and x.dtype == torch.bfloat16:
        ends, row_bias = counts_E.cumsum(0).to(torch.int32), bias.repeat_interleave(counts_E, 0, output_size=len(x))
        inner = clamped_swiglu(torch._grouped_mm(x, gate_up.mT, offs=ends) + row_bias)
        return torch._grouped_mm(inner, down.mT, offs=ends)

    def inner_of(part: Tensor, expert: int) -> Tensor:
        if bias is None:
            return swiglu(F.linear(part, gate_up[expert]))
        return clamped_swiglu(F.linear(part, gate_up[expert], bias[expert]))

    parts = [
        F.linear(inner_of(part, expert), down[expert])
        for expert, part in enumerate(x.split(counts_E.tolist()))
        if len(part)
    ]
    return torch.cat(parts) if parts else x


def rotary_tables(spec: Model, positions_BT: Tensor) -> tuple[Rope, ...]:
    """Cosines and sines B T 1 D of these positions, for each kind of layer (`Model.rope_kind`)."""
    scalings = [spec.rope_scaling, None]  # the first kind of layer has the one of the model
    tables = tuple(
        _rotary_table(spec, base, scaling, positions_BT)
        for base, scaling in zip(spec.rope_bases, scalings[: len(spec.rope_bases)], strict=True)
    )
    if not spec.has_query_tables:
        return tables
    growth_BT11 = _query_growth(spec, positions_BT)[..., None, None]
    return tuple(
        (cos, sin, cos * growth_BT11, sin * growth_BT11) if not (base and spec.traits.grows_unrotated) else (cos, sin)
        for base, (cos, sin) in zip(spec.rope_bases, tables, strict=True)
    )


def _query_growth(spec: Model, positions_BT: Tensor) -> Tensor:
    """The factor of queries at these positions."""
    assert spec.query_growth is not None
    assert spec.growth_tokens is not None  # Model requires it
    return 1 + spec.query_growth * torch.log1p((positions_BT + spec.traits.grows_unrotated) // spec.growth_tokens)


def _rotary_table(spec: Model, base: float, scaling: RopeScaling | None, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    size = spec.rotated_dim
    if not base:  # nothing rotates
        whole = (*positions_BT.shape, 1, size)
        return positions_BT.new_ones(whole, dtype=torch.float32), positions_BT.new_zeros(whole, dtype=torch.float32)
    exponents = torch.arange(0, size, 2, device=positions_BT.device, dtype=torch.float32) / size
    powers = base**exponents
    if scaling is not None and scaling.kind == "longrope":
        powers = torch.tensor(scaling.short_factors, device=powers.device) * powers
    frequencies = 1.0 / powers  # rounded as transformers rounds: late positions multiply the error
    factor = 1.0
    if scaling is not None:
        frequencies, factor = _scaled_frequencies(spec, scaling, frequencies)
    angles = positions_BT[:, :, None, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    if factor == 1.0:
        return angles.cos(), angles.sin()
    return angles.cos() * factor, angles.sin() * factor


def _scaled_frequencies(spec: Model, scaling: RopeScaling, frequencies: Tensor) -> tuple[Tensor, float]:
    """The frequencies for a longer context, and the factor of cosines and sines."""
    slow, size = frequencies / scaling.factor, spec.rotated_dim
    if scaling.kind == "linear":
        return slow, 1.0
    assert scaling.original_context is not None  # RopeScaling requires it
    if scaling.kind == "longrope":  # they are divided already
        usual = math.sqrt(1 + math.log(max(scaling.factor, 1.0)) / math.log(scaling.original_context))
        return frequencies, scaling.attention_factor or usual
    if scaling.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        low, high = scaling.low_frequency, scaling.high_frequency
        smooth = (scaling.original_context / wavelengths - low) / (high - low)
        between = (1 - smooth) * slow + smooth * frequencies
        is_low = wavelengths > scaling.original_context / low
        is_high = wavelengths < scaling.original_context / high
        return torch.where(is_low, slow, torch.where(is_high, frequencies, between)), 1.0

    def dim_of(rotations: float) -> float:
        """The dim that rotates so often over the original context."""
        assert scaling.original_context is not None
        turns = math.log(scaling.original_context / (rotations * 2 * math.pi))
        return size * turns / (2 * math.log(spec.rope_base))

    first, last = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    ramp = (torch.arange(len(frequencies), device=frequencies.device) - first) / (max(last - first, 0.001))
    stays = 1 - ramp.clamp(0, 1)
    factor = scaling.attention_factor
    if factor is None:
        factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return slow * (1 - stays) + frequencies * stays, factor


def apply_rotary(x: Tensor, rope: Rope) -> Tensor:
    """Rotate heads `... H D`: element i pairs with i + D/2 (the order of Hugging Face; llama.cpp interleaves). Elements
    beyond the size of the tables stay as they are."""
    cos, sin = rope[:2]
    if x.shape[-1] > cos.shape[-1]:
        rotated, rest = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), dim=-1)
        return torch.cat((apply_rotary(rotated, rope), rest), dim=-1)
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-right, left), dim=-1) * sin).type_as(x)


def halves(x: Tensor) -> Tensor:
    """Neighbours, which rotate together in some families, as element i and i + D/2, which rotate here."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def split_rotary(
    qkv: Tensor, rope: Rope, heads: int, kv_heads: int, norms: tuple[Tensor, Tensor] | None = None, eps: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys (`... H D` and `... K D`, normalized per head with `norms`, then rotated) and values `... K D`."""
    q, k, v = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).split([heads, kv_heads, kv_heads], dim=-2)
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    return apply_rotary(q, rope[-2:]), apply_rotary(k, rope[:2]), v


@dataclass(frozen=True)
class ModelOps:
    embedding: Callable[[Tensor, Tensor], Tensor] = F.embedding
    """(tokens, table) to hidden states."""
    norm_add: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]] = norm_add
    """(x, delta, weight, eps) to x + delta and its RMS norm. The residual add is left to the next norm, so that one
    kernel can do both."""
    linear: Callable[[Tensor, Tensor], Tensor] = F.linear
    """(x, weight) to x @ weight.T."""
    full_linear: Callable[[Tensor, Tensor], Tensor] = full_linear
    """(x, weight) of a router and of compressed queries and keys, which are not quantized."""
    bf16_layers: frozenset[int] = frozenset()
    """Layers that multiply by plain products, where the others have `linear` and fused operations in fp8."""
    split_rotary: Callable[..., tuple[Tensor, Tensor, Tensor]] = split_rotary
    attention: Callable[[Tensor, Tensor, Tensor, Any], Tensor] = sdpa_attention
    """(q, k, v, context) to `... H D`. `context` is what the caller of the block passes: packed documents in training,
    the layer number in serving."""
    variant_attention: Callable[[Tensor, Tensor, Tensor, Any, AttentionVariant, Tensor | None], Tensor] = (
        variant_attention
    )
    """(q, k, v, context, variant, sinks) to `... H D`, for layers whose attention is not plain causal attention."""
    fused_attention: Callable[[Tensor, Any], Tensor] | None = None
    """(qkv `... X`, context) to `... H*D`, in place of `split_rotary` and plain `attention`, where one kernel does
    both."""
    activation: Callable[[Tensor], Tensor] = swiglu
    """Gate and up side by side, `... 2F`, to `... F`."""
    fused_feed_forward: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """(x, gate_up, down) to the result, in place of `linear`, `activation` and `linear`, where one operation does all
    three."""
    fused_norm_linear: Callable[[Tensor, Tensor, Tensor, float, Tensor], tuple[Tensor, Tensor]] | None = None
    """(x, delta, norm weight, eps, weight) to x + delta and the product of its norm, in place of `norm_add` and
    `linear`."""
    fused_linear_norm_feed_forward: Callable[..., tuple[Tensor, Tensor]] | None = None
    """(y, weight, x, norm weight, eps, gate_up, down) to x + y @ weight.T and the feed-forward of its norm: the second
    half of a block."""
    experts: Callable[..., Tensor] = run_experts
    """(x `N W`, gate_up, down, expert numbers `N K`, their weights `N K`) to `N W`; with `bias` for GPT-OSS."""
    limit_groups: Callable[[Tensor, int, int], Tensor] = limit_groups
    """(scores of experts, groups, groups that a token chooses) to the scores, -inf in the other groups."""

    balance_scale: float = 1.0
    """Part of a micro-batch on this rank in the auxiliary loss of a step that balances experts."""
    mean_load: Callable[[Tensor], Tensor] = identity
    """The experts' shares of all choices, averaged over the ranks that hold parts of one micro-batch."""

    compresses_keys: bool = False
    """Latent attention attends to the latents themselves, as a KV cache stores them, and not to expanded keys."""

    # Parallel regions.
    enter: Callable[[Tensor], Tensor] = identity
    """Before a column-parallel matrix: gathers the sequence."""
    leave: Callable[[Tensor], Tensor] = identity
    """After a row-parallel matrix: sums the partial results and scatters the sequence."""
    joint_norm: Callable[[Tensor, Tensor, float], Tensor] = joint_norm
    """(x, weight, eps) to the norm of x over all heads of a token, which tensor-parallel ranks share."""
    norm_weight: Callable[[Tensor], Tensor] = local
    """The replicated weight of a norm; tensor parallelism sums its gradient over ranks."""
    shard_sequence: Callable[[Tensor], Tensor] = identity
    """Tokens B T of whole sequences to this rank's part."""
    vocab_group: dist.ProcessGroup | None = None
    """The ranks that share the vocabulary of the output head."""
    tensor_parallel: int = 1
    context_parallel: int = 1

    checkpoint: Callable[..., Any] | None = None
    """Runs a block with activation checkpointing: (block function, x, *arguments)."""

    def of_layer(self, layer: int) -> ModelOps:
        """The operations of one block."""
        return self.with_products(F.linear) if layer in self.bf16_layers else self

    def with_products(self, linear: Callable[[Tensor, Tensor], Tensor], fused_feed_forward: Any = None) -> ModelOps:
        """The same operations with other products, and without those that fuse the earlier ones."""
        fused = {"fused_norm_linear": None, "fused_linear_norm_feed_forward": None}
        return replace(self, linear=linear, fused_feed_forward=fused_feed_forward, **fused)  # type: ignore[arg-type]

    def norm_linear(
        self, x: Tensor, delta: Tensor | None, norm: Tensor, eps: float, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x + delta, and the column-parallel product of its norm."""
        if self.fused_norm_linear is not None and delta is not None:
            return self.fused_norm_linear(x, delta, norm, eps, weight)
        x, h = self.norm_add(x, delta, norm, eps)
        return x, self.linear(self.enter(h), weight)

    def feed_forward(self, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """A gated feed-forward."""
        if self.fused_feed_forward is not None:
            return self.fused_feed_forward(x, gate_up, down)
        return self.linear(self.activation(self.linear(x, gate_up)), down)
