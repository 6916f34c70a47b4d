"""GPT-BigCode (SantaCoder, StarCoder, Granite Code 20B): the block of StarCoder2, with a learned embedding of each
position in place of rotary positions. Queries share one head of keys and values, or each has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lakh.errors import ConfigError
from lakh.spec.model import Model
from lakh.workloads.code.architectures import HfModules, ParameterInfo
from lakh.workloads.code.architectures.starcoder2 import STARCODER2, starcoder2_parameters

__all__ = ["GPT_BIGCODE"]

_NAMES = {
    "attention_norm": ("ln_1.weight", "attn_norm.weight"),
    "attention_norm_bias": ("ln_1.bias", "attn_norm.bias"),
    **{f"attention.{name}": ("attn.c_attn.weight", "attn_qkv.weight") for name in "qkv"},
    **{f"attention.{name}_bias": ("attn.c_attn.bias", "attn_qkv.bias") for name in "qkv"},
    "attention.o": ("attn.c_proj.weight", "attn_output.weight"),
    "attention.o_bias": ("attn.c_proj.bias", "attn_output.bias"),
    "ffn_norm": ("ln_2.weight", "ffn_norm.weight"),
    "ffn_norm_bias": ("ln_2.bias", "ffn_norm.bias"),
}
"""In Hugging Face and GGUF files, where they are not those of StarCoder2."""


def _parameters(spec: Model) -> dict[str, ParameterInfo]:
    found = starcoder2_parameters(spec)
    for name, (hf, gguf) in _NAMES.items():
        # With one head of keys and values, transformers has all queries first.
        is_joined = hf.startswith("attn.c_attn") and spec.kv_heads > 1
        found[name] = replace(found[name], hf=hf, gguf=gguf, hf_layout="heads" if is_joined else "")
    return found


def _derived(given: Mapping[str, Any]) -> dict[str, Any]:
    is_shared, width, inner = given["multi_query"], given["n_embd"], given.get("n_inner")
    if not isinstance(is_shared, bool):
        raise ConfigError("multi_query", f"{is_shared!r} is not true or false", "copy the model again")
    found = {"num_key_value_heads": 1 if is_shared else given["n_head"]}
    return {**found, "n_inner": 4 * width} if inner is None and isinstance(width, int) else found


GPT_BIGCODE = replace(
    STARCODER2,
    name="gpt_bigcode",
    hf_model_type="gpt_bigcode",
    hf_class="GPTBigCodeForCausalLM",
    hf_modules=HfModules("transformer.", "wte", "wpe", "h", "ln_f"),
    hf_names={
        "width": "n_embd",
        "layers": "n_layer",
        "heads": "n_head",
        "ffn": "n_inner",
        "context": "n_positions",
        "norm_eps": "layer_norm_epsilon",
    },
    hf_config={"scale_attn_weights": True, "add_cross_attention": False},
    hf_choices={
        "exact_gelu": (
            "activation_function",
            {"gelu_pytorch_tanh": False, "gelu_new": False, "gelu_fast": False, "gelu": True},
        )
    },
    hf_derived=_derived,
    hf_more=lambda spec: {
        "multi_query": spec.kv_heads == 1,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    },
    hf_defaults={
        "vocab_size": 50_257,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_pytorch_tanh",
        "multi_query": True,
        "tie_word_embeddings": True,
    },
    hf_windows=None,
    gguf="starcoder",
    block_parameters=_parameters,
    final_parameters=lambda spec: {
        "norm_bias": ParameterInfo((spec.width,), "transformer.ln_f.bias", "output_norm.bias", initial=0.0)
    },
)
