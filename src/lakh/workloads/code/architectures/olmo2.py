"""OLMo 2: Llama with norms behind attention and feed-forward in place of those before them, and norms of all queries
and of all keys of a token. OLMo 3: with windows in three of four layers, whose positions no scaling changes.
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

__all__ = ["OLMO2", "OLMO3"]


def _parameters(spec: Model) -> dict[str, ParameterInfo]:
    norm, info = (spec.width,), ParameterInfo
    return {
        **attention_parameters(spec),
        "attention_norm": info(norm, "post_attention_layernorm.weight", "post_attention_norm.weight"),
        **gated_parameters(spec),
        "ffn_norm": info(norm, "post_feedforward_layernorm.weight", "post_ffw_norm.weight"),
    }


def _block(
    spec: Model, weights: LayerWeights, ops: ModelOps, x: Tensor, delta: Tensor | None, rope: Rope, context: Any
) -> tuple[Tensor, Tensor]:
    x = x if delta is None else x + delta
    y = attention(spec, weights, ops, x, rope, context)
    x = x + rms_norm(y, weights.vector("attention_norm"), spec.norm_eps)
    return x, rms_norm(feed_forward(weights, ops, x), weights.vector("ffn_norm"), spec.norm_eps)


OLMO2 = replace(
    LLAMA,
    name="olmo2",
    hf_model_type="olmo2",
    hf_class="Olmo2ForCausalLM",
    hf_config={"hidden_act": "silu", "attention_bias": False},
    hf_defaults={"rms_norm_eps": 1e-5},
    gguf="olmo2",
    block_parameters=_parameters,
    block=_block,
    fuses_norms=False,
)
OLMO3 = replace(
    OLMO2,
    name="olmo3",
    hf_model_type="olmo3",
    hf_class="Olmo3ForCausalLM",
    hf_names={"local_rope_base": "rope_local_base_freq"},
    hf_defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096},
    hf_derived=lambda given: {"rope_local_base_freq": given["rope_theta"]},
    hf_windows="but_fourth",
    gguf_windows=3 / 4,
)
