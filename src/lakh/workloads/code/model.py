"""A Llama-architecture decoder in plain torch, readable in one sitting.

Shapes: B batch, T new tokens, S all tokens so far, W width, H query heads, K key/value heads, D head size, V
vocabulary.

Knows a spec.Model; knows nothing of ranks, files or tokenizers. Weight names follow the Hugging Face Llama layout
closely enough for hf.py to rename them in one table.

The rotary embedding pairs element i of a head with i + D/2 (the Hugging Face order, not llama.cpp's interleaved one).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lakh.spec.model import Model
from lakh.workloads.code.attention import Attend, Documents, torch_choice
from lakh.workloads.code.loss import linear_cross_entropy
from lakh.workloads.code.objective import PLAIN, Objective

__all__ = ["Block", "Cache", "CodeModel", "init_weights"]

INIT_STD = 0.02

Product = Callable[[Tensor, Tensor], Tensor]
"""x and a weight to x @ weight.T; fp8.py has another one."""


AddNorm = Callable[[Tensor, Tensor, "RMSNorm"], tuple[Tensor, Tensor]]


class Cache(Protocol):
    """Keys and values of earlier tokens. The model hands over new ones and gets back all that are to be seen."""

    def update(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns k_BKSD, v_BKSD and a mask that broadcasts to B H T S, true where a query sees a key."""
        ...


def local(weight: Tensor) -> Tensor:
    """The part of a weight that this rank computes with: all of it, unless tensor parallelism cut it up."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _same(x: Tensor) -> Tensor:
    return x


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.read: Callable[[Tensor], Tensor] = local  # tensor parallelism sums its gradient over ranks

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.read(self.weight).to(x.dtype), self.eps)


def add_norm(x: Tensor, delta: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """The sum, and its norm."""
    x = x + delta
    return x, norm(x)


class Attention(nn.Module):
    def __init__(self, spec: Model, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, spec.head_dim
        self.q = nn.Linear(spec.width, spec.heads * spec.head_dim, bias=False)
        self.k = nn.Linear(spec.width, spec.kv_heads * spec.head_dim, bias=False)
        self.v = nn.Linear(spec.width, spec.kv_heads * spec.head_dim, bias=False)
        self.o = nn.Linear(spec.heads * spec.head_dim, spec.width, bias=False)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.attend: Attend = torch_choice
        self.turn: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None  # kernels.py has a fused form
        self.product: Product = F.linear

    def forward(
        self, x_BTW: Tensor, rope: tuple[Tensor, Tensor], cache: Cache | None, documents: Documents | None
    ) -> Tensor:
        B, T, _ = x_BTW.shape
        parts = [matrix.weight for matrix in (self.q, self.k, self.v)]
        if cache is None and self.turn is not None:
            heads, kv_heads = (local(part).shape[0] // self.head_dim for part in parts[:2])
            turned = self.turn(fused(self.product, x_BTW, parts), *rope, heads, kv_heads)
            q_BHTD, k_BKTD, v_BKTD = (x.transpose(1, 2) for x in turned)
        else:
            q_BHTD, k_BKTD, v_BKTD = self._heads(x_BTW, parts, rope, is_training=cache is None)
        if cache is None:
            y_BHTD = self.attend(q_BHTD, k_BKTD, v_BKTD, documents)
        else:
            gqa = q_BHTD.shape[1] != k_BKTD.shape[1]
            k_all, v_all, mask = cache.update(self.layer, k_BKTD, v_BKTD)
            y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_all, v_all, attn_mask=mask, enable_gqa=gqa)
        return self.product(y_BHTD.transpose(1, 2).reshape(B, T, -1), local(self.o.weight).to(x_BTW.dtype))

    def _heads(
        self, x_BTW: Tensor, parts: Sequence[Tensor], rope: tuple[Tensor, Tensor], *, is_training: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q_BHTD, k_BKTD, both normed and rotated, and v_BKTD."""
        if is_training:
            sizes = [local(part).shape[0] for part in parts]
            products = fused(self.product, x_BTW, parts).split(sizes, dim=-1)
        else:
            products = tuple(F.linear(x_BTW, part) for part in parts)
        q, k, v = (x.view(*x_BTW.shape[:2], -1, self.head_dim) for x in products)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q_BHTD, k_BKTD, v_BKTD = (x.transpose(1, 2) for x in (q, k, v))
        return rotate(q_BHTD, rope), rotate(k_BKTD, rope), v_BKTD


class FeedForward(nn.Module):
    def __init__(self, spec: Model) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.width, spec.ffn, bias=False)
        self.up = nn.Linear(spec.width, spec.ffn, bias=False)
        self.down = nn.Linear(spec.ffn, spec.width, bias=False)
        self.activate: Callable[[Tensor], Tensor] = swiglu
        self.product: Product = F.linear

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        if cache is not None:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        inner = self.activate(fused(self.product, x, [self.gate.weight, self.up.weight]))
        return self.product(inner, local(self.down.weight).to(x.dtype))


def swiglu(gate_and_up: Tensor) -> Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def fused(product: Product, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """One product with several matrices that share their input; the results side by side in the last dim.

    The matrices stay tensors of their own, so that checkpoints, exports and cuts over ranks see plain Llama names;
    laying them side by side costs one pass over the weights, which a step's thousands of tokens never notice. Decoding
    one token at a time would, so it multiplies one by one.
    """
    return product(x, torch.cat([local(weight) for weight in weights]).to(x.dtype))


class Block(nn.Module):
    def __init__(self, spec: Model, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.width, spec.norm_eps)
        self.attention = Attention(spec, layer)
        self.ffn_norm = RMSNorm(spec.width, spec.norm_eps)
        self.ffn = FeedForward(spec)
        # Tensor parallelism: gather the sequence before the matrices, sum and scatter it after them.
        self.enter: Callable[[Tensor], Tensor] = _same
        self.leave: Callable[[Tensor], Tensor] = _same
        self.add_norm: AddNorm = add_norm  # kernels.py has a fused form

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        rope: tuple[Tensor, Tensor],
        cache: Cache | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream and what is yet to be added to it, before and after: the sum is left to the next norm,
        which a compiler then makes in one pass with it."""
        x, normed = (x, self.attention_norm(x)) if delta is None else self.add_norm(x, delta, self.attention_norm)
        x, normed = self.add_norm(
            x, self.leave(self.attention(self.enter(normed), rope, cache, documents)), self.ffn_norm
        )
        return x, self.leave(self.ffn(self.enter(normed), cache))


class CodeModel(nn.Module):
    """The whole model, or the blocks of one pipeline stage: a stage without an embedding takes hidden states.

    `dtype` is what products are computed in; the weights may be kept in another one.
    """

    def __init__(self, spec: Model) -> None:
        super().__init__()
        self.spec = spec
        self.dtype: torch.dtype | None = None
        self.embed: nn.Embedding | None = nn.Embedding(spec.vocab, spec.width)
        self.blocks = nn.ModuleDict({str(layer): Block(spec, layer) for layer in range(spec.layers)})
        self.norm: RMSNorm | None = RMSNorm(spec.width, spec.norm_eps)
        self.head = None if spec.tied else nn.Linear(spec.width, spec.vocab, bias=False)
        # Set by tensor and context parallelism.
        self.look_up: Callable[[Tensor, Tensor], Tensor] = F.embedding
        self.enter: Callable[[Tensor], Tensor] = _same
        self.head_group: dist.ProcessGroup | None = None
        self.take_piece: Callable[[Tensor], Tensor] = _same
        self.pieces = 1  # that context parallelism cuts a sequence into
        self.parts = 1  # that tensor parallelism cuts it into between matrices

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        cache: Cache | None = None,
        *,
        targets_BT: Tensor | None = None,
        documents: Documents | None = None,
        scale: float | Tensor | None = None,
        objective: Objective = PLAIN,
    ) -> Tensor:
        """Logits B T V; with targets, `scale` times the sum of their losses (the mean over all where it is left out).

        With a cache, `positions_BT` says where the new tokens stand in their sequences.
        """
        x_BTW = self.hidden(tokens_BT, positions_BT, cache, documents)
        if self.norm is None:
            return x_BTW  # of a pipeline stage before the last
        if targets_BT is None:
            return self.logits(x_BTW)
        x_BTW = self.enter(x_BTW)
        scale = 1 / targets_BT.numel() if scale is None else scale
        return linear_cross_entropy(
            x_BTW.flatten(0, 1),
            local(self.head_weight),
            self.take_piece(targets_BT).flatten(),
            scale=scale * self.pieces,  # ranks that share a sequence are averaged over, like all others
            objective=objective,
            group=self.head_group,
        )

    def hidden(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        cache: Cache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """The normed residual stream B T W: what `logits` turns into scores.

        A pipeline stage without an embedding takes the hidden states of the stage before in place of tokens.
        """
        if positions_BT is None:
            positions_BT = torch.arange(self._length(tokens_BT), device=tokens_BT.device)[None]
        positions_BT = self.take_piece(positions_BT)
        x_BTW = tokens_BT if self.embed is None else self.first_hidden(self.take_piece(tokens_BT))
        return self.stack(x_BTW, positions_BT, cache, documents)

    def _length(self, tokens_BT: Tensor) -> int:
        """Tokens of the whole sequence."""
        return tokens_BT.shape[1] if self.embed is not None else tokens_BT.shape[1] * self.pieces * self.parts

    def first_hidden(self, tokens_BT: Tensor) -> Tensor:
        """The embedded tokens, in the type that products are computed in."""
        assert self.embed is not None
        weight = self.embed.weight
        return self.look_up(tokens_BT, local(weight)).to(self.dtype or weight.dtype)

    def stack(self, x_BTW: Tensor, positions_BT: Tensor, cache: Cache | None, documents: Documents | None) -> Tensor:
        rope = rotary(self.spec, positions_BT)
        delta = None
        for block in self.each_block():
            x_BTW, delta = block(x_BTW, delta, rope, cache, documents)
        x_BTW = x_BTW if delta is None else x_BTW + delta
        return x_BTW if self.norm is None else self.norm(x_BTW)

    def each_block(self) -> Iterator[Block]:
        """The blocks that are here, in order."""
        for block in self.blocks.values():
            assert isinstance(block, Block)
            yield block

    @property
    def head_weight(self) -> Tensor:
        """The output head: a matrix of its own, or the embedding table."""
        holder = self.embed if self.head is None else self.head
        assert holder is not None
        return holder.weight

    def logits(self, x_BTW: Tensor) -> Tensor:
        return F.linear(x_BTW, self.head_weight.to(x_BTW.dtype))


def rotary(spec: Model, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines B 1 T D for these positions, in float32."""
    exponents = torch.arange(0, spec.head_dim, 2, device=positions_BT.device, dtype=torch.float32) / spec.head_dim
    frequencies = 1.0 / spec.rope_base**exponents  # rounded as transformers rounds: late positions multiply the error
    angles = positions_BT[:, None, :, None].float() * frequencies
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
