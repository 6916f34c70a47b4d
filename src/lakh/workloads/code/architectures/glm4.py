"""GLM-4 (GLM-4-9B-0414, GLM-4-32B-0414, GLM-Z1): a Llama block with norms before and after attention and feed-forward,
and positions that rotate neighbouring elements in a part of a head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from lakh.spec.model import Model
from lakh.workloads.code.architectures import LayerWeights, ParameterInfo
from lakh.workloads.code.architectures.llama import (
    LLAMA,
    attention,
    attention_parameters,
    feed_forward,
    gated_parameters,
)
from lakh.workloads.code.ops import ModelOps, Rope, rms_norm

__all__ = ["GLM4"]

_NORMS = {
    "attention_norm": ("input_layernorm", "attn_norm"),
    "attention_post_norm": ("post_self_attn_layernorm", "post_attention_norm"),
    "ffn_norm": ("post_attention_layernorm", "ffn_norm"),
    "ffn_post_norm": ("post_mlp_layernorm", "post_ffw_norm"),
}
"""Names in Hugging Face and GGUF files."""


def _parameters(spec: Model) -> dict[str, ParameterInfo]:
    norm = (spec.width,)
    found = {name: ParameterInfo(norm, f"{hf}.weight", f"{gguf}.weight") for name, (hf, gguf) in _NORMS.items()}
    found |= attention_parameters(spec) | gated_parameters(spec)
    for name in ("ffn.gate", "ffn.up"):
        found[name] = replace(found[name], hf="mlp.gate_up_proj.weight", gguf="ffn_up.weight")
    return found


def _block(
    spec: Model, weights: LayerWeights, ops: ModelOps, x: Tensor, delta: Tensor | None, rope: Rope, context: Any
) -> tuple[Tensor, Tensor]:
    eps = spec.norm_eps
    x, h = ops.norm_add(x, delta, weights.vector("attention_norm"), eps)
    y = attention(spec, weights, ops, h, rope, context)
    x, h = ops.norm_add(x, rms_norm(y, weights.vector("attention_post_norm"), eps), weights.vector("ffn_norm"), eps)
    return x, rms_norm(feed_forward(weights, ops, h), weights.vector("ffn_post_norm"), eps)


GLM4 = replace(
    LLAMA,
    name="glm4",
    hf_model_type="glm4",
    hf_class="Glm4ForCausalLM",
    hf_config={"hidden_act": "silu"},
    hf_defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 0.00000015625,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    hf_choices={"attention_bias": ("attention_bias", {True: True, False: False})},
    gguf="glm4",
    block_parameters=_parameters,
    block=_block,
    fuses_norms=False,
)
