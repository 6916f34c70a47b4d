"""Attention of a ragged batch over the paged KV cache, in torch; a compiled kernel for short float32 chunks on the CPU.

Shapes: N new tokens of all sequences, H query heads, K key/value heads, C slots, D head size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from lakh.server.model.cpu import kernels
from lakh.server.model.kv_cache import slot_mapping

__all__ = ["PagedAttention", "SequenceChunk", "flat_slots", "scored_positions", "slots_of"]

# Not cuDNN: it compiles a plan for every length, 58 ms a prompt on an H200 (torch 2.11).
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
SHORT = 4  # up to this number of new tokens, a chunk uses the CPU kernel, which does not gather keys and values


@dataclass(frozen=True)
class SequenceChunk:
    """The new tokens of one sequence in a step: a prompt, a part of it, or one token of a decode step."""

    tokens: Sequence[int]
    start: int
    """Tokens of the sequence that are already in the cache."""
    blocks: Sequence[int]
    """The cache blocks of the sequence, with room for the new tokens."""
    scored: int = 1
    """How many of the last `tokens` get logits; 0 in the middle of a prompt."""


class PagedAttention:
    """Attention of all chunks over their own keys. Made once for a step and called for every layer."""

    def __init__(
        self, chunks: Sequence[SequenceChunk], slots: Sequence[Any], device: torch.device, dtype: torch.dtype
    ) -> None:
        """`slots`: those of each sequence (slots_of)."""
        has_kernel = device.type == "cpu" and dtype == torch.float32
        counts = [len(chunk.tokens) for chunk in chunks]
        ends = np.cumsum(counts)
        self._short: list[int] = []  # flat positions of tokens in short chunks
        self._long: list[tuple[slice, Tensor, Any]] = []
        short_chunks, short_slots = [], []
        for chunk, own, count, end in zip(chunks, slots, counts, ends, strict=True):
            here = slice(int(end) - count, int(end))
            if has_kernel and count <= SHORT:
                self._short += range(here.start, here.stop)
                short_chunks.append(chunk)
                short_slots.append(own)
                continue
            mask = _causal_mask(chunk.start, count, device) if chunk.start and count > 1 else None
            self._long.append((here, torch.from_numpy(own).to(device), mask))
        self._place = flat_slots(short_chunks, short_slots) if short_chunks else None

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
            with sdpa_kernel(KERNELS) if q.is_cuda else contextlib.nullcontext():
                y = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
                )
            out_NHD[here] = y[0].transpose(0, 1)
        if self._place is not None:
            q = q_NHD[self._short].contiguous()
            result = np.empty(q.shape, np.float32)
            scores = np.empty(int(self._place[2].max()), np.float32)
            kernels.attend(q.numpy(), keys_KCD.numpy(), values_KCD.numpy(), *self._place, result, scores)
            out_NHD[self._short] = torch.from_numpy(result)
        return out_NHD


def _causal_mask(start: int, count: int, device: torch.device) -> Any:
    """The keys that queries start .. start + count - 1 attend to; on a GPU in a form that flash attention takes."""
    if device.type == "cuda":
        return causal_lower_right(count, start + count)
    queries = torch.arange(start, start + count, device=device)
    return torch.arange(start + count, device=device) <= queries[:, None]


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
