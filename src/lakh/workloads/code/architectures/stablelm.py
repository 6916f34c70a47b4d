"""StableLM (StableLM 3B, Stable Code 3B): a Llama block with LayerNorm, and positions in a part of a head.

StableLM 2 has biases of queries, keys and values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from lakh.spec.model import Model
from lakh.workloads.code.architectures import LayerWeights, ParameterInfo
from lakh.workloads.code.architectures.llama import LLAMA, attention, feed_forward, llama_parameters
from lakh.workloads.code.architectures.starcoder2 import STARCODER2, layer_norm
from lakh.workloads.code.ops import ModelOps, Rope

__all__ = ["STABLELM"]


def _parameters(spec: Model) -> dict[str, ParameterInfo]:
    info = ParameterInfo
    return {
        **llama_parameters(spec),
        "attention_norm_bias": info((spec.width,), "input_layernorm.bias", "attn_norm.bias", initial=0.0),
        "ffn_norm_bias": info((spec.width,), "post_attention_layernorm.bias", "ffn_norm.bias", initial=0.0),
    }


def _block(
    spec: Model, weights: LayerWeights, ops: ModelOps, x: Tensor, delta: Tensor | None, rope: Rope, context: Any
) -> tuple[Tensor, Tensor]:
    x = x if delta is None else x + delta
    h = layer_norm(x, weights.vector("attention_norm"), weights.vector("attention_norm_bias"), spec.norm_eps)
    x = x + attention(spec, weights, ops, h, rope, context)
    h = layer_norm(x, weights.vector("ffn_norm"), weights.vector("ffn_norm_bias"), spec.norm_eps)
    return x, feed_forward(weights, ops, h)


STABLELM = replace(
    LLAMA,
    name="stablelm",
    hf_model_type="stablelm",
    hf_class="StableLmForCausalLM",
    hf_names={"norm_eps": "layer_norm_eps"},
    hf_config={"hidden_act": "silu", "qk_layernorm": False, "use_parallel_residual": False},
    hf_defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
        "use_qkv_bias": False,
    },
    hf_choices={"attention_bias": ("use_qkv_bias", {True: True, False: False})},
    hf_more=lambda spec: {"hidden_dropout": 0.0},
    gguf="stablelm",
    gguf_names=STARCODER2.gguf_names,
    block_parameters=_parameters,
    block=_block,
    fuses_norms=False,
    final_parameters=STARCODER2.final_parameters,
    final_norm=STARCODER2.final_norm,
)
