"""gpt-fast as a peer, from a checkout: its model, its compiled step and its decoding loop on the same weights.

git clone https://github.com/pytorch-labs/gpt-fast
lakh bench decode --shape 1.2b --systems lakh,gpt-fast --gpt-fast gpt-fast
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lakh.errors import UserError
from lakh.spec.model import Model

__all__ = ["gpt_fast_state", "start"]

# lakh's names in a block, and gpt-fast's. It joins the three projections when it loads them.
_NAMES = {
    "attention_norm": "attention_norm",
    "attention.q": "attention.wq",
    "attention.k": "attention.wk",
    "attention.v": "attention.wv",
    "attention.o": "attention.wo",
    "ffn_norm": "ffn_norm",
    "ffn.gate": "feed_forward.w1",
    "ffn.up": "feed_forward.w3",
    "ffn.down": "feed_forward.w2",
}


def start(
    checkout: str, spec: Model, weights: Mapping[str, Tensor], prompts: list[list[int]], device: str
) -> Callable[[int], None]:
    """A function that generates N tokens after each prompt."""
    model_module, generate_module = _import(checkout)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = model_module.ModelArgs(
        block_size=spec.context,
        vocab_size=spec.vocab,
        n_layer=spec.layers,
        n_head=spec.heads,
        dim=spec.width,
        intermediate_size=spec.ffn,
        n_local_heads=spec.kv_heads,
        rope_base=spec.rope_base,
        norm_eps=spec.norm_eps,
    )
    with torch.device("meta"):
        model = model_module.Transformer(config)
    state = {name: tensor.to(device, dtype) for name, tensor in gpt_fast_state(spec, weights).items()}
    model.load_state_dict(state, assign=True)
    model = model.to(device).eval()
    decode_one_token = generate_module.decode_one_token
    if device == "cuda":
        # As its own `--compile` does: the loop calls this name of its module.
        decode_one_token = torch.compile(decode_one_token, mode="reduce-overhead", fullgraph=True)
    generate_module.decode_one_token = decode_one_token
    ids = torch.tensor(prompts, device=device)
    with torch.device(device):
        model.setup_caches(max_batch_size=len(prompts), max_seq_length=min(spec.context, ids.shape[1] + 512))

    def generate(count: int) -> None:
        with torch.no_grad():
            positions = torch.arange(ids.shape[1], device=device)
            first = generate_module.prefill(model, ids, positions, temperature=0.0)
            position = torch.tensor([ids.shape[1]], device=device, dtype=torch.int)
            made, _ = generate_module.decode_n_tokens(model, first, position, count - 1, temperature=0.0)
        assert len(made) == count - 1
        if device == "cuda":
            torch.cuda.synchronize()

    return generate


def gpt_fast_state(spec: Model, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under gpt-fast's names. Its rotary embedding turns adjacent pairs, where Hugging Face's turns halves."""
    state = {
        "tok_embeddings.weight": weights["embed.weight"],
        "norm.weight": weights["norm.weight"],
        "output.weight": weights.get("head.weight", weights["embed.weight"]),
    }
    for layer in range(spec.layers):
        block = {name: weights[f"blocks.{layer}.{name}.weight"] for name in _NAMES}
        block["attention.q"] = _adjacent_pairs(block["attention.q"], spec.heads)
        block["attention.k"] = _adjacent_pairs(block["attention.k"], spec.kv_heads)
        state |= {f"layers.{layer}.{_NAMES[name]}.weight": tensor for name, tensor in block.items()}
    return state


def _adjacent_pairs(weight: Tensor, heads: int) -> Tensor:
    rows, width = weight.shape
    return weight.view(heads, 2, rows // heads // 2, width).transpose(1, 2).reshape(rows, width)


def _import(checkout: str) -> tuple[Any, Any]:
    root = Path(checkout).resolve()
    if not (root / "generate.py").exists() or not (root / "model.py").exists():
        raise UserError(f"--gpt-fast {checkout}", "holds no generate.py and model.py", "name a checkout of gpt-fast")
    tokenizer = ModuleType("tokenizer")
    tokenizer.get_tokenizer = None  # type: ignore[attr-defined]  # it needs sentencepiece; prompts are ids here
    sys.modules["tokenizer"] = tokenizer
    sys.path.insert(0, str(root))
    try:
        return importlib.import_module("model"), importlib.import_module("generate")
    finally:
        sys.path.remove(str(root))
