"""StableLM (StableLM 3B, Stable Code 3B): a Llama block with LayerNorm, and positions in a part of a head.

StableLM 2 1.6B has biases of queries, keys and values. StableLM 2 12B has a norm for each head of queries and keys, and
adds attention and feed-forward of one norm together.
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

_CHOICES = {
    "attention_bias": "use_qkv_bias",
    "qk_norm": "qk_layernorm",
    "parallel_residual": "use_parallel_residual",
}
"""Settings of spec.Model, and their names in config.json."""


def _parameters(spec: Model) -> dict[str, ParameterInfo]:
    info, found = ParameterInfo, llama_parameters(spec)
    found["attention_norm_bias"] = info((spec.width,), "input_layernorm.bias", "attn_norm.bias", initial=0.0)
    if spec.parallel_residual:
        del found["ffn_norm"]
        return found
    return {
        **found,
        "ffn_norm_bias": info((spec.width,), "post_attention_layernorm.bias", "ffn_norm.bias", initial=0.0),
    }


def _block(
    spec: Model, weights: LayerWeights, ops: ModelOps, x: Tensor, delta: Tensor | None, rope: Rope, context: Any
) -> tuple[Tensor, Tensor]:
    x = x if delta is None else x + delta
    h = layer_norm(x, weights.vector("attention_norm"), weights.vector("attention_norm_bias"), spec.norm_eps)
    delta = attention(spec, weights, ops, h, rope, context)
    if spec.parallel_residual:
        return x, delta + feed_forward(weights, ops, h)
    x = x + delta
    h = layer_norm(x, weights.vector("ffn_norm"), weights.vector("ffn_norm_bias"), spec.norm_eps)
    return x, feed_forward(weights, ops, h)


STABLELM = replace(
    LLAMA,
    name="stablelm",
    hf_model_type="stablelm",
    hf_class="StableLmForCausalLM",
    hf_names={"norm_eps": "layer_norm_eps"},
    hf_config={"hidden_act": "silu"},
    hf_defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
        **dict.fromkeys(_CHOICES.values(), False),
    },
    hf_choices={field: (name, {True: True, False: False}) for field, name in _CHOICES.items()},
    hf_more=lambda spec: {"hidden_dropout": 0.0},
    gguf="stablelm",
    gguf_names=STARCODER2.gguf_names,
    block_parameters=_parameters,
    block=_block,
    fuses_norms=False,
    final_parameters=STARCODER2.final_parameters,
    final_norm=STARCODER2.final_norm,
)
