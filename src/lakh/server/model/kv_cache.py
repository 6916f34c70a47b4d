"""The paged KV cache: keys and values in two tensors that are allocated once; block_pool.py assigns the blocks.

Shapes: L layers, K key/value heads, C slots (blocks x tokens of a block), D head size.

Slot = block * BLOCK_TOKENS + offset in the block; the tokens of one head and one block are contiguous. Costs
2 * L * K * C * D numbers for the life of the engine; Linux backs them with memory on first write.
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
        """`kv_heads`: those of this process; default all."""
        shape = (spec.layers, kv_heads or spec.kv_heads, num_blocks * BLOCK_TOKENS, spec.head_dim)
        # Zeros, not empty: a masked slot is multiplied by 0, and 0 times NaN is NaN.
        self.keys_LKCD = torch.zeros(shape, device=device, dtype=dtype)
        self.values_LKCD = torch.zeros(shape, device=device, dtype=dtype)
        has_kernels = device.type == "cpu" and dtype == torch.float32
        self.arrays = (self.keys_LKCD.numpy(), self.values_LKCD.numpy()) if has_kernels else None
        """The same memory for cpu/kernels.py."""

    @property
    def num_blocks(self) -> int:
        return self.keys_LKCD.shape[2] // BLOCK_TOKENS

    def copy_block(self, source: int, target: int) -> None:
        """Copy a whole block; tokens beyond the common prefix are overwritten before they are read."""
        take, put = source * BLOCK_TOKENS, target * BLOCK_TOKENS
        for tensor in (self.keys_LKCD, self.values_LKCD):
            tensor[:, :, put : put + BLOCK_TOKENS] = tensor[:, :, take : take + BLOCK_TOKENS]


def slot_mapping(blocks: Sequence[int], num_tokens: int) -> Any:
    """The slots of the first `num_tokens` tokens of a sequence."""
    starts = np.array(blocks[: -(-num_tokens // BLOCK_TOKENS)], np.int64) * BLOCK_TOKENS
    return (starts[:, None] + _IN_BLOCK).reshape(-1)[:num_tokens]
