"""Attention of a ragged batch over keys and values in blocks, by torch and, for short rows on the CPU, by a kernel.

Shapes: N new tokens of all rows, H query heads, K key/value heads, C slots, D head size.

`PagedAttention` is made once for a step and called for every layer.
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

__all__ = ["PagedAttention", "SequenceChunk", "place_of", "scored_of", "slots_of"]

# Not cuDNN: it plans anew for every length, which costs 58 ms a prompt on an H200 (torch 2.11).
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
SHORT = 4  # new tokens of a row up to which its attention goes through the kernel that gathers nothing


@dataclass(frozen=True)
class SequenceChunk:
    tokens: Sequence[int]
    start: int
    """Tokens of this row that are in the cache already."""
    blocks: Sequence[int]
    scored: int = 1
    """The last so many of `tokens` are scored; 0 in the middle of a prompt."""


class PagedAttention:
    """PagedAttention of all segments over their own keys, for every layer of one step."""

    def __init__(self, segments: Sequence[SequenceChunk], rows: Sequence[Any], device: torch.device) -> None:
        """`rows`: the slots of each (slots_of)."""
        counts = [len(segment.tokens) for segment in segments]
        ends = np.cumsum(counts)
        self._short: list[int] = []  # flat places of tokens in short segments
        self._long: list[tuple[slice, Tensor, Any]] = []
        short_segments, short_rows = [], []
        for segment, row, count, end in zip(segments, rows, counts, ends, strict=True):
            here = slice(int(end) - count, int(end))
            if device.type == "cpu" and count <= SHORT:
                self._short += range(here.start, here.stop)
                short_segments.append(segment)
                short_rows.append(row)
                continue
            seen = _seen(segment.start, count, device) if segment.start and count > 1 else None
            self._long.append((here, torch.from_numpy(row).to(device), seen))
        self._place = place_of(short_segments, short_rows) if short_segments else None

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
            if q_NHD.dtype != torch.float32:
                return self._short_in_float32(q_NHD, keys_KCD, values_KCD, out_NHD)
            q = q_NHD[self._short].contiguous()
            result = np.empty(q.shape, np.float32)
            scores = np.empty(int(self._place[2].max()), np.float32)
            kernels.attend(q.numpy(), keys_KCD.numpy(), values_KCD.numpy(), *self._place, result, scores)
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


def slots_of(segments: Sequence[SequenceChunk]) -> list[Any]:
    """Where the tokens of each row lie, the new ones included."""
    return [slot_mapping(segment.blocks, segment.start + len(segment.tokens)) for segment in segments]


def place_of(segments: Sequence[SequenceChunk], rows: Sequence[Any]) -> tuple[Any, Any, Any]:
    """For every new token: where its row's slots begin in one long list, and how many of them it sees."""
    starts: list[int] = []
    lengths: list[int] = []
    first = 0
    for segment in segments:
        end = segment.start + len(segment.tokens)
        starts += [first] * len(segment.tokens)
        lengths += range(segment.start + 1, end + 1)
        first += end
    return np.concatenate(rows), np.array(starts, np.int64), np.array(lengths, np.int64)


def scored_of(segments: Sequence[SequenceChunk]) -> list[int]:
    """Flat places of the tokens that are scored."""
    places: list[int] = []
    end = 0
    for segment in segments:
        end += len(segment.tokens)
        places += range(end - segment.scored, end)
    return places
