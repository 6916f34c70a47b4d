"""Mixtral: a Llama block whose feed-forward is a mixture of experts; Qwen3-MoE adds norms on queries and keys.

Token choice: a router sends each token to its `top_k` experts and weighs their outputs; no token is dropped. Shared
experts process every token, and some blocks may keep a dense feed-forward, as the leading ones of DeepSeek-V2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lakh.spec.model import Model
from lakh.workloads.code.architectures import LayerWeights, ModelArchitecture, ParameterInfo
from lakh.workloads.code.architectures.llama import attention, attention_parameters
from lakh.workloads.code.architectures.mixtures.sparse_layers import (
    NO_DENSE_LAYERS,
    STEP,
    dense_layers,
    dense_layers_config,
)
from lakh.workloads.code.ops import ModelOps, Rope
from lakh.workloads.code.routing import route

__all__ = ["MIXTRAL", "MIXTRAL_NAMES", "QWEN3_MOE", "expert_parameters", "mixture_or_dense"]

MIXTRAL_NAMES = ("block_sparse_moe", "w1", "w3", "w2")
"""Of the module, gate, up and down in a Hugging Face file."""
_QWEN_NAMES = ("mlp", "gate_proj", "up_proj", "down_proj")


def _parameters(spec: Model) -> dict[str, ParameterInfo]:
    return {
        "attention_norm": ParameterInfo((spec.width,), "input_layernorm.weight", "attn_norm.weight"),
        **attention_parameters(spec),
        "ffn_norm": ParameterInfo((spec.width,), "post_attention_layernorm.weight", "ffn_norm.weight"),
        **expert_parameters(spec, _QWEN_NAMES if spec.qk_norm else MIXTRAL_NAMES),
    }


def expert_parameters(
    spec: Model, names: tuple[str, str, str, str], shared: str = "shared_experts"
) -> dict[str, ParameterInfo]:
    """Of a mixture of experts; `names` are those of the module, gate, up and down in a Hugging Face file, `shared` that
    of the experts that process every token."""
    assert spec.experts is not None
    module, gate, up, down = names
    count, ffn, width, info = spec.experts.count, spec.experts.ffn, spec.width, ParameterInfo
    mixtures = tuple(filter(spec.experts.are_in, range(spec.layers)))
    others = tuple(layer for layer in range(spec.layers) if layer not in mixtures)
    experts = f"{module}.experts.{{}}"
    found = {
        "ffn.router": info((count, width), f"{module}.gate.weight", "ffn_gate_inp.weight"),
        "ffn.gate": info((count, ffn, width), f"{experts}.{gate}.weight", "ffn_gate_exps.weight", 1, "gate_up"),
        "ffn.up": info((count, ffn, width), f"{experts}.{up}.weight", "ffn_up_exps.weight", 1, "gate_up"),
        "ffn.down": info((count, width, ffn), f"{experts}.{down}.weight", "ffn_down_exps.weight", 2, "down", True),
    }
    if spec.has_router_bias:
        name = f"{module}.gate.e_score_correction_bias"
        found["ffn.router_bias"] = info((count,), name, "exp_probs_b.bias", initial=0.0)
    if spec.experts.shared:
        found |= _gated("shared", width, spec.experts.shared * ffn, f"{module}.{shared}", "_shexp")
    if spec.traits.has_shared_gate:
        gguf = "ffn_gate_inp_shexp.weight"
        found["ffn.shared_router"] = info((1, width), f"{module}.{shared}_gate.weight", gguf)
    found = {name: replace(its, layers=mixtures) for name, its in found.items()} if others else found
    for name, its in _gated("dense", width, spec.ffn, module, "").items() if others else ():
        found[name] = replace(its, layers=others)
    return found


def _gated(name: str, width: int, ffn: int, module: str, gguf: str) -> dict[str, ParameterInfo]:
    """Of a gated feed-forward beside the experts."""
    info, fused = ParameterInfo, f"{name}_gate_up"
    return {
        f"ffn.{name}_gate": info((ffn, width), f"{module}.gate_proj.weight", f"ffn_gate{gguf}.weight", 0, fused),
        f"ffn.{name}_up": info((ffn, width), f"{module}.up_proj.weight", f"ffn_up{gguf}.weight", 0, fused),
        f"ffn.{name}_down": info(
            (width, ffn), f"{module}.down_proj.weight", f"ffn_down{gguf}.weight", 1, f"{name}_down", True
        ),
    }


def mixture_or_dense(spec: Model, weights: LayerWeights, ops: ModelOps, h: Tensor) -> Tensor:
    """The feed-forward of a layer: experts, and shared experts beside them; in some layers a dense one."""
    assert spec.experts is not None
    h = ops.enter(h)
    if not spec.experts.are_in(weights.layer):
        return ops.leave(_feed_forward("dense", weights, ops, h))
    x_NW = h.flatten(0, -2)
    logits = ops.full_linear(x_NW, weights.vector("ffn.router"))
    bias, is_sigmoid = None, spec.traits.has_sigmoid_router or spec.traits.scales_expert_inputs
    if spec.has_router_bias:
        bias = weights.vector("ffn.router_bias")
    weight_NK, index_NK, share_E = route(spec.experts, ops, logits, bias, is_sigmoid=is_sigmoid)
    if share_E is not None:
        weights.observe_load(share_E)
    y = _routed(spec, weights, ops, x_NW, index_NK, weight_NK).view_as(h)
    if not spec.experts.shared:
        return ops.leave(y)
    shared = _feed_forward("shared", weights, ops, h)
    if spec.traits.has_shared_gate:
        shared = shared * ops.full_linear(h, weights.vector("ffn.shared_router")).sigmoid()
    return ops.leave(y + shared)


def _routed(
    spec: Model, weights: LayerWeights, ops: ModelOps, x_NW: Tensor, index_NK: Tensor, weight_NK: Tensor
) -> Tensor:
    gate_up, down = weights.matrix("gate_up", x_NW.dtype), weights.matrix("down", x_NW.dtype)
    if not spec.traits.scales_expert_inputs:
        return ops.experts(x_NW, gate_up, down, index_NK, weight_NK)
    # K is 1.
    return ops.experts(x_NW * weight_NK.to(x_NW.dtype), gate_up, down, index_NK, torch.ones_like(weight_NK))


def _feed_forward(name: str, weights: LayerWeights, ops: ModelOps, h: Tensor) -> Tensor:
    gate_up, down = (weights.matrix(f"{name}_{part}", h.dtype) for part in ("gate_up", "down"))
    return ops.feed_forward(h, gate_up, down)


def _block(
    spec: Model, weights: LayerWeights, ops: ModelOps, x: Tensor, delta: Tensor | None, rope: Rope, context: Any
) -> tuple[Tensor, Tensor]:
    x, h = ops.norm_add(x, delta, weights.vector("attention_norm"), spec.norm_eps)
    delta = attention(spec, weights, ops, h, rope, context)
    x, h = ops.norm_add(x, delta, weights.vector("ffn_norm"), spec.norm_eps)
    return x, mixture_or_dense(spec, weights, ops, h)


MIXTRAL = ModelArchitecture(
    name="mixtral",
    hf_model_type="mixtral",
    hf_class="MixtralForCausalLM",
    hf_config={"hidden_act": "silu", "router_jitter_noise": 0.0},
    hf_defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    hf_experts={"count": "num_local_experts", "top_k": "num_experts_per_tok", "ffn": "intermediate_size"},
    hf_windows="all",
    gguf="llama",
    block_parameters=_parameters,
    block=_block,
)
QWEN3_MOE = replace(
    MIXTRAL,
    name="qwen3_moe",
    hf_model_type="qwen3_moe",
    hf_class="Qwen3MoeForCausalLM",
    hf_config={"hidden_act": "silu", "attention_bias": False},
    hf_defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "norm_topk_prob": False,
        **NO_DENSE_LAYERS,
    },
    hf_experts={
        "count": "num_experts",
        "top_k": "num_experts_per_tok",
        "ffn": "moe_intermediate_size",
        "normalize": "norm_topk_prob",
        "interval": STEP,
        "dense_layers": "",
        "dense_blocks": "",
    },
    hf_derived=dense_layers,
    hf_more=dense_layers_config,
    hf_windows="all",
    gguf="qwen3moe",
)
