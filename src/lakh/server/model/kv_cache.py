"""Keys and values of all tokens that are remembered, in two tensors that are allocated once.

Shapes: L layers, K key/value heads, C slots (blocks x tokens of a block), D head size, S tokens of a row.

Slot = block * BLOCK_TOKENS + place in the block; the tokens of one head and one block lie together. Which block
belongs to whom is blocks.py's; here are only the bytes. Costs 2 * L * K * C * D numbers for the life of the engine;
on Linux the operating system backs them with memory when they are first written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lakh.server.model.block_pool import BLOCK_TOKENS
from lakh.spec.model import Model

__all__ = ["PagedCache", "slot_mapping"]

_IN_BLOCK = np.arange(BLOCK_TOKENS)


class PagedCache:
    def __init__(
        self, spec: Model, num_blocks: int, *, device: torch.device, dtype: torch.dtype, kv_heads: int | None = None
    ) -> None:
        """`kv_heads`: those that this process holds; all of them if not given."""
        shape = (spec.layers, kv_heads or spec.kv_heads, num_blocks * BLOCK_TOKENS, spec.head_dim)
        # Zeros, not empty: a masked slot is multiplied by 0, and 0 times a stray NaN is NaN.
        self.keys_LKCD = torch.zeros(shape, device=device, dtype=dtype)
        self.values_LKCD = torch.zeros(shape, device=device, dtype=dtype)
        is_for_kernels = device.type == "cpu" and dtype == torch.float32
        self.arrays = (self.keys_LKCD.numpy(), self.values_LKCD.numpy()) if is_for_kernels else None
        """The same bytes for kernels_cpu.py."""

    @property
    def num_blocks(self) -> int:
        return self.keys_LKCD.shape[2] // BLOCK_TOKENS

    @property
    def size_bytes(self) -> int:
        return self.keys_LKCD.nbytes + self.values_LKCD.nbytes

    def copy_block(self, source: int, target: int) -> None:
        """All of a block: what lies beyond its common tokens is overwritten before it is seen."""
        take, put = source * BLOCK_TOKENS, target * BLOCK_TOKENS
        for tensor in (self.keys_LKCD, self.values_LKCD):
            tensor[:, :, put : put + BLOCK_TOKENS] = tensor[:, :, take : take + BLOCK_TOKENS]


def slot_mapping(blocks: Sequence[int], num_tokens: int) -> Any:
    """Where the first `num_tokens` tokens of a row lie: an array of places."""
    starts = np.array(blocks[: -(-num_tokens // BLOCK_TOKENS)], np.int64) * BLOCK_TOKENS
    return (starts[:, None] + _IN_BLOCK).reshape(-1)[:num_tokens]
