"""The network as the engine runs it: fused weights, a ragged batch of new tokens, keys and values in blocks.

Shapes: N new tokens of all rows, T new tokens of one row, S tokens of one row so far, L layers, W width, F ffn, H
query heads, K key/value heads, D head size, V ids that are scored.

A `Segment` is what one row brings to a step: some tokens, where they stand, and the row's blocks. `forward` computes
all segments together, stores their keys and values, and scores the last `scored` tokens of each. How many tokens come
together changes sums only by rounding: a prompt in chunks, a batch, and a row alone give the same scores to about 1e-5
in float32.

On the CPU up to kernels_cpu.MAX_TOKENS tokens go through compiled kernels that read every weight once; more go through
torch's matrix products. On the GPU one token per row goes through captured graphs (decode_gpu.py). Same mathematics as
workloads/code/model.py, which stays the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from lakh.errors import UserError
from lakh.server import kernels_cpu
from lakh.server.kv import PagedCache, slots_of
from lakh.spec.model import Model

__all__ = ["Network", "Precision", "Segment"]

Precision = Literal["f32", "bf16", "int8"]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "int8": torch.float32}
MATRICES = ("qkv", "o", "gate_up", "down")
SHORT = 4  # new tokens of a row up to which its attention goes through the kernel that gathers nothing


@dataclass(frozen=True)
class Segment:
    tokens: Sequence[int]
    start: int
    """Tokens of this row that are in the cache already."""
    blocks: Sequence[int]
    scored: int = 1
    """The last so many of `tokens` are scored; 0 in the middle of a prompt."""


class Network:
    def __init__(
        self, spec: Model, weights: Mapping[str, Tensor], num_ids: int, device: torch.device, precision: Precision
    ) -> None:
        """`num_ids`: how many ids may be drawn; a padded embedding table has more rows than that."""
        self.spec, self.num_ids, self.device, self.precision = spec, num_ids, device, precision
        self.dtype = DTYPES[precision]
        if precision == "int8":
            _check_int8(spec, device)
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        shapes = {
            "qkv": (queries + 2 * keys, spec.width),
            "o": (spec.width, queries),
            "gate_up": (2 * spec.ffn, spec.width),
            "down": (spec.width, spec.ffn),
        }
        kind = torch.int8 if precision == "int8" else self.dtype
        self._w = {
            name: torch.empty((spec.layers, *shape), dtype=kind, device=device) for name, shape in shapes.items()
        }
        self._scales = {
            name: torch.empty((spec.layers, shape[0], shape[1] // kernels_cpu.GROUP))
            for name, shape in shapes.items()
            if precision == "int8"
        }
        self.norms = torch.empty((2 * spec.layers + 1, spec.width), dtype=self.dtype, device=device)
        self.embed = torch.empty((spec.vocab, spec.width), dtype=self.dtype, device=device)
        self.head = self.embed[:num_ids] if spec.tied else torch.empty_like(self.embed[:num_ids])
        self._head_int8: tuple[Tensor, Tensor] | None = None
        self.cos, self.sin = _rope_tables(spec, device)
        self.load(weights)

    @torch.inference_mode()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Put these weights in the place of the old ones, tensor by tensor."""
        for layer in range(self.spec.layers):
            block = f"blocks.{layer}."
            parts = {
                "qkv": [weights[f"{block}attention.{name}.weight"] for name in "qkv"],
                "o": [weights[f"{block}attention.o.weight"]],
                "gate_up": [weights[f"{block}ffn.{name}.weight"] for name in ("gate", "up")],
                "down": [weights[f"{block}ffn.down.weight"]],
            }
            for name, tensors in parts.items():
                row = 0
                for tensor in tensors:
                    self._put(name, layer, row, tensor)
                    row += tensor.shape[0]
            self.norms[2 * layer].copy_(weights[f"{block}attention_norm.weight"])
            self.norms[2 * layer + 1].copy_(weights[f"{block}ffn_norm.weight"])
        self.norms[-1].copy_(weights["norm.weight"])
        self.embed.copy_(weights["embed.weight"])
        if not self.spec.tied:
            self.head.copy_(weights["head.weight"][: self.num_ids])
        if self.precision == "int8":
            self._head_int8 = _to_int8(self.head)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one step reads."""
        head = sum(t.nbytes for t in self._head_int8) if self._head_int8 else self.head.nbytes
        return sum(t.nbytes for t in [*self._w.values(), *self._scales.values(), self.norms]) + head

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], cache: PagedCache) -> Tensor:
        """Scores of the tokens that are to be scored, segment after segment: rows x V, float32 on the CPU."""
        num_new = sum(len(segment.tokens) for segment in segments)
        small = self.device.type == "cpu" and num_new <= kernels_cpu.MAX_TOKENS and self.dtype == torch.float32
        return self._forward_small(segments, cache) if small else self._forward_torch(segments, cache)

    # --- a few tokens on the CPU ---

    def _forward_small(self, segments: Sequence[Segment], cache: PagedCache) -> Tensor:
        tokens = [token for segment in segments for token in segment.tokens]
        x = self.embed[torch.tensor(tokens)].numpy()
        place = _place(segments)
        kv = cache.keys_LKCD.numpy(), cache.values_LKCD.numpy()
        rope = self.cos.numpy(), self.sin.numpy()
        w = tuple(self._w[name].numpy() for name in MATRICES)
        rest = (self.norms.numpy(), self.spec.norm_eps, place[2] - 1, rope, kv, self.spec.heads, place)
        scored = np.array(_scored(segments), np.int64)
        if self._head_int8 is None:
            x = kernels_cpu.run_f32(x, w, *rest)
            return torch.from_numpy(kernels_cpu.head_f32(self.head.numpy(), x[scored]))
        x = kernels_cpu.run_int8(x, w, tuple(self._scales[name].numpy() for name in MATRICES), *rest)
        head, scales = self._head_int8
        return torch.from_numpy(kernels_cpu.head_int8(head.numpy(), scales.numpy(), x[scored]))

    # --- many tokens, or a GPU ---

    def _forward_torch(self, segments: Sequence[Segment], cache: PagedCache) -> Tensor:
        spec, device = self.spec, self.device
        tokens = [token for segment in segments for token in segment.tokens]
        positions = [segment.start + i for segment in segments for i in range(len(segment.tokens))]
        rows = [slots_of(segment.blocks, segment.start + len(segment.tokens)) for segment in segments]
        new_N = torch.cat([row[segment.start :] for row, segment in zip(rows, segments, strict=True)]).to(device)
        positions_N = torch.tensor(positions, device=device)
        rope = self.cos[positions_N][:, None], self.sin[positions_N][:, None]
        attention = _Attention(segments, rows, device)
        x_NW = self.embed[torch.tensor(tokens, device=device)]
        sizes = [spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim]
        for layer in range(spec.layers):
            h_NW = F.rms_norm(x_NW, (spec.width,), self.norms[2 * layer], spec.norm_eps)
            q, k, v = self._linear("qkv", layer, h_NW).split(sizes, dim=-1)
            q_NHD = _rotate(q.unflatten(-1, (spec.heads, spec.head_dim)), rope)
            k_NKD = _rotate(k.unflatten(-1, (spec.kv_heads, spec.head_dim)), rope)
            keys_KCD, values_KCD = cache.keys_LKCD[layer], cache.values_LKCD[layer]
            keys_KCD[:, new_N] = k_NKD.transpose(0, 1)
            values_KCD[:, new_N] = v.unflatten(-1, (spec.kv_heads, spec.head_dim)).transpose(0, 1)
            x_NW = x_NW + self._linear("o", layer, attention(q_NHD, keys_KCD, values_KCD).flatten(1))
            h_NW = F.rms_norm(x_NW, (spec.width,), self.norms[2 * layer + 1], spec.norm_eps)
            gate, up = self._linear("gate_up", layer, h_NW).chunk(2, dim=-1)
            x_NW = x_NW + self._linear("down", layer, F.silu(gate) * up)
        scored = _scored(segments)
        if not scored:
            return x_NW.new_empty(0, self.num_ids)
        x_NW = x_NW[torch.tensor(scored, device=device)]
        x_NW = F.rms_norm(x_NW, (spec.width,), self.norms[-1], spec.norm_eps)
        if self._head_int8 is not None and len(x_NW) <= kernels_cpu.MAX_TOKENS:
            head, scales = self._head_int8
            return torch.from_numpy(kernels_cpu.head_int8(head.numpy(), scales.numpy(), x_NW.numpy()))
        return F.linear(x_NW, self.head)

    def matrix(self, name: str, layer: int) -> Tensor:
        """One layer's matrix in the network's own type."""
        if self.precision != "int8":
            return self._w[name][layer]
        grouped = self._w[name][layer].unflatten(-1, (-1, kernels_cpu.GROUP)).float()
        return (grouped * self._scales[name][layer][:, :, None]).flatten(1)

    def _linear(self, name: str, layer: int, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix(name, layer))

    def _put(self, name: str, layer: int, row: int, tensor: Tensor) -> None:
        place = slice(row, row + tensor.shape[0])
        if self.precision != "int8":
            self._w[name][layer, place].copy_(tensor)
            return
        numbers, scales = _to_int8(tensor)
        self._w[name][layer, place].copy_(numbers)
        self._scales[name][layer, place].copy_(scales)


class _Attention:
    """Attention of all segments over their own keys, for every layer of one step."""

    def __init__(self, segments: Sequence[Segment], rows: Sequence[Tensor], device: torch.device) -> None:
        counts = [len(segment.tokens) for segment in segments]
        ends = np.cumsum(counts)
        self._short: list[int] = []  # flat places of tokens in short segments
        self._long: list[tuple[slice, Tensor, Any]] = []
        short_segments = []
        for segment, row, count, end in zip(segments, rows, counts, ends, strict=True):
            here = slice(int(end) - count, int(end))
            if device.type == "cpu" and count <= SHORT:
                self._short += range(here.start, here.stop)
                short_segments.append(segment)
                continue
            seen = _seen(segment.start, count, device) if segment.start and count > 1 else None
            self._long.append((here, row.to(device), seen))
        self._place = _place(short_segments) if short_segments else None

    def __call__(self, q_NHD: Tensor, keys_KCD: Tensor, values_KCD: Tensor) -> Tensor:
        out_NHD = torch.empty_like(q_NHD)
        gqa = q_NHD.shape[1] != keys_KCD.shape[0]
        for here, slots, mask in self._long:
            k, v = keys_KCD[:, slots][None], values_KCD[:, slots][None]
            q = q_NHD[here].transpose(0, 1)[None]
            if mask is not None and gqa and q.is_cuda:  # the fast kernels take a mask or shared heads, not both
                share = q.shape[1] // k.shape[1]
                k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
            causal = mask is None and q.shape[2] > 1
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
            )
            out_NHD[here] = y[0].transpose(0, 1)
        if self._place is not None:
            if q_NHD.dtype != torch.float32:
                return self._short_in_float32(q_NHD, keys_KCD, values_KCD, out_NHD)
            q = q_NHD[self._short].contiguous()
            result = np.empty(q.shape, np.float32)
            scores = np.empty(int(self._place[2].max()), np.float32)
            kernels_cpu.attend(q.numpy(), keys_KCD.numpy(), values_KCD.numpy(), *self._place, result, scores)
            out_NHD[self._short] = torch.from_numpy(result)
        return out_NHD

    def _short_in_float32(self, q_NHD: Tensor, keys_KCD: Tensor, values_KCD: Tensor, out_NHD: Tensor) -> Tensor:
        """The same for bfloat16 on the CPU, token by token."""
        assert self._place is not None
        slots, starts, lengths = (torch.from_numpy(part) for part in self._place)
        for n, place in enumerate(self._short):
            row = slots[starts[n] : starts[n] + lengths[n]]
            k, v, q = keys_KCD[:, row][None], values_KCD[:, row][None], q_NHD[place][None, :, None]
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
            out_NHD[place] = y[0, :, 0]
        return out_NHD


def _seen(start: int, count: int, device: torch.device) -> Any:
    """Which keys the queries at start .. start + count - 1 see: on a GPU in the form that flash attention knows."""
    if device.type == "cuda":
        return causal_lower_right(count, start + count)
    queries = torch.arange(start, start + count, device=device)
    return torch.arange(start + count, device=device) <= queries[:, None]


def _place(segments: Sequence[Segment]) -> tuple[Any, Any, Any]:
    """For every new token: where its row's slots begin in one long list, and how many of them it sees."""
    slots: list[Any] = []
    starts: list[int] = []
    lengths: list[int] = []
    first = 0
    for segment in segments:
        end = segment.start + len(segment.tokens)
        slots.append(slots_of(segment.blocks, end).numpy())
        starts += [first] * len(segment.tokens)
        lengths += range(segment.start + 1, end + 1)
        first += end
    return np.concatenate(slots), np.array(starts, np.int64), np.array(lengths, np.int64)


def _scored(segments: Sequence[Segment]) -> list[int]:
    """Flat places of the tokens that are scored."""
    places: list[int] = []
    end = 0
    for segment in segments:
        end += len(segment.tokens)
        places += range(end - segment.scored, end)
    return places


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
    grouped = tensor.float().unflatten(-1, (-1, kernels_cpu.GROUP))
    scales = grouped.abs().amax(dim=-1) / 127
    numbers = (grouped / scales.clamp_min(1e-30)[..., None]).round().to(torch.int8)
    return numbers.flatten(-2).contiguous(), scales.contiguous()


def _check_int8(spec: Model, device: torch.device) -> None:
    group = kernels_cpu.GROUP
    if device.type != "cpu":
        raise UserError("precision int8", "is a CPU format", "use bf16 on a GPU")
    for name, size in (("width", spec.width), ("ffn", spec.ffn)):
        if size % group:
            todo = "use f32 for this model"
            raise UserError("precision int8", f"needs widths divisible by {group}, and {name} is {size}", todo)
