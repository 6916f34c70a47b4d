"""GPT-OSS: experts with biases and a clamped SwiGLU, attention with biases and sinks, a window in every second layer.

Gate and up of an expert alternate row by row, as in its files. Weights in MXFP4 are dequantized when they are read
(formats/mxfp4.py).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lakh.spec.model import Model
from lakh.workloads.code.architectures import LayerWeights, ModelArchitecture, ParameterInfo
from lakh.workloads.code.architectures.llama import attention, attention_parameters
from lakh.workloads.code.ops import ModelOps, Rope
from lakh.workloads.code.routing import route

__all__ = ["GPT_OSS"]


def _parameters(spec: Model) -> dict[str, ParameterInfo]:
    assert spec.experts is not None
    count, ffn, width, info = spec.experts.count, spec.experts.ffn, spec.width, ParameterInfo
    experts, router = "mlp.experts", "mlp.router"
    shape, down = (count, 2 * ffn, width), (count, width, ffn)
    return {
        "attention_norm": info((width,), "input_layernorm.weight", "attn_norm.weight"),
        **attention_parameters(spec),
        "ffn_norm": info((width,), "post_attention_layernorm.weight", "post_attention_norm.weight"),
        "ffn.router": info((count, width), f"{router}.weight", "ffn_gate_inp.weight"),
        "ffn.router_offset": info((count,), f"{router}.bias", "ffn_gate_inp.bias", initial=0.0),
        "ffn.gate_up": info(
            shape,
            f"{experts}.gate_up_proj",
            "ffn_{}_exps.weight",
            1,
            "gate_up",
            hf_layout="transposed",
            gguf_layout="alternate",
        ),
        "ffn.gate_up_bias": info(
            (count, 2 * ffn, 1),
            f"{experts}.gate_up_proj_bias",
            "ffn_{}_exps.bias",
            1,
            "gate_up_bias",
            initial=0.0,
            hf_layout="flat",
            gguf_layout="alternate",
        ),
        "ffn.down": info(down, f"{experts}.down_proj", "ffn_down_exps.weight", 2, "down", True, hf_layout="transposed"),
        "ffn.down_bias": info((count, width), f"{experts}.down_proj_bias", "ffn_down_exps.bias", initial=0.0),
    }


def _experts(spec: Model, weights: LayerWeights, ops: ModelOps, h: Tensor) -> Tensor:
    assert spec.experts is not None
    h = ops.enter(h)
    x_NW, dtype = h.flatten(0, -2), h.dtype
    logits = ops.full_linear(x_NW, weights.vector("ffn.router")) + weights.vector("ffn.router_offset").to(dtype)
    weight_NK, index_NK, share_E = route(spec.experts, ops, logits, None)
    if share_E is not None:
        weights.observe_load(share_E)
    bias = weights.matrix("gate_up_bias", dtype).squeeze(-1)
    gate_up, down = weights.matrix("gate_up", dtype), weights.matrix("down", dtype)
    y = ops.experts(x_NW, gate_up, down, index_NK, weight_NK, bias=bias)
    # The biases of down, weighted as the experts are; tensor-parallel ranks add one part each.
    weight_NE = weight_NK.new_zeros(len(x_NW), spec.experts.count).scatter(1, index_NK, weight_NK)
    y = y + weight_NE.to(dtype) @ weights.vector("ffn.down_bias").to(dtype) / ops.tensor_parallel
    return ops.leave(y.view_as(h))


def _block(
    spec: Model, weights: LayerWeights, ops: ModelOps, x: Tensor, delta: Tensor | None, rope: Rope, context: Any
) -> tuple[Tensor, Tensor]:
    x, h = ops.norm_add(x, delta, weights.vector("attention_norm"), spec.norm_eps)
    delta = attention(spec, weights, ops, h, rope, context)
    x, h = ops.norm_add(x, delta, weights.vector("ffn_norm"), spec.norm_eps)
    return x, _experts(spec, weights, ops, h)


GPT_OSS = ModelArchitecture(
    name="gpt_oss",
    hf_model_type="gpt_oss",
    hf_class="GptOssForCausalLM",
    hf_config={"hidden_act": "silu", "attention_bias": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    hf_defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
    },
    hf_experts={"count": "num_local_experts", "top_k": "num_experts_per_tok", "ffn": "intermediate_size"},
    hf_windows="alternate",
    gguf="gpt-oss",
    gguf_windows=0.5,
    block_parameters=_parameters,
    block=_block,
)
