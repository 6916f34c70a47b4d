"""Model families as facts that need no torch: what distinguishes each from Llama, and which settings it takes.

spec.Model counts parameters with them, and `require_trainable` refuses combinations that no family computes. The
computation of a family is in workloads/code/architectures, under the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FAMILIES", "ModelFamily"]


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    models: str
    """Published models of it that people know; `lakh models` and the README list them."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings of spec.Model that it needs, where they are not the defaults."""
    allows: tuple[str, ...] = ()
    """Optional settings of spec.Model that it computes, beyond those of every family."""
    rope_scalings: tuple[str, ...] = ("linear", "llama3", "yarn")
    """Kinds of scaled rotary positions."""
    needs: tuple[str, ...] = ()
    """Optional settings that it cannot do without."""
    expert_options: tuple[str, ...] = ()
    """Optional settings of spec.Experts that it computes."""
    fixed_experts: Mapping[str, Any] = field(default_factory=dict)
    """Settings of spec.Experts that it needs."""
    norms: int = 2
    """Norms of the residual stream in a block."""
    has_norm_bias: bool = False
    """LayerNorm, with a bias, in place of RMSNorm."""
    has_qkv_bias: bool = False
    """Bias on queries, keys and values."""
    has_output_bias: bool = False
    """Bias on the output of attention, and on both matrices of a dense feed-forward."""
    biases_output: bool = False
    """Its models with `attention_bias` have one on the output of attention, too."""
    has_joint_head_norm: bool = False
    """One norm over all queries of a token and one over all its keys, not one for each head."""
    has_separate_head_norms: bool = False
    """Norms of query and key heads are LayerNorms without biases, each head with a weight of its own."""
    has_plain_head_norm: bool = False
    """Norms of query and key heads have no weights, and layers without rotary positions have none."""
    scales_expert_inputs: bool = False
    """The sigmoid of a router's score multiplies what an expert takes, and not what it gives."""
    has_shared_gate: bool = False
    """The output of shared experts, which it always has, is multiplied by a sigmoid of each token."""
    has_sigmoid_router: bool = False
    """Routers have sigmoid scores, and a bias on those that choose experts; else a softmax."""
    has_learned_positions: bool = False
    """A table with an embedding of each position of the context, in place of rotary positions."""
    rotates_neighbours: bool = False
    """Positions rotate neighbouring elements of a head, and not element i with i + D/2."""
    has_chunks: bool = False
    """Its windows are chunks: a token attends to those since the last position that is a multiple of the window."""
    grows_unrotated: bool = False
    """`query_growth` is that of layers without rotary positions, and begins one position earlier."""
    has_equal_heads: bool = False
    """Heads have width / heads elements, and no other size."""
    has_sinks: bool = False
    """Every attention head has a learned score that takes a share of the softmax."""


_ROUTED = ("shared", "dense_layers", "balance_bias")

FAMILIES: dict[str, ModelFamily] = {
    "llama": ModelFamily(
        models="Llama 1 to 3, Code Llama, DeepSeek-Coder, Yi-Coder, OpenCoder, SmolLM2, Granite Code 3B and 8B",
        allows=("attention_bias", "mlp_bias"),
        biases_output=True,
    ),
    "mistral": ModelFamily(models="Mistral 7B, Codestral 22B", allows=("sliding_window",)),
    "ministral3": ModelFamily(models="Ministral 3, Devstral 2", allows=("sliding_window", "query_growth")),
    "qwen2": ModelFamily(models="Qwen2, Qwen2.5-Coder", allows=("sliding_window",), has_qkv_bias=True),
    "qwen3": ModelFamily(models="Qwen3", fixed={"qk_norm": True}, allows=("sliding_window",)),
    "seed_oss": ModelFamily(models="Seed-OSS 36B", has_qkv_bias=True),
    "phi3": ModelFamily(
        models="Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini",
        allows=("sliding_window", "rotary_size"),
        rope_scalings=("longrope",),
    ),
    "smollm3": ModelFamily(models="SmolLM3 3B", allows=("unrotated_interval",)),
    "starcoder2": ModelFamily(
        models="StarCoder2",
        fixed={"gated": False},
        allows=("sliding_window",),
        has_norm_bias=True,
        has_qkv_bias=True,
        has_output_bias=True,
    ),
    "gpt_bigcode": ModelFamily(
        models="SantaCoder, StarCoder, Granite Code 20B and 34B",
        fixed={"gated": False},
        allows=("exact_gelu",),
        rope_scalings=(),
        has_norm_bias=True,
        has_qkv_bias=True,
        has_output_bias=True,
        has_learned_positions=True,
        has_equal_heads=True,
    ),
    "stablelm": ModelFamily(
        models="StableLM 3B, StableLM 2 1.6B and 12B, Stable Code 3B",
        allows=("rotary_size", "attention_bias", "qk_norm", "parallel_residual"),
        has_norm_bias=True,
        has_separate_head_norms=True,
        has_equal_heads=True,
    ),
    "granite": ModelFamily(
        models="Granite 3", allows=("embedding_scale", "score_scale", "residual_scale", "logit_divisor")
    ),
    "olmo2": ModelFamily(models="OLMo 2", fixed={"qk_norm": True}, has_joint_head_norm=True),
    "olmo3": ModelFamily(
        models="OLMo 3", fixed={"qk_norm": True}, allows=("sliding_window", "local_rope_base"), has_joint_head_norm=True
    ),
    "gemma": ModelFamily(models="Gemma, CodeGemma"),
    "gemma2": ModelFamily(
        models="Gemma 2", allows=("sliding_window", "attention_softcap", "logit_softcap", "query_scale"), norms=4
    ),
    "gemma3": ModelFamily(
        models="Gemma 3",
        fixed={"qk_norm": True},
        allows=("sliding_window", "attention_softcap", "logit_softcap", "query_scale", "local_rope_base"),
        norms=4,
    ),
    "mixtral": ModelFamily(
        models="Mixtral 8x7B and 8x22B",
        allows=("experts", "sliding_window"),
        needs=("experts",),
        expert_options=_ROUTED,
    ),
    "qwen3_moe": ModelFamily(
        models="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder 30B-A3B and 480B-A35B",
        fixed={"qk_norm": True},
        allows=("experts", "sliding_window"),
        needs=("experts",),
        expert_options=(*_ROUTED, "interval", "dense_blocks"),
    ),
    "qwen2_moe": ModelFamily(
        models="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
        allows=("experts",),
        needs=("experts",),
        expert_options=("shared", "dense_layers", "interval", "dense_blocks"),
        has_qkv_bias=True,
        has_shared_gate=True,
    ),
    "minimax_m2": ModelFamily(
        models="MiniMax-M2, M2.1, M2.5 and M2.7",
        fixed={"qk_norm": True},
        allows=("experts", "rotary_size"),
        needs=("experts",),
        expert_options=("balance_bias",),
        has_joint_head_norm=True,
        has_sigmoid_router=True,
    ),
    "deepseek_v2": ModelFamily(
        models="DeepSeek-V2, DeepSeek-Coder-V2",
        allows=("experts", "latent"),
        needs=("experts", "latent"),
        expert_options=("shared", "dense_layers"),
    ),
    "deepseek_v3": ModelFamily(
        models="DeepSeek-V3, DeepSeek-R1, Kimi K2, Moonlight 16B-A3B",
        allows=("experts", "latent"),
        needs=("experts", "latent"),
        expert_options=(*_ROUTED, "groups", "weight_scale"),
        has_sigmoid_router=True,
    ),
    "glm4": ModelFamily(
        models="GLM-4-9B-0414, GLM-4-32B-0414, GLM-Z1",
        allows=("rotary_size", "attention_bias"),
        norms=4,
        rotates_neighbours=True,
    ),
    "glm4_moe": ModelFamily(
        models="GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7",
        allows=("experts", "rotary_size", "qk_norm"),
        needs=("experts",),
        expert_options=(*_ROUTED, "groups", "weight_scale"),
        has_qkv_bias=True,
        has_sigmoid_router=True,
    ),
    "llama4": ModelFamily(
        models="Llama 4 Scout and Maverick",
        allows=("experts", "unrotated_interval", "qk_norm", "sliding_window", "query_growth", "growth_interval"),
        rope_scalings=("llama3",),
        needs=("experts",),
        expert_options=("interval",),
        fixed_experts={"top_k": 1, "shared": 1, "normalize": False},
        has_plain_head_norm=True,
        scales_expert_inputs=True,
        rotates_neighbours=True,
        has_chunks=True,
        grows_unrotated=True,
    ),
    "gpt_oss": ModelFamily(
        models="gpt-oss 20b and 120b",
        allows=("experts", "sliding_window"),
        needs=("experts",),
        expert_options=("bias",),
        has_qkv_bias=True,
        has_output_bias=True,
        has_sinks=True,
    ),
}
"""By the name that `model.family` and `lakh models` use."""
