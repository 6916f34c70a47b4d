"""Attention of a ragged batch over the paged KV cache: in the native library on a CPU, otherwise in torch.

Shapes: N new tokens of all sequences, H query heads, K key/value heads, C slots, D head size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lakh.server.model.adapters import ServedAdapter
from lakh.server.model.cpu import decoder
from lakh.server.model.kv_cache import CachedTensor, slot_mapping
from lakh.workloads.code.attention import AttentionVariant, attend_masked

__all__ = [
    "NativeAttention",
    "PagedAttention",
    "PagedStep",
    "SequenceChunk",
    "flat_slots",
    "scored_positions",
    "slots_of",
]

# Not cuDNN: it compiles a plan for every length, 58 ms a prompt on an H200 (torch 2.11).
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class SequenceChunk(NamedTuple):
    """The new tokens of one sequence in a step: a prompt, a part of it, or one token of a decode step."""

    tokens: Sequence[int]
    start: int
    """Tokens of the sequence that are already in the cache."""
    blocks: Sequence[int]
    """The cache blocks of the sequence, with room for the new tokens."""
    scored: int = 1
    """How many of the last `tokens` get logits; 0 in the middle of a prompt."""
    adapter: ServedAdapter | None = None


class PagedStep:
    """The attention of one step; layers with the same variant share what it prepares."""

    def __init__(
        self,
        chunks: Sequence[SequenceChunk],
        slots: Sequence[Any],
        device: torch.device,
        *,
        is_native: bool = False,
    ) -> None:
        """`slots`: those of each sequence (slots_of). `is_native`: the native library has the attention of all chunks,
        so that a token does not depend on those beside it: torch sums one query in another order than several."""
        self._chunks, self._slots, self._device = chunks, slots, device
        self._is_native = is_native
        self._made: dict[AttentionVariant | None, PagedAttention | NativeAttention] = {}

    def attention(self, variant: AttentionVariant | None) -> PagedAttention | NativeAttention:
        if variant not in self._made:
            own = variant or AttentionVariant()
            if self._is_native:
                self._made[variant] = NativeAttention(self._chunks, self._slots, own)
            else:
                self._made[variant] = PagedAttention(self._chunks, self._slots, self._device, own)
        return self._made[variant]


class NativeAttention:
    """Attention of all chunks over their own keys, in every layer of one variant, in the native library."""

    def __init__(self, chunks: Sequence[SequenceChunk], slots: Sequence[Any], variant: AttentionVariant) -> None:
        self._variant = variant
        self._place = flat_slots(chunks, slots)

    def __call__(
        self, q_NHD: Tensor, keys: CachedTensor, values: CachedTensor, sinks_H: Tensor | None = None
    ) -> Tensor:
        arrays = [part for pair in zip(keys.arrays(), values.arrays(), strict=True) for part in pair]
        kv_heads, capacity = keys.numbers_KCD.shape[:2]
        structure = decoder.cache_structure(arrays, capacity)
        return decoder.attend(q_NHD, structure, kv_heads, self._place, self._variant, sinks_H)


class PagedAttention:
    """The same in torch."""

    def __init__(
        self, chunks: Sequence[SequenceChunk], slots: Sequence[Any], device: torch.device, variant: AttentionVariant
    ) -> None:
        self._variant = variant
        counts = [len(chunk.tokens) for chunk in chunks]
        ends = np.cumsum(counts)
        self._parts: list[tuple[slice, Tensor, Any]] = []
        for chunk, own, count, last in zip(chunks, slots, counts, ends, strict=True):
            here = slice(int(last) - count, int(last))
            end = chunk.start + count
            window = min(variant.window or end, end)
            first = max(chunk.start + 1 - window, 0)  # the first key that any query needs
            mask: Any = None
            if variant.is_chunked and window < end:
                first = chunk.start // window * window
                mask = _chunk_mask(chunk.start, count, first, window, device) if count > 1 else None
            elif count > 1 and (window < end or variant.needs_scores):
                mask = _window_mask(chunk.start, count, first, window, device)
            elif count > 1 and chunk.start:
                mask = _causal_mask(chunk.start, count, device)
            self._parts.append((here, torch.from_numpy(own[first:]).to(device), mask))

    def __call__(
        self, q_NHD: Tensor, keys: CachedTensor, values: CachedTensor, sinks_H: Tensor | None = None
    ) -> Tensor:
        out_NHD = torch.empty_like(q_NHD)
        gqa = q_NHD.shape[1] != keys.numbers_KCD.shape[0]
        for here, slots, mask in self._parts:
            k, v = (part.read(slots, q_NHD.dtype)[None] for part in (keys, values))
            q = q_NHD[here].transpose(0, 1)[None]
            if mask is not None and gqa and q.is_cuda:  # the fast kernels take a mask or shared heads, not both
                share = q.shape[1] // k.shape[1]
                k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
            causal = mask is None and q.shape[2] > 1
            if self._variant.needs_scores:
                y = attend_masked(q, k, v, mask, self._variant, sinks_H)
            else:
                with sdpa_kernel(KERNELS) if q.is_cuda else contextlib.nullcontext():
                    y = F.scaled_dot_product_attention(
                        q, k, v, attn_mask=mask, is_causal=causal, scale=self._variant.scale,
                        enable_gqa=q.shape[1] != k.shape[1],
                    )  # fmt: skip
            out_NHD[here] = y[0].transpose(0, 1)
        return out_NHD


def _causal_mask(start: int, count: int, device: torch.device) -> Any:
    """The keys that queries start .. start + count - 1 attend to; on a GPU in a form that flash attention takes."""
    if device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right  # imports torch.compile's front end

        return causal_lower_right(count, start + count)
    queries = torch.arange(start, start + count, device=device)
    return torch.arange(start + count, device=device) <= queries[:, None]


def _window_mask(start: int, count: int, first: int, window: int, device: torch.device) -> Tensor:
    """The keys from number `first` on that these queries attend to."""
    queries = torch.arange(start, start + count, device=device)[:, None]
    keys = torch.arange(first, start + count, device=device)
    return (keys <= queries) & (keys > queries - window)


def _chunk_mask(start: int, count: int, first: int, size: int, device: torch.device) -> Tensor:
    """Of queries from `start` and keys from `first` on, a multiple of `size`: the keys of a query's chunk."""
    queries = torch.arange(start, start + count, device=device)[:, None]
    keys = torch.arange(first, start + count, device=device)
    return (keys <= queries) & (keys // size == queries // size)


def slots_of(chunks: Sequence[SequenceChunk]) -> list[Any]:
    """The cache slots of each sequence's tokens, including the new ones."""
    return [slot_mapping(chunk.blocks, chunk.start + len(chunk.tokens)) for chunk in chunks]


def flat_slots(chunks: Sequence[SequenceChunk], slots: Sequence[Any]) -> tuple[Any, Any, Any]:
    """All slots in one array; for every new token, where its sequence starts there and how many it attends to."""
    starts: list[int] = []
    lengths: list[int] = []
    first = 0
    for chunk in chunks:
        end = chunk.start + len(chunk.tokens)
        starts += [first] * len(chunk.tokens)
        lengths += range(chunk.start + 1, end + 1)
        first += end
    return np.concatenate(slots), np.array(starts, np.int64), np.array(lengths, np.int64)


def scored_positions(chunks: Sequence[SequenceChunk]) -> list[int]:
    """Flat positions of the scored tokens."""
    positions: list[int] = []
    end = 0
    for chunk in chunks:
        end += len(chunk.tokens)
        positions += range(end - chunk.scored, end)
    return positions
