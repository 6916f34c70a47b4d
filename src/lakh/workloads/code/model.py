"""A Llama-architecture decoder in plain torch, readable in one sitting.

Shapes: B batch, T new tokens, S all tokens so far, W width, H query heads, K key/value heads, D head size, V
vocabulary.

Knows a spec.Model; knows nothing of ranks, files or tokenizers. Weight names follow the Hugging Face Llama layout
closely enough for hf.py to rename them in one table.

The rotary embedding pairs element i of a head with i + D/2 (the Hugging Face order, not llama.cpp's interleaved one).
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lakh.spec.model import Model

__all__ = ["Block", "Cache", "CodeModel", "init_weights"]

INIT_STD = 0.02


class Cache(Protocol):
    """Keys and values of earlier tokens. The model hands over new ones and gets back all that are to be seen."""

    def update(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns k_BKSD, v_BKSD and a mask that broadcasts to B H T S, true where a query sees a key."""
        ...


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, spec: Model, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, spec.head_dim
        self.q = nn.Linear(spec.width, spec.heads * spec.head_dim, bias=False)
        self.k = nn.Linear(spec.width, spec.kv_heads * spec.head_dim, bias=False)
        self.v = nn.Linear(spec.width, spec.kv_heads * spec.head_dim, bias=False)
        self.o = nn.Linear(spec.heads * spec.head_dim, spec.width, bias=False)

    def forward(self, x_BTW: Tensor, rope: tuple[Tensor, Tensor], cache: Cache | None) -> Tensor:
        B, T, _ = x_BTW.shape
        q_BHTD = self.q(x_BTW).view(B, T, -1, self.head_dim).transpose(1, 2)
        k_BKTD = self.k(x_BTW).view(B, T, -1, self.head_dim).transpose(1, 2)
        v_BKTD = self.v(x_BTW).view(B, T, -1, self.head_dim).transpose(1, 2)
        q_BHTD, k_BKTD = rotate(q_BHTD, rope), rotate(k_BKTD, rope)
        gqa = q_BHTD.shape[1] != k_BKTD.shape[1]
        if cache is None:
            y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=gqa)
        else:
            k, v, mask = cache.update(self.layer, k_BKTD, v_BKTD)
            y_BHTD = F.scaled_dot_product_attention(q_BHTD, k, v, attn_mask=mask, enable_gqa=gqa)
        return self.o(y_BHTD.transpose(1, 2).reshape(B, T, -1))


class FeedForward(nn.Module):
    def __init__(self, spec: Model) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.width, spec.ffn, bias=False)
        self.up = nn.Linear(spec.width, spec.ffn, bias=False)
        self.down = nn.Linear(spec.ffn, spec.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, spec: Model, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.width, spec.norm_eps)
        self.attention = Attention(spec, layer)
        self.ffn_norm = RMSNorm(spec.width, spec.norm_eps)
        self.ffn = FeedForward(spec)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: Cache | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, cache)
        return x + self.ffn(self.ffn_norm(x))


class CodeModel(nn.Module):
    def __init__(self, spec: Model) -> None:
        super().__init__()
        self.spec = spec
        self.embed = nn.Embedding(spec.vocab, spec.width)
        self.blocks = nn.ModuleList(Block(spec, layer) for layer in range(spec.layers))
        self.norm = RMSNorm(spec.width, spec.norm_eps)
        self.head = None if spec.tied else nn.Linear(spec.width, spec.vocab, bias=False)

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Logits B T V. With a cache, `positions_BT` says where the new tokens stand in their sequences."""
        return self.logits(self.hidden(tokens_BT, positions_BT, cache))

    def hidden(self, tokens_BT: Tensor, positions_BT: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """The normed residual stream B T W: what `logits` turns into scores."""
        if positions_BT is None:
            positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None]
        rope = rotary(self.spec, positions_BT)
        x_BTW = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTW = block(x_BTW, rope, cache)
        return self.norm(x_BTW)

    def logits(self, x_BTW: Tensor) -> Tensor:
        return F.linear(x_BTW, self.embed.weight) if self.head is None else self.head(x_BTW)


def rotary(spec: Model, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines B 1 T D for these positions, in float32."""
    exponents = torch.arange(0, spec.head_dim, 2, device=positions_BT.device, dtype=torch.float32) / spec.head_dim
    angles = positions_BT[:, None, :, None].float() / spec.rope_base**exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x_BHTD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rope
    left, right = x_BHTD.chunk(2, dim=-1)
    return (x_BHTD * cos + torch.cat((-right, left), dim=-1) * sin).type_as(x_BHTD)


@torch.no_grad()
def init_weights(model: CodeModel, seed: int) -> None:
    """Normal(0, 0.02), residual outputs scaled down by sqrt(2 layers), norms 1.

    Every tensor draws from a generator of its own, keyed by (seed, name): the weights do not depend on the order of
    construction or on which rank holds which part. Runs on CPU tensors, before sharding.
    """
    residual_std = INIT_STD / (2 * model.spec.layers) ** 0.5
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(1.0)
            continue
        key = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
        std = residual_std if name.endswith(("attention.o.weight", "ffn.down.weight")) else INIT_STD
        parameter.normal_(0.0, std, generator=generator)
