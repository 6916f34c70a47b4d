"""GLM-4.5 and 4.6: the router, shared experts and leading dense layers of DeepSeek-V3, and grouped-query attention with
biases, positions in a part of a head and, in the larger models, norms on every query and key head (arXiv 2508.06471).
"""

from __future__ import annotations

from dataclasses import replace

from lakh.spec.model import Model
from lakh.workloads.code.architectures import ParameterInfo
from lakh.workloads.code.architectures.llama import attention_parameters
from lakh.workloads.code.architectures.mixtures.deepseek_v2 import DEEPSEEK_V3
from lakh.workloads.code.architectures.mixtures.mixtral import MIXTRAL, expert_parameters

__all__ = ["GLM4_MOE"]


def _parameters(spec: Model) -> dict[str, ParameterInfo]:
    return {
        "attention_norm": ParameterInfo((spec.width,), "input_layernorm.weight", "attn_norm.weight"),
        **attention_parameters(spec),
        "ffn_norm": ParameterInfo((spec.width,), "post_attention_layernorm.weight", "post_attention_norm.weight"),
        **expert_parameters(spec, ("mlp", "gate_proj", "up_proj", "down_proj")),
    }


GLM4_MOE = replace(
    MIXTRAL,
    name="glm4_moe",
    hf_model_type="glm4_moe",
    hf_class="Glm4MoeForCausalLM",
    hf_config={"hidden_act": "silu", "attention_bias": True, "num_nextn_predict_layers": 0},
    hf_synonyms={"num_nextn_predict_layers": (1,)},
    hf_defaults={
        "attention_bias": False,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": False,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    },
    hf_choices={"qk_norm": ("use_qk_norm", {True: True, False: False})},
    hf_experts=DEEPSEEK_V3.hf_experts,
    hf_windows=None,
    gguf="glm4moe",
    block_parameters=_parameters,
)
