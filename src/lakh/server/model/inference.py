"""The network as the engine runs it: fused weights, a ragged batch of new tokens, keys and values in blocks.

Shapes: N new tokens of all rows, T new tokens of one row, S tokens of one row so far, L layers, W width, F ffn, H
query heads, K key/value heads, D head size, V ids that are scored.

A `SequenceChunk` is what one row brings to a step: some tokens, where they stand, and the row's blocks. `forward`
computes all segments together, stores their keys and values, and scores the last `scored` tokens of each. How many
tokens come together changes sums only by rounding: a prompt in chunks, a batch, and a row alone give the same scores
to about 1e-5 in float32.

On the CPU up to kernels.MAX_TOKENS tokens (more, of a light model) go through compiled kernels that read every
weight once; others go through torch's matrix products. On the GPU most steps go through captured graphs (runner.py).
Same mathematics as workloads/code/model.py, which stays the reference.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lakh.errors import UserError
from lakh.server.model.cpu import kernels
from lakh.server.model.kv_cache import PagedCache
from lakh.server.model.paged_attention import PagedAttention, SequenceChunk, place_of, scored_of, slots_of
from lakh.spec.model import Model
from lakh.workloads.code.formats import hf

__all__ = ["InferenceModel", "ModelShard", "Precision", "SequenceChunk"]

Precision = Literal["f32", "bf16", "int8"]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "int8": torch.float32}
MATRICES = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True)
class ModelShard:
    """Which part of every layer this process holds, and how parts are added up (tensor_parallel.py)."""

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] = lambda part: part
    """The sum of all processes' parts; may work in place."""


class _Arrays(NamedTuple):
    """The weights as the compiled kernels see them: the same bytes, looked up once and not in every step."""

    embed: Any
    matrices: tuple[Any, ...]
    scales: tuple[Any, ...]
    norms: tuple[Any, Any]
    rope: tuple[Any, Any]
    head: tuple[Any, ...]


class InferenceModel:
    def __init__(
        self,
        spec: Model,
        weights: Mapping[str, Tensor],
        num_ids: int,
        device: torch.device,
        precision: Precision,
        shard: ModelShard = ModelShard(),  # noqa: B008 - frozen
    ) -> None:
        """`num_ids`: how many ids may be drawn; a padded embedding table has more rows than that.

        A `shard` holds a share of the heads and of the feed-forward; embedding and head are whole everywhere.
        """
        self.spec, self.num_ids, self.device, self.precision = spec, num_ids, device, precision
        self.dtype = DTYPES[precision]
        self.shard = shard
        _check(spec, device, precision, shard.size)
        self.heads, self.kv_heads, self.ffn = (n // shard.size for n in (spec.heads, spec.kv_heads, spec.ffn))
        self.cos, self.sin = _rope_tables(spec, device)
        self._allocate()
        self.load(weights)

    def _allocate(self) -> None:
        spec, precision, device = self.spec, self.precision, self.device
        queries, keys = self.heads * spec.head_dim, self.kv_heads * spec.head_dim
        shapes = {
            "qkv": (queries + 2 * keys, spec.width),
            "o": (spec.width, queries),
            "gate_up": (2 * self.ffn, spec.width),
            "down": (spec.width, self.ffn),
        }
        kind = torch.int8 if precision == "int8" else self.dtype
        self._w = {
            name: torch.empty((spec.layers, *shape), dtype=kind, device=device) for name, shape in shapes.items()
        }
        self._scales = {
            name: torch.empty((spec.layers, shape[0], shape[1] // kernels.GROUP))
            for name, shape in shapes.items()
            if precision == "int8"
        }
        self.norms = torch.empty((2 * spec.layers + 1, spec.width), dtype=self.dtype, device=device)
        # Of queries and of keys; every shard has them whole. No layers where the model has none.
        normed_layers = spec.layers if spec.qk_norm else 0
        self.head_norms = torch.empty((normed_layers, 2, spec.head_dim), dtype=self.dtype, device=device)
        self.embed = torch.empty((spec.vocab, spec.width), dtype=self.dtype, device=device)
        self.head = self.embed[: self.num_ids] if spec.tied else torch.empty_like(self.embed[: self.num_ids])
        self._head_int8: tuple[Tensor, Tensor] | None = None
        self._arrays: _Arrays | None = None
        is_light = precision == "f32" and self.weight_bytes <= kernels.LIGHT_BYTES
        self._few = kernels.MAX_TOKENS_LIGHT if is_light else kernels.MAX_TOKENS

    # --- weights ---

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Put these weights in the place of the old ones, tensor by tensor."""
        for name in hf.shapes(self.spec):
            self.load_tensor(name, weights[name])
        self.finish_loading()

    @torch.inference_mode()
    def load_tensor(self, name: str, tensor: Tensor) -> None:
        """One whole tensor by the model's own name; a shard takes its part. Once all have come, `finish`."""
        if name == "embed.weight":
            self.embed.copy_(tensor)
        elif name == "head.weight":
            self.head.copy_(tensor[: self.num_ids])
        elif name == "norm.weight":
            self.norms[-1].copy_(tensor)
        else:
            _, number, part = name.removesuffix(".weight").split(".", 2)
            if part in ("attention_norm", "ffn_norm"):
                self.norms[2 * int(number) + (part == "ffn_norm")].copy_(tensor)
            elif part in ("attention.q_norm", "attention.k_norm"):
                self.head_norms[int(number), int(part == "attention.k_norm")].copy_(tensor)
            else:
                self._put_matrix(int(number), part, tensor)

    def finish_loading(self) -> None:
        if self.precision == "int8":
            self._head_int8 = _to_int8(self.head)
            self._arrays = None

    def empty_like(self) -> InferenceModel:
        """Another network of the same shape with weights of its own, not yet filled: for `exchange`."""
        other = copy.copy(self)
        other._allocate()
        return other

    @torch.inference_mode()
    def swap_weights(self, other: InferenceModel) -> None:
        """Compute with the weights of this `shadow` from now on. Captured graphs know addresses, so on a GPU the
        numbers move (device memory to device memory); elsewhere the tensors change places.
        """
        if self.device.type == "cuda":
            for name in self._w:
                self._w[name].copy_(other._w[name])
            for name in ("norms", "head_norms", "embed", "head"):  # a tied head is copied with the embedding, again
                getattr(self, name).copy_(getattr(other, name))
            torch.cuda.synchronize(self.device)
            return
        for name in ("_w", "_scales", "norms", "head_norms", "embed", "head", "_head_int8"):
            ours, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, theirs)
            setattr(other, name, ours)
        self._arrays = other._arrays = None

    def _put_matrix(self, layer: int, part: str, tensor: Tensor) -> None:
        rank, size = self.shard.rank, self.shard.size
        queries, keys = self.heads * self.spec.head_dim, self.kv_heads * self.spec.head_dim
        name, row, by_columns = {
            "attention.q": ("qkv", 0, False),
            "attention.k": ("qkv", queries, False),
            "attention.v": ("qkv", queries + keys, False),
            "attention.o": ("o", 0, True),
            "ffn.gate": ("gate_up", 0, False),
            "ffn.up": ("gate_up", self.ffn, False),
            "ffn.down": ("down", 0, True),
        }[part]
        if size > 1:
            tensor = tensor.chunk(size, dim=1 if by_columns else 0)[rank]
        place = slice(row, row + tensor.shape[0])
        if self.precision != "int8":
            self._w[name][layer, place].copy_(tensor)
            return
        numbers, scales = _to_int8(tensor)
        self._w[name][layer, place].copy_(numbers)
        self._scales[name][layer, place].copy_(scales)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one step reads."""
        head = sum(t.nbytes for t in self._head_int8) if self._head_int8 else self.head.nbytes
        return sum(t.nbytes for t in [*self._w.values(), *self._scales.values(), self.norms, self.head_norms]) + head

    @torch.inference_mode()
    def forward(self, segments: Sequence[SequenceChunk], cache: PagedCache) -> Tensor:
        """Scores of the tokens that are to be scored, segment after segment: rows x V, float32 on the CPU."""
        num_new = sum(len(segment.tokens) for segment in segments)
        if self.device.type == "cpu" and num_new <= self._few and self.dtype == torch.float32 and self.shard.size == 1:
            return self._forward_small(segments, cache)
        return self._forward_torch(segments, cache)

    # --- a few tokens on the CPU ---

    def _forward_small(self, segments: Sequence[SequenceChunk], cache: PagedCache) -> Tensor:
        if self._arrays is None:
            self._arrays = self._as_arrays()
        at = self._arrays
        x = at.embed[[token for segment in segments for token in segment.tokens]]
        place = place_of(segments, slots_of(segments))
        rest = (at.norms, self.spec.norm_eps, place[2] - 1, at.rope, cache.arrays, self.spec.heads, place)
        scored = scored_of(segments)
        if not at.scales:
            x = kernels.run_f32(x, at.matrices, *rest)
            return torch.from_numpy(kernels.head_f32(at.head[0], x[scored]))
        x = kernels.run_int8(x, at.matrices, at.scales, *rest)
        head, head_scales = at.head
        return torch.from_numpy(kernels.head_int8(head, head_scales, x[scored]))

    def _as_arrays(self) -> _Arrays:
        head = (self.head,) if self._head_int8 is None else self._head_int8
        return _Arrays(
            embed=self.embed.numpy(),
            matrices=tuple(self._w[name].numpy() for name in MATRICES),
            scales=tuple(self._scales[name].numpy() for name in MATRICES if self._scales),
            norms=(self.norms.numpy(), self.head_norms.numpy()),
            rope=(self.cos.numpy(), self.sin.numpy()),
            head=tuple(tensor.numpy() for tensor in head),
        )

    # --- many tokens, or a GPU ---

    def _forward_torch(self, segments: Sequence[SequenceChunk], cache: PagedCache) -> Tensor:
        spec, device = self.spec, self.device
        tokens = [token for segment in segments for token in segment.tokens]
        positions = [segment.start + i for segment in segments for i in range(len(segment.tokens))]
        rows = slots_of(segments)
        new = np.concatenate([row[segment.start :] for row, segment in zip(rows, segments, strict=True)])
        new_N = torch.from_numpy(new).to(device)
        positions_N = torch.tensor(positions, device=device)
        rope = self.cos[positions_N][:, None], self.sin[positions_N][:, None]
        attention = PagedAttention(segments, rows, device)
        x_NW = self.embed[torch.tensor(tokens, device=device)]
        sizes = [self.heads * spec.head_dim, self.kv_heads * spec.head_dim, self.kv_heads * spec.head_dim]
        all_reduce = self.shard.all_reduce
        for layer in range(spec.layers):
            h_NW = F.rms_norm(x_NW, (spec.width,), self.norms[2 * layer], spec.norm_eps)
            q, k, v = self.norm_queries_and_keys(self._linear("qkv", layer, h_NW), layer).split(sizes, dim=-1)
            q_NHD = _rotate(q.unflatten(-1, (self.heads, spec.head_dim)), rope)
            k_NKD = _rotate(k.unflatten(-1, (self.kv_heads, spec.head_dim)), rope)
            keys_KCD, values_KCD = cache.keys_LKCD[layer], cache.values_LKCD[layer]
            keys_KCD[:, new_N] = k_NKD.transpose(0, 1)
            values_KCD[:, new_N] = v.unflatten(-1, (self.kv_heads, spec.head_dim)).transpose(0, 1)
            x_NW = x_NW + all_reduce(self._linear("o", layer, attention(q_NHD, keys_KCD, values_KCD).flatten(1)))
            h_NW = F.rms_norm(x_NW, (spec.width,), self.norms[2 * layer + 1], spec.norm_eps)
            gate, up = self._linear("gate_up", layer, h_NW).chunk(2, dim=-1)
            x_NW = x_NW + all_reduce(self._linear("down", layer, F.silu(gate) * up))
        scored = scored_of(segments)
        if not scored:
            return x_NW.new_empty(0, self.num_ids)
        x_NW = x_NW[torch.tensor(scored, device=device)]
        x_NW = F.rms_norm(x_NW, (spec.width,), self.norms[-1], spec.norm_eps)
        if self._head_int8 is not None and len(x_NW) <= kernels.MAX_TOKENS:
            head, scales = self._head_int8
            return torch.from_numpy(kernels.head_int8(head.numpy(), scales.numpy(), x_NW.numpy()))
        return F.linear(x_NW, self.head)

    def norm_queries_and_keys(self, qkv_NX: Tensor, layer: int) -> Tensor:
        """The norm of every query's and key's head, in place and before they are rotated, where the model has it."""
        if len(self.head_norms):
            heads = qkv_NX.unflatten(-1, (-1, self.spec.head_dim))
            for norm, here in zip(
                self.head_norms[layer], (slice(self.heads), slice(self.heads, self.heads + self.kv_heads)), strict=True
            ):
                heads[:, here] = F.rms_norm(heads[:, here], (self.spec.head_dim,), norm, self.spec.norm_eps)
        return qkv_NX

    def matrix(self, name: str, layer: int) -> Tensor:
        """One layer's matrix in the network's own type."""
        if self.precision != "int8":
            return self._w[name][layer]
        grouped = self._w[name][layer].unflatten(-1, (-1, kernels.GROUP)).float()
        return (grouped * self._scales[name][layer][:, :, None]).flatten(1)

    def _linear(self, name: str, layer: int, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix(name, layer))


def _rotate(x_NHD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rope
    left, right = x_NHD.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x_NHD.dtype)


def _rope_tables(spec: Model, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, context x D/2, in float32."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    angles = torch.arange(spec.context, dtype=torch.float32)[:, None] / spec.rope_base**exponents
    return angles.cos().to(device), angles.sin().to(device)


def _to_int8(tensor: Tensor) -> tuple[Tensor, Tensor]:
    grouped = tensor.float().unflatten(-1, (-1, kernels.GROUP))
    scales = grouped.abs().amax(dim=-1) / 127
    numbers = (grouped / scales.clamp_min(1e-30)[..., None]).round().to(torch.int8)
    return numbers.flatten(-2).contiguous(), scales.contiguous()


def _check(spec: Model, device: torch.device, precision: Precision, num_shards: int) -> None:
    """Refuse what would be computed wrongly."""
    if precision == "int8":
        group = kernels.GROUP
        if device.type != "cpu":
            raise UserError("precision int8", "is a CPU format", "use bf16 on a GPU")
        for name, size in (("width", spec.width), ("ffn", spec.ffn)):
            if size % (group * num_shards if name == "ffn" else group):
                todo = "use f32 for this model"
                raise UserError("precision int8", f"needs widths divisible by {group}, and {name} is {size}", todo)
    for name, size in (("heads", spec.heads), ("kv_heads", spec.kv_heads), ("ffn", spec.ffn)):
        if size % num_shards:
            todo = f"choose a number that divides {size}"
            raise UserError(f"--tensor {num_shards}", f"does not divide the model's {name} ({size})", todo)
