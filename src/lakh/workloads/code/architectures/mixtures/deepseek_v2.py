"""DeepSeek-V2: latent attention, shared experts, leading dense layers (arXiv 2405.04434); DeepSeek-V3 differs by its
router, which has sigmoid scores, a bias and groups of experts (arXiv 2412.19437).

A token's keys and values are one latent vector of `kv_rank` numbers, from which every head has its own matrix to its
keys and values, and one rotated key of `rope_dim` numbers for all heads. Training expands the latents to keys and
values. Serving caches latents and rotated keys only, and multiplies the queries and the output by these matrices
instead (`ModelOps.compresses_keys`): attention with one key head of kv_rank + rope_dim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lakh.spec.model import Model
from lakh.workloads.code.architectures import LayerWeights, ModelArchitecture, ParameterInfo
from lakh.workloads.code.architectures.mixtures.mixtral import expert_parameters, mixture_or_dense
from lakh.workloads.code.ops import ModelOps, Rope, apply_rotary, halves, rms_norm

__all__ = ["DEEPSEEK_V2", "DEEPSEEK_V3", "SIGMOID_ROUTER"]

LATENT_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps is


def _parameters(spec: Model) -> dict[str, ParameterInfo]:
    return {
        "attention_norm": ParameterInfo((spec.width,), "input_layernorm.weight", "attn_norm.weight"),
        **_attention_parameters(spec),
        "ffn_norm": ParameterInfo((spec.width,), "post_attention_layernorm.weight", "ffn_norm.weight"),
        **expert_parameters(spec, ("mlp", "gate_proj", "up_proj", "down_proj")),
    }


def _attention_parameters(spec: Model) -> dict[str, ParameterInfo]:
    width, size, info = spec.width, spec.head_dim, ParameterInfo
    queries, kv_rank = spec.heads * (size + spec.rope_dim), spec.kv_rank
    if spec.q_rank:
        found = {
            "attention.q_a": info((spec.q_rank, width), "self_attn.q_a_proj.weight", "attn_q_a.weight"),
            "attention.q_a_norm": info((spec.q_rank,), "self_attn.q_a_layernorm.weight", "attn_q_a_norm.weight"),
            "attention.q_b": info((queries, spec.q_rank), "self_attn.q_b_proj.weight", "attn_q_b.weight", 0, "q"),
        }
    else:
        found = {"attention.q": info((queries, width), "self_attn.q_proj.weight", "attn_q.weight", 0, "q")}
    kv_b = (spec.heads * 2 * size, kv_rank)
    return {
        **found,
        "attention.kv_a": info(
            (kv_rank + spec.rope_dim, width), "self_attn.kv_a_proj_with_mqa.weight", "attn_kv_a_mqa.weight"
        ),
        "attention.kv_a_norm": info((kv_rank,), "self_attn.kv_a_layernorm.weight", "attn_kv_a_norm.weight"),
        "attention.kv_b": info(kv_b, "self_attn.kv_b_proj.weight", "attn_{}_b.weight", 0, "kv_b", gguf_layout="latent"),
        "attention.o": info((width, spec.heads * size), "self_attn.o_proj.weight", "attn_output.weight", 1, "o", True),
    }


def _attention(spec: Model, weights: LayerWeights, ops: ModelOps, h: Tensor, rope: Rope, context: Any) -> Tensor:
    assert weights.variant is not None  # latent attention has a scale of its own
    dtype, size, heads = h.dtype, spec.head_dim, spec.heads // ops.tensor_parallel
    h = ops.enter(h)
    low = h
    if spec.q_rank:
        low = ops.full_linear(h, weights.vector("attention.q_a"))
        low = rms_norm(low, weights.vector("attention.q_a_norm"), LATENT_EPS)
    q = ops.linear(low, weights.matrix("q", dtype)).unflatten(-1, (heads, -1))
    q, q_rotary = q.split((size, spec.rope_dim), dim=-1)
    latent, k_rotary = ops.full_linear(h, weights.vector("attention.kv_a")).split((spec.kv_rank, spec.rope_dim), -1)
    latent = rms_norm(latent, weights.vector("attention.kv_a_norm"), LATENT_EPS)
    q_rotary, k_rotary = (apply_rotary(halves(x), rope) for x in (q_rotary, k_rotary[..., None, :]))
    kv_b = weights.matrix("kv_b", dtype)
    if ops.compresses_keys:
        to_keys, to_values = kv_b.view(heads, 2 * size, -1).split(size, dim=1)
        q = torch.cat((torch.einsum("...hd,hdr->...hr", q, to_keys), q_rotary), dim=-1)
        k = torch.cat((latent[..., None, :], k_rotary), dim=-1)
        y = ops.variant_attention(q, k, k, context, weights.variant, None)[..., : spec.kv_rank]
        y = torch.einsum("...hr,hdr->...hd", y, to_values)
    else:
        k, v = ops.linear(latent, kv_b).unflatten(-1, (heads, -1)).split(size, dim=-1)
        k = torch.cat((k, k_rotary.expand(*k.shape[:-1], -1)), dim=-1)
        v = F.pad(v, (0, spec.rope_dim))  # kernels want equal sizes
        q = torch.cat((q, q_rotary), dim=-1)
        y = ops.variant_attention(q, k, v, context, weights.variant, None)[..., :size]
    return ops.leave(ops.linear(y.flatten(-2), weights.matrix("o", dtype)))


def _block(
    spec: Model, weights: LayerWeights, ops: ModelOps, x: Tensor, delta: Tensor | None, rope: Rope, context: Any
) -> tuple[Tensor, Tensor]:
    x, h = ops.norm_add(x, delta, weights.vector("attention_norm"), spec.norm_eps)
    delta = _attention(spec, weights, ops, h, rope, context)
    x, h = ops.norm_add(x, delta, weights.vector("ffn_norm"), spec.norm_eps)
    return x, mixture_or_dense(spec, weights, ops, h)


DEEPSEEK_V2 = ModelArchitecture(
    name="deepseek_v2",
    hf_model_type="deepseek_v2",
    hf_class="DeepseekV2ForCausalLM",
    hf_config={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "moe_layer_freq": 1,
    },
    hf_defaults={
        "num_key_value_heads": 32,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    hf_experts={
        "count": "n_routed_experts",
        "top_k": "num_experts_per_tok",
        "ffn": "moe_intermediate_size",
        "shared": "n_shared_experts",
        "dense_layers": "first_k_dense_replace",
    },
    hf_latent={"kv_rank": "kv_lora_rank", "rope_dim": "qk_rope_head_dim", "q_rank": "q_lora_rank"},
    gguf="deepseek2",
    block_parameters=_parameters,
    block=_block,
)
SIGMOID_ROUTER = {
    "normalize": "norm_topk_prob",
    "weight_scale": "routed_scaling_factor",
    "groups": "n_group",
    "top_groups": "topk_group",
}
"""Names in config.json of the fields of spec.Experts that only a router with sigmoid scores has."""
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    name="deepseek_v3",
    hf_model_type="deepseek_v3",
    hf_class="DeepseekV3ForCausalLM",
    hf_config={
        "hidden_act": "silu",
        "attention_bias": False,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "rope_interleave": True,
        "num_nextn_predict_layers": 0,
    },
    # Kimi K2 has a name of its own. Layers that predict further tokens are left out.
    hf_synonyms={"model_type": ("kimi_k2",), "num_nextn_predict_layers": (1,)},
    hf_defaults={
        **DEEPSEEK_V2.hf_defaults,
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
    },
    hf_experts={**DEEPSEEK_V2.hf_experts, **SIGMOID_ROUTER},
)
