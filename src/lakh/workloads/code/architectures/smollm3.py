"""SmolLM3: Llama, with layers at regular intervals that have no rotary positions."""

from __future__ import annotations

from dataclasses import replace

from lakh.workloads.code.architectures.llama import LLAMA

__all__ = ["SMOLLM3"]

SMOLLM3 = replace(
    LLAMA,
    name="smollm3",
    hf_model_type="smollm3",
    hf_class="SmolLM3ForCausalLM",
    hf_config={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False},
    hf_defaults={
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rope_theta": 2e6,
        "no_rope_layer_interval": 4,
    },
    gguf="smollm3",
)
