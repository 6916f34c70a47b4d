"""Llama, and Qwen3, which adds an RMS norm on every query and key head (spec.Model.qk_norm).

Pre-norm blocks: grouped-query attention with rotary positions, then a SwiGLU feed-forward; no biases.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from lakh.spec.model import Model
from lakh.workloads.code.architectures import LayerWeights, ModelArchitecture, ParameterInfo
from lakh.workloads.code.ops import ModelOps, Rope

__all__ = ["LLAMA", "QWEN3", "attention", "feed_forward", "llama_parameters"]


def llama_parameters(spec: Model) -> dict[str, ParameterInfo]:
    width, ffn, queries, keys = spec.width, spec.ffn, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    info = ParameterInfo
    found = {
        "attention_norm": info((width,), "input_layernorm.weight", "attn_norm.weight"),
        "attention.q": info((queries, width), "self_attn.q_proj.weight", "attn_q.weight", 0, "qkv"),
        "attention.k": info((keys, width), "self_attn.k_proj.weight", "attn_k.weight", 0, "qkv"),
        "attention.v": info((keys, width), "self_attn.v_proj.weight", "attn_v.weight", 0, "qkv"),
        "attention.o": info((width, queries), "self_attn.o_proj.weight", "attn_output.weight", 1, "o", True),
    }
    if spec.qk_norm:
        found["attention.q_norm"] = info((spec.head_dim,), "self_attn.q_norm.weight", "")
        found["attention.k_norm"] = info((spec.head_dim,), "self_attn.k_norm.weight", "")
    return found | {
        "ffn_norm": info((width,), "post_attention_layernorm.weight", "ffn_norm.weight"),
        "ffn.gate": info((ffn, width), "mlp.gate_proj.weight", "ffn_gate.weight", 0, "gate_up"),
        "ffn.up": info((ffn, width), "mlp.up_proj.weight", "ffn_up.weight", 0, "gate_up"),
        "ffn.down": info((width, ffn), "mlp.down_proj.weight", "ffn_down.weight", 1, "down", True),
    }


def attention(
    spec: Model, weights: LayerWeights, ops: ModelOps, h: Tensor, rope: Rope, context: Any, bias: Tensor | None = None
) -> Tensor:
    """Grouped-query self-attention of normalized hidden states; `bias` is added to queries, keys and values."""
    qkv = ops.linear(ops.enter(h), weights.matrix("qkv", h.dtype))
    qkv = qkv if bias is None else qkv + bias
    if ops.fused_attention is not None:
        y = ops.fused_attention(qkv, context)
    else:
        heads, kv_heads = spec.heads // ops.tensor_parallel, spec.kv_heads // ops.tensor_parallel
        norms = (weights.vector("attention.q_norm"), weights.vector("attention.k_norm")) if spec.qk_norm else None
        q, k, v = ops.split_rotary(qkv, rope, heads, kv_heads, norms, spec.norm_eps)
        y = ops.attention(q, k, v, context).flatten(-2)
    return ops.leave(ops.linear(y, weights.matrix("o", h.dtype)))


def feed_forward(weights: LayerWeights, ops: ModelOps, h: Tensor) -> Tensor:
    inner = ops.activation(ops.linear(ops.enter(h), weights.matrix("gate_up", h.dtype)))
    return ops.leave(ops.linear(inner, weights.matrix("down", h.dtype)))


def _block(
    spec: Model, weights: LayerWeights, ops: ModelOps, x: Tensor, delta: Tensor | None, rope: Rope, context: Any
) -> tuple[Tensor, Tensor]:
    x, h = ops.norm_add(x, delta, weights.vector("attention_norm"), spec.norm_eps)
    delta = attention(spec, weights, ops, h, rope, context)
    x, h = ops.norm_add(x, delta, weights.vector("ffn_norm"), spec.norm_eps)
    return x, feed_forward(weights, ops, h)


LLAMA = ModelArchitecture(
    name="llama",
    features={"qk_norm": False},
    hf_model_type="llama",
    hf_class="LlamaForCausalLM",
    hf_config={"mlp_bias": False, "pretraining_tp": 1},
    gguf="llama",
    block_parameters=llama_parameters,
    block=_block,
)
QWEN3 = replace(
    LLAMA,
    name="qwen3",
    features={"qk_norm": True},
    hf_model_type="qwen3",
    hf_class="Qwen3ForCausalLM",
    hf_config={"use_sliding_window": False, "sliding_window": None},
    gguf=None,
)
