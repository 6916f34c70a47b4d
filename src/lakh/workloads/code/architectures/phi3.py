"""Phi-3 and Phi-4: a Llama block whose files have queries, keys and values in one tensor, and gate and up in another.
Only a part of a head may be rotated.

Models with longrope have other frequencies for texts beyond their original context, which cached keys of a text that
grows do not have. lakh computes them within the original context, and exports keep the numbers for longer texts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lakh.spec.model import Model
from lakh.workloads.code.architectures import ParameterInfo
from lakh.workloads.code.architectures.llama import LLAMA, llama_parameters

__all__ = ["PHI3"]

_FILE_NAMES: dict[str, dict[str, Any]] = {
    "qkv": {"hf": "self_attn.qkv_proj.weight", "gguf": "attn_qkv.weight"},
    "gate_up": {"hf": "mlp.gate_up_proj.weight", "gguf": "ffn_up.weight"},
}
"""Of the tensor in a file that holds a fused tensor."""


def _parameters(spec: Model) -> dict[str, ParameterInfo]:
    return {name: replace(info, **_FILE_NAMES.get(info.fused, {})) for name, info in llama_parameters(spec).items()}


PHI3 = replace(
    LLAMA,
    name="phi3",
    hf_model_type="phi3",
    hf_class="Phi3ForCausalLM",
    hf_config={"hidden_act": "silu", "attention_bias": False},
    hf_defaults={"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    hf_windows="all",
    gguf="phi3",
    block_parameters=_parameters,
)
