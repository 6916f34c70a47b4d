"""MiniMax-M2: experts with Mixtral's names and DeepSeek-V3's router, one norm over all queries and one over all keys of
a token, and positions in a part of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lakh.spec.model import Model
from lakh.workloads.code.architectures import ParameterInfo
from lakh.workloads.code.architectures.llama import attention_parameters
from lakh.workloads.code.architectures.mixtures.mixtral import MIXTRAL, MIXTRAL_NAMES, expert_parameters

__all__ = ["MINIMAX_M2"]


def _parameters(spec: Model) -> dict[str, ParameterInfo]:
    experts = expert_parameters(spec, MIXTRAL_NAMES)
    bias = replace(experts["ffn.router_bias"], hf=f"{MIXTRAL_NAMES[0]}.e_score_correction_bias")
    return {
        "attention_norm": ParameterInfo((spec.width,), "input_layernorm.weight", "attn_norm.weight"),
        **attention_parameters(spec),
        "ffn_norm": ParameterInfo((spec.width,), "post_attention_layernorm.weight", "ffn_norm.weight"),
        **experts,
        "ffn.router_bias": bias,
    }


def _derived(given: Mapping[str, Any]) -> dict[str, Any]:
    """Released files say how many elements of a head rotate, and not their share."""
    rotated, size = given.get("rotary_dim"), given["head_dim"]
    if "partial_rotary_factor" in given or type(rotated) is not int or type(size) is not int or size < 1:
        return {}
    return {"partial_rotary_factor": rotated / size}


MINIMAX_M2 = replace(
    MIXTRAL,
    name="minimax_m2",
    hf_model_type="minimax_m2",
    hf_class="MiniMaxM2ForCausalLM",
    hf_config={
        "hidden_act": "silu",
        "router_jitter_noise": 0.0,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
    },
    hf_derived=_derived,
    hf_more=lambda spec: {"rotary_dim": spec.rotated_dim},
    hf_defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196_608,
        "rope_theta": 5e6,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    },
    hf_windows=None,
    gguf="minimax-m2",
    block_parameters=_parameters,
)
