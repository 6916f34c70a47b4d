"""Llama, also with biases (Granite Code), and the families that differ from it by a setting: Mistral (sliding window),
Ministral 3 (queries that grow with the position), Qwen2 and Seed-OSS (bias on queries, keys and values), Qwen3 (RMS
norm on every query and key head), SmolLM3 (layers at regular intervals without rotary positions).

Pre-norm blocks: grouped-query attention with rotary positions, then a SwiGLU feed-forward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lakh.spec.model import Model
from lakh.workloads.code.architectures import LayerWeights, ModelArchitecture, ParameterInfo
from lakh.workloads.code.ops import ModelOps, Rope, halves

__all__ = [
    "LLAMA",
    "MINISTRAL3",
    "MISTRAL",
    "QWEN2",
    "QWEN3",
    "SEED_OSS",
    "SMOLLM3",
    "attention",
    "attention_parameters",
    "feed_forward",
    "gated_parameters",
    "llama_parameters",
]


def attention_parameters(spec: Model) -> dict[str, ParameterInfo]:
    """Of grouped-query attention, with the norms and biases of its family."""
    width, size = spec.width, spec.head_dim
    heads = {"q": spec.heads, "k": spec.kv_heads, "v": spec.kv_heads}
    info = ParameterInfo
    found = {
        f"attention.{name}": info((n * size, width), f"self_attn.{name}_proj.weight", f"attn_{name}.weight", 0, "qkv")
        for name, n in heads.items()
    }
    shape: tuple[int, ...] = (width, spec.heads * size)
    found["attention.o"] = info(shape, "self_attn.o_proj.weight", "attn_output.weight", 1, "o", True)
    if spec.traits.has_joint_head_norm:
        for name in ("q", "k"):
            shape, theirs = (heads[name] * size,), f"self_attn.{name}_norm.weight"
            found[f"attention.{name}_norm"] = info(shape, theirs, f"attn_{name}_norm.weight", 0, f"{name}_norm")
    elif spec.qk_norm and spec.traits.has_separate_head_norms:
        for name in ("q", "k"):
            shape, theirs = (heads[name] * size,), f"self_attn.{name}_layernorm.norms.{{}}.weight"
            norm = info(shape, theirs, f"attn_{name}_norm.weight", 0, f"{name}_norm", num_heads=heads[name])
            found[f"attention.{name}_norm"] = norm
    elif spec.has_head_norms:
        found["attention.q_norm"] = info((size,), "self_attn.q_norm.weight", "attn_q_norm.weight")
        found["attention.k_norm"] = info((size,), "self_attn.k_norm.weight", "attn_k_norm.weight")
    if spec.has_qkv_bias:
        for name, n in heads.items():
            theirs, gguf = f"self_attn.{name}_proj.bias", f"attn_{name}.bias"
            found[f"attention.{name}_bias"] = info((n * size,), theirs, gguf, 0, "qkv_bias", initial=0.0)
    if spec.traits.has_sinks:
        found["attention.sinks"] = info((spec.heads,), "self_attn.sinks", "attn_sinks.weight", 0, "sinks", initial=0.0)
    if spec.has_output_bias:
        found["attention.o_bias"] = info((width,), "self_attn.o_proj.bias", "attn_output.bias", initial=0.0)
    return found


def gated_parameters(spec: Model) -> dict[str, ParameterInfo]:
    """Of a gated feed-forward."""
    width, ffn, info = spec.width, spec.ffn, ParameterInfo
    found = {
        "ffn.gate": info((ffn, width), "mlp.gate_proj.weight", "ffn_gate.weight", 0, "gate_up"),
        "ffn.up": info((ffn, width), "mlp.up_proj.weight", "ffn_up.weight", 0, "gate_up"),
        "ffn.down": info((width, ffn), "mlp.down_proj.weight", "ffn_down.weight", 1, "down", True),
    }
    if spec.mlp_bias:
        found |= {
            "ffn.gate_bias": info((ffn,), "mlp.gate_proj.bias", "ffn_gate.bias", 0, "gate_up_bias", initial=0.0),
            "ffn.up_bias": info((ffn,), "mlp.up_proj.bias", "ffn_up.bias", 0, "gate_up_bias", initial=0.0),
            "ffn.down_bias": info((width,), "mlp.down_proj.bias", "ffn_down.bias", initial=0.0),
        }
    return found


def llama_parameters(spec: Model) -> dict[str, ParameterInfo]:
    norm = (spec.width,)
    return {
        "attention_norm": ParameterInfo(norm, "input_layernorm.weight", "attn_norm.weight"),
        **attention_parameters(spec),
        "ffn_norm": ParameterInfo(norm, "post_attention_layernorm.weight", "ffn_norm.weight"),
        **gated_parameters(spec),
    }


def attention(
    spec: Model,
    weights: LayerWeights,
    ops: ModelOps,
    h: Tensor,
    rope: Rope,
    context: Any,
    head_norms: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Grouped-query self-attention of normalized hidden states, with the norms, biases and window of the layer.

    `head_norms`: what the norms of queries and keys multiply with, if not with their weights.
    """
    qkv = ops.linear(ops.enter(h), weights.matrix("qkv", h.dtype))
    return _project(spec, weights, ops, _attend(spec, weights, ops, qkv, rope, context, head_norms))


def _attend(
    spec: Model,
    weights: LayerWeights,
    ops: ModelOps,
    qkv: Tensor,
    rope: Rope,
    context: Any,
    norms: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """From the product of queries, keys and values to the operand of the output product."""
    if spec.has_qkv_bias:
        qkv = qkv + weights.matrix("qkv_bias", qkv.dtype)
    if ops.fused_attention is not None and weights.variant is None:
        y: Tensor = ops.fused_attention(qkv, context)
    else:
        heads, kv_heads = spec.heads // ops.tensor_parallel, spec.kv_heads // ops.tensor_parallel
        if spec.traits.has_joint_head_norm:
            qkv = _norm_heads_jointly(spec, weights, ops, qkv)
        elif spec.qk_norm and spec.traits.has_separate_head_norms:
            qkv = _norm_heads_separately(spec, weights, qkv, heads, kv_heads)
        elif spec.has_head_norms and norms is None:
            norms = weights.vector("attention.q_norm"), weights.vector("attention.k_norm")
        if spec.traits.rotates_neighbours:
            qkv = _in_halves(spec, qkv, heads, kv_heads)
        q, k, v = ops.split_rotary(qkv, rope, heads, kv_heads, norms, spec.norm_eps)
        if weights.variant is None:
            y = ops.attention(q, k, v, context).flatten(-2)
        else:
            sinks = weights.matrix("sinks", qkv.dtype) if spec.traits.has_sinks else None
            y = ops.variant_attention(q, k, v, context, weights.variant, sinks).flatten(-2)
    return y


def _in_halves(spec: Model, qkv: Tensor, heads: int, kv_heads: int) -> Tensor:
    """The rotated parts of queries and keys in the order that `ModelOps.split_rotary` rotates. Scores stay the same."""
    q_k, v = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).split((heads + kv_heads, kv_heads), dim=-2)
    rotated, rest = q_k.split((spec.rotated_dim, spec.head_dim - spec.rotated_dim), dim=-1)
    q_k = torch.cat((halves(rotated), rest), dim=-1) if rest.shape[-1] else halves(rotated)
    return torch.cat((q_k, v), dim=-2).flatten(-2)


def _norm_heads_jointly(spec: Model, weights: LayerWeights, ops: ModelOps, qkv: Tensor) -> Tensor:
    """One norm over all queries of a token, and one over all its keys, whose heads tensor-parallel ranks share."""
    sizes = [heads * spec.head_dim // ops.tensor_parallel for heads in (spec.heads, spec.kv_heads, spec.kv_heads)]
    q, k, v = qkv.split(sizes, dim=-1)
    normed = [
        ops.joint_norm(x, weights.matrix(name, torch.float32), spec.norm_eps)
        for name, x in (("q_norm", q), ("k_norm", k))
    ]
    return torch.cat((*normed, v), dim=-1)


def _norm_heads_separately(spec: Model, weights: LayerWeights, qkv: Tensor, heads: int, kv_heads: int) -> Tensor:
    """A LayerNorm of every query and key head, with a weight of its own."""
    q, k, v = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).split([heads, kv_heads, kv_heads], dim=-2)
    ones, zeros = (make(spec.head_dim, dtype=qkv.dtype, device=qkv.device) for make in (torch.ones, torch.zeros))
    normed = [
        F.layer_norm(x, (spec.head_dim,), ones, zeros, spec.norm_eps)
        * weights.matrix(name, x.dtype).unflatten(0, x.shape[-2:])
        for name, x in (("q_norm", q), ("k_norm", k))
    ]
    return torch.cat((*normed, v), dim=-2).flatten(-2)


def _project(spec: Model, weights: LayerWeights, ops: ModelOps, y: Tensor) -> Tensor:
    """The output product of attention."""
    y = ops.leave(ops.linear(y, weights.matrix("o", y.dtype)))
    return y + weights.vector("attention.o_bias").to(y.dtype) if spec.has_output_bias else y


def feed_forward(weights: LayerWeights, ops: ModelOps, h: Tensor) -> Tensor:
    """SwiGLU."""
    return ops.leave(
        ops.feed_forward(ops.enter(h), weights.matrix("gate_up", h.dtype), weights.matrix("down", h.dtype))
    )


def _biased_feed_forward(weights: LayerWeights, ops: ModelOps, h: Tensor) -> Tensor:
    """SwiGLU of matrices with biases. Operations that fuse several products have none."""
    gate_up = ops.linear(ops.enter(h), weights.matrix("gate_up", h.dtype)) + weights.matrix("gate_up_bias", h.dtype)
    y = ops.leave(ops.linear(ops.activation(gate_up), weights.matrix("down", h.dtype)))
    return y + weights.vector("ffn.down_bias").to(y.dtype)


def _block(
    spec: Model, weights: LayerWeights, ops: ModelOps, x: Tensor, delta: Tensor | None, rope: Rope, context: Any
) -> tuple[Tensor, Tensor]:
    dtype, eps = x.dtype, spec.norm_eps
    x, qkv = ops.norm_linear(x, delta, weights.vector("attention_norm"), eps, weights.matrix("qkv", dtype))
    y = _attend(spec, weights, ops, qkv, rope, context)
    norm = weights.vector("ffn_norm")
    if ops.fused_linear_norm_feed_forward is not None and not (spec.has_output_bias or spec.mlp_bias):
        o, gate_up, down = (weights.matrix(name, dtype) for name in ("o", "gate_up", "down"))
        return ops.fused_linear_norm_feed_forward(y, o, x, norm, eps, gate_up, down)
    x, h = ops.norm_add(x, _project(spec, weights, ops, y), norm, eps)
    return x, _biased_feed_forward(weights, ops, h) if spec.mlp_bias else feed_forward(weights, ops, h)


LLAMA = ModelArchitecture(
    name="llama",
    hf_model_type="llama",
    hf_class="LlamaForCausalLM",
    hf_config={"hidden_act": "silu", "pretraining_tp": 1},
    hf_defaults={"attention_bias": False, "mlp_bias": False},
    hf_choices={name: (name, {True: True, False: False}) for name in ("attention_bias", "mlp_bias")},
    gguf="llama",
    block_parameters=llama_parameters,
    block=_block,
    fuses_norms=True,
)
MISTRAL = replace(
    LLAMA,
    name="mistral",
    hf_model_type="mistral",
    hf_class="MistralForCausalLM",
    hf_config={"hidden_act": "silu"},
    hf_defaults={"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    hf_windows="all",
)
MINISTRAL3 = replace(
    MISTRAL,
    name="ministral3",
    hf_model_type="ministral3",
    hf_class="Ministral3ForCausalLM",
    hf_defaults={
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    gguf="mistral3",
    gguf_names={"query_growth": "attention.temperature_scale"},
)
QWEN2 = replace(
    LLAMA,
    name="qwen2",
    hf_model_type="qwen2",
    hf_class="Qwen2ForCausalLM",
    hf_config={"hidden_act": "silu"},
    hf_defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    hf_windows="late",
    gguf="qwen2",
)
QWEN3 = replace(
    QWEN2,
    name="qwen3",
    hf_model_type="qwen3",
    hf_class="Qwen3ForCausalLM",
    hf_config={"hidden_act": "silu", "attention_bias": False},
    hf_defaults={**QWEN2.hf_defaults, "head_dim": 128},
    gguf="qwen3",
)


def _seed_parameters(spec: Model) -> dict[str, ParameterInfo]:
    found = llama_parameters(spec)
    return {**found, "ffn_norm": replace(found["ffn_norm"], gguf="post_attention_norm.weight")}


SEED_OSS = replace(
    QWEN2,
    name="seed_oss",
    hf_model_type="seed_oss",
    hf_class="SeedOssForCausalLM",
    hf_config={
        "hidden_act": "silu",
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
        "pretraining_tp": 1,
    },
    hf_defaults={"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524_288},
    hf_more=lambda spec: {"residual_dropout": 0.0},
    hf_windows=None,
    gguf="seed_oss",
    block_parameters=_seed_parameters,
)
SMOLLM3 = replace(
    LLAMA,
    name="smollm3",
    hf_model_type="smollm3",
    hf_class="SmolLM3ForCausalLM",
    hf_config={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False},
    hf_defaults={
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rope_theta": 2e6,
        "no_rope_layer_interval": 4,
    },
    gguf="smollm3",
)
