"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): experts in a Qwen2 block, and a shared expert with a gate.

Its shared expert is as large as several of the others, which are that many shared experts here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lakh.errors import ConfigError
from lakh.spec.model import Model
from lakh.workloads.code.architectures import ParameterInfo
from lakh.workloads.code.architectures.llama import attention_parameters
from lakh.workloads.code.architectures.mixtures.mixtral import MIXTRAL, expert_parameters
from lakh.workloads.code.architectures.mixtures.sparse_layers import (
    NO_DENSE_LAYERS,
    STEP,
    dense_layers,
    dense_layers_config,
    whole_number,
)

__all__ = ["QWEN2_MOE"]

_NAMES = ("mlp", "gate_proj", "up_proj", "down_proj")
_SHARED = "shared_expert_intermediate_size"


def _parameters(spec: Model) -> dict[str, ParameterInfo]:
    return {
        "attention_norm": ParameterInfo((spec.width,), "input_layernorm.weight", "attn_norm.weight"),
        **attention_parameters(spec),
        "ffn_norm": ParameterInfo((spec.width,), "post_attention_layernorm.weight", "ffn_norm.weight"),
        **expert_parameters(spec, _NAMES, shared="shared_expert"),
    }


def _derived(given: Mapping[str, Any]) -> dict[str, Any]:
    """The size of the shared expert as a number of experts, and the layers without experts."""
    shared, size = (whole_number(given, key) for key in (_SHARED, "moe_intermediate_size"))
    if shared % size:
        found = f"{shared} is no multiple of moe_intermediate_size, {size}"
        raise ConfigError(_SHARED, found, "use another model")
    return {"experts.shared": shared // size, **dense_layers(given)}


def _more(spec: Model) -> dict[str, Any]:
    assert spec.experts is not None
    return {_SHARED: spec.experts.shared * spec.experts.ffn, **dense_layers_config(spec)}


QWEN2_MOE = replace(
    MIXTRAL,
    name="qwen2_moe",
    hf_model_type="qwen2_moe",
    hf_class="Qwen2MoeForCausalLM",
    hf_config={"hidden_act": "silu", "qkv_bias": True, "use_sliding_window": False},
    hf_defaults={
        "num_key_value_heads": 16,
        "max_position_embeddings": 32_768,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        _SHARED: 5632,
        **NO_DENSE_LAYERS,
    },
    hf_experts={
        "count": "num_experts",
        "top_k": "num_experts_per_tok",
        "ffn": "moe_intermediate_size",
        "normalize": "norm_topk_prob",
        "interval": STEP,
        "shared": "",
        "dense_layers": "",
        "dense_blocks": "",
    },
    hf_derived=_derived,
    hf_more=_more,
    hf_windows=None,
    gguf="qwen2moe",
    block_parameters=_parameters,
)
