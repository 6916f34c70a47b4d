"""Small random models of every family, made by transformers: the reference for tests of architectures."""

from __future__ import annotations

from typing import Any

import torch

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
DEFAULT = {"rope_type": "default", "rope_theta": 500.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.5, 2.5],
    "long_factor": [1.0, 3.0, 9.0],
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
NO_DROPOUT = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)

# Name of a case -> (name in transformers, settings that differ from SIZES). Windows are shorter than the sequences.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied, linear positions": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LINEAR}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 7, "head_dim": 12}),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 12,
            "rope_parameters": {
                **YARN,
                "factor": 16.0,
                "original_max_position_embeddings": 8,  # queries grow from the eighth position on
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2 with late windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2, "rope_parameters": YARN},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "seed_oss": ("SeedOss", {"head_dim": 12, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "phi3": ("Phi3", {"sliding_window": 7}),
    "phi3 with a part of a head rotated": ("Phi3", {"rope_parameters": {"partial_rotary_factor": 0.5, **DEFAULT}}),
    "phi3 with longrope": (
        "Phi3",
        {
            "max_position_embeddings": 2048,
            "original_max_position_embeddings": 512,  # above 256, to which llama.cpp rounds its context
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
        },
    ),
    "smollm3": ("SmolLM3", {"rope_parameters": DEFAULT}),
    "gpt_bigcode": ("GPTBigCode", {"n_inner": 48, **NO_DROPOUT}),
    "gpt_bigcode with many heads of keys, exact GELU": (
        "GPTBigCode",
        {"multi_query": False, "activation_function": "gelu", "tie_word_embeddings": False, **NO_DROPOUT},
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": 7}),
    "stablelm": ("StableLm", {"rope_parameters": {"partial_rotary_factor": 0.5, **DEFAULT}}),
    "stablelm with biases": (
        "StableLm",
        {"use_qkv_bias": True, "rope_parameters": {"partial_rotary_factor": 0.25, **DEFAULT}},
    ),
    "stablelm with norms of heads and parallel residuals": (
        "StableLm",
        {
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "rope_parameters": {"partial_rotary_factor": 0.25, **DEFAULT},
        },
    ),
    "stablelm with norms of heads": (
        "StableLm",
        {"qk_layernorm": True, "rope_parameters": {"partial_rotary_factor": 0.5, **DEFAULT}},
    ),
    "glm4": ("Glm4", {"head_dim": 16, "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}),
    "glm4 without biases, with all of a head rotated": (
        "Glm4",
        {"attention_bias": False, "rope_parameters": {**YARN, "partial_rotary_factor": 1.0}},
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
            "logits_scaling": 2.0,
            "rope_parameters": DEFAULT,
        },
    ),
    "olmo2": ("Olmo2", {"rope_parameters": DEFAULT}),
    "olmo3": (
        "Olmo3",
        {"sliding_window": 7, "rope_parameters": {"full_attention": YARN, "sliding_attention": DEFAULT}},
    ),
    "gemma": ("Gemma", {"num_key_value_heads": 1, "head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 7,
            "head_dim": 16,
            "query_pre_attn_scalar": 9,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 6,
            "sliding_window": 7,
            "head_dim": 16,
            "query_pre_attn_scalar": 9,
            "rope_parameters": {
                "full_attention": {**LINEAR, "rope_theta": 900.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16},
    ),
    "qwen3_moe with experts in some layers": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 6,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [0, 1, 2],
        },
    ),
    "qwen3_moe with a layer without experts": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [0, 2],
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "qwen2_moe with experts in some layers": (
        "Qwen2Moe",
        {
            "num_hidden_layers": 6,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5},
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 12,
            "q_lora_rank": None,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 6,
            "v_head_dim": 10,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 24,
        },
    ),
    "deepseek_v2 with compressed queries, scaled positions": (
        "DeepseekV2",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 12,
            "q_lora_rank": 14,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 16,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 12,
            "q_lora_rank": None,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 6,
            "v_head_dim": 10,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.7,
        },
    ),
    "deepseek_v3 without groups, with scaled positions": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 12,
            "q_lora_rank": 14,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 16,
            "norm_topk_prob": False,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5},
        },
    ),
    "glm4_moe without norms of heads, with groups and scaled positions": (
        "Glm4Moe",
        {
            "attention_bias": True,
            "n_routed_experts": 6,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "rope_parameters": {**YARN, "partial_rotary_factor": 0.75},
        },
    ),
    "llama4": (
        "Llama4",
        {
            "head_dim": 16,
            "intermediate_size": 24,
            "intermediate_size_mlp": 40,
            "num_local_experts": 6,
            "interleave_moe_layer_step": 2,
            "rope_parameters": LLAMA3,
        },
    ),
    "llama4 without norms of heads, with experts in all layers": (
        "Llama4",
        {
            "intermediate_size": 24,
            "intermediate_size_mlp": 40,
            "num_local_experts": 6,
            "use_qk_norm": False,
            "no_rope_layers": [1, 0, 1, 0],
            "rope_parameters": DEFAULT,
        },
    ),
    "llama4 with chunks and growing queries": (
        "Llama4",
        {
            "intermediate_size": 24,
            "intermediate_size_mlp": 40,
            "num_local_experts": 6,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 16,
            "floor_scale": 8,
            "attn_scale": 0.4,
            "rope_parameters": LLAMA3,
        },
    ),
    "llama4 with chunks in every second layer": (
        "Llama4",
        {
            "num_hidden_layers": 5,
            "intermediate_size": 24,
            "intermediate_size_mlp": 40,
            "num_local_experts": 4,
            "no_rope_layers": [1, 0, 1, 0, 1],
            "attention_chunk_size": 7,
            "attn_temperature_tuning": False,
            "rope_parameters": DEFAULT,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "head_dim": 16,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
}


CONFIGS = {"Gemma3": "Gemma3TextConfig", "Llama4": "Llama4TextConfig"}
"""Where the name of the class differs."""


def make(case: str, seed: int = 0, **more: Any) -> Any:
    """The transformers model of a case, with weights large enough that every part of it shows in the logits; `more` are
    settings of its configuration."""
    import transformers

    name, changes = CASES[case]
    config = getattr(transformers, CONFIGS.get(name, f"{name}Config"))(**{**SIZES, **changes, **more})
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("bias"):  # norms and biases differ from their initial values, too
                parameter += 0.3 * torch.randn_like(parameter)
            else:
                parameter.mul_(6)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += 0.3 * torch.randn_like(buffer)
    return model
