"""StarCoder2: LayerNorm, biases on every linear layer, and a plain feed-forward with GELU."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lakh.spec.model import Model
from lakh.workloads.code.architectures import LayerWeights, ModelArchitecture, ParameterInfo
from lakh.workloads.code.architectures.llama import attention, attention_parameters
from lakh.workloads.code.ops import ModelOps, Rope

__all__ = ["STARCODER2", "layer_norm", "starcoder2_parameters"]


def starcoder2_parameters(spec: Model) -> dict[str, ParameterInfo]:
    width, ffn, info = spec.width, spec.ffn, ParameterInfo
    return {
        "attention_norm": info((width,), "input_layernorm.weight", "attn_norm.weight"),
        "attention_norm_bias": info((width,), "input_layernorm.bias", "attn_norm.bias", initial=0.0),
        **attention_parameters(spec),
        "ffn_norm": info((width,), "post_attention_layernorm.weight", "ffn_norm.weight"),
        "ffn_norm_bias": info((width,), "post_attention_layernorm.bias", "ffn_norm.bias", initial=0.0),
        "ffn.up": info((ffn, width), "mlp.c_fc.weight", "ffn_up.weight", 0, "up"),
        "ffn.up_bias": info((ffn,), "mlp.c_fc.bias", "ffn_up.bias", 0, "up_bias", initial=0.0),
        "ffn.down": info((width, ffn), "mlp.c_proj.weight", "ffn_down.weight", 1, "down", True),
        "ffn.down_bias": info((width,), "mlp.c_proj.bias", "ffn_down.bias", initial=0.0),
    }


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight.to(x.dtype), bias.to(x.dtype), eps)


def _block(
    spec: Model, weights: LayerWeights, ops: ModelOps, x: Tensor, delta: Tensor | None, rope: Rope, context: Any
) -> tuple[Tensor, Tensor]:
    x = x if delta is None else x + delta
    h = layer_norm(x, weights.vector("attention_norm"), weights.vector("attention_norm_bias"), spec.norm_eps)
    x = x + attention(spec, weights, ops, h, rope, context)
    h = layer_norm(x, weights.vector("ffn_norm"), weights.vector("ffn_norm_bias"), spec.norm_eps)
    inner = ops.linear(ops.enter(h), weights.matrix("up", h.dtype)) + weights.matrix("up_bias", h.dtype)
    inner = F.gelu(inner, approximate="none" if spec.exact_gelu else "tanh")
    y = ops.leave(ops.linear(inner, weights.matrix("down", h.dtype)))
    return x, y + weights.vector("ffn.down_bias").to(y.dtype)


STARCODER2 = ModelArchitecture(
    name="starcoder2",
    hf_model_type="starcoder2",
    hf_class="Starcoder2ForCausalLM",
    hf_names={"norm_eps": "norm_epsilon"},
    hf_config={"hidden_act": "gelu_pytorch_tanh", "use_bias": True},
    hf_defaults={
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    hf_windows="all",
    gguf="starcoder2",
    gguf_names={"norm_eps": "attention.layer_norm_epsilon"},
    block_parameters=starcoder2_parameters,
    block=_block,
    final_parameters=lambda spec: {
        "norm_bias": ParameterInfo((spec.width,), "model.norm.bias", "output_norm.bias", initial=0.0)
    },
    final_norm=lambda spec, vector, x: layer_norm(x, vector("norm"), vector("norm_bias"), spec.norm_eps),
)
