"""The paged KV cache: keys and values in two tensors that are allocated once; block_pool.py assigns the blocks.

Shapes: L layers, K key/value heads, C slots (blocks x tokens of a block), D head size.

Slot = block * BLOCK_TOKENS + offset in the block; the tokens of one head and one block are contiguous. Costs
2 * L * K * C * D numbers for the life of the engine; Linux backs them with memory on first write.

The numbers can be int8, with one float32 scale for each token, head and layer of keys and of values: a head of 64 takes
68 bytes where float32 takes 256 and bfloat16 takes 128. CPUs and GPUs have the same format.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from lakh.server.model.block_pool import BLOCK_TOKENS
from lakh.server.model.cpu.decoder import cache_structure
from lakh.spec.model import Model

__all__ = ["SCALE_BYTES", "CachedTensor", "PagedCache", "slot_mapping"]

LARGEST = 127  # of int8
TINY = 1e-30
SCALE_BYTES = 4
LINE_BYTES = 64  # of a CPU cache
_IN_BLOCK = np.arange(BLOCK_TOKENS)


class CachedTensor(NamedTuple):
    """The keys or the values of one layer."""

    numbers_KCD: torch.Tensor
    scales_KC: torch.Tensor | None
    """Of int8 numbers."""

    def write(self, slots_N: torch.Tensor, x_KND: torch.Tensor) -> None:
        if self.scales_KC is None:
            self.numbers_KCD[:, slots_N] = x_KND
            return
        x_KND = x_KND.float()  # a scale of 8 bits would round the largest number to 128, which int8 lacks
        scales_KN = x_KND.abs().amax(dim=-1) / LARGEST
        self.scales_KC[:, slots_N] = scales_KN
        self.numbers_KCD[:, slots_N] = (x_KND / scales_KN.clamp_min(TINY)[..., None]).round().to(torch.int8)

    def read(self, slots_N: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """K N D; int8 numbers in `dtype`, others as they are."""
        found_KND = self.numbers_KCD[:, slots_N]
        if self.scales_KC is None:
            return found_KND
        return (found_KND.float() * self.scales_KC[:, slots_N, None]).to(dtype)

    def arrays(self) -> tuple[Any, ...]:
        """The same memory for native code: numbers, and scales of int8 numbers."""
        numbers = self.numbers_KCD.numpy()
        return (numbers,) if self.scales_KC is None else (numbers, self.scales_KC.numpy())


class PagedCache:
    def __init__(
        self, spec: Model, num_blocks: int, *, device: torch.device, dtype: torch.dtype, kv_heads: int | None = None
    ) -> None:
        """`kv_heads`: those of this process; default all. `dtype`: that of activations, or int8."""
        shape = (spec.layers, kv_heads or spec.cache_heads, num_blocks * BLOCK_TOKENS, spec.cache_head_dim)
        # Zeros, not empty: a masked slot is multiplied by 0, and 0 times NaN is NaN.
        self.keys_LKCD = _zeros(shape, device, dtype)
        # Latent attention has the same latents for keys and values.
        self.values_LKCD = self.keys_LKCD if spec.is_latent else _zeros(shape, device, dtype)
        self.key_scales_LKC: torch.Tensor | None = None
        self.value_scales_LKC: torch.Tensor | None = None
        if dtype == torch.int8:
            self.key_scales_LKC = _zeros(shape[:3], device, torch.float32)
            self.value_scales_LKC = _zeros(shape[:3], device, torch.float32)
        has_kernels = device.type == "cpu" and dtype in (torch.float32, torch.int8)
        self.arrays = tuple(tensor.numpy() for tensor in self._tensors()) if has_kernels else None
        """The same memory for native code: keys and values, and the scales of int8 numbers."""

    @functools.cached_property
    def structure(self) -> Any:
        """The same memory for cpu/decoder.py."""
        assert self.arrays is not None
        return cache_structure(self.arrays, self.keys_LKCD.shape[2])

    def keys(self, layer: int) -> CachedTensor:
        return CachedTensor(self.keys_LKCD[layer], None if self.key_scales_LKC is None else self.key_scales_LKC[layer])

    def values(self, layer: int) -> CachedTensor:
        scales = None if self.value_scales_LKC is None else self.value_scales_LKC[layer]
        return CachedTensor(self.values_LKCD[layer], scales)

    def kernel_tensors(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Keys, values and their scales of one layer, for the kernels of gpu/. Without scales, keys and values stand in
        their places."""
        keys, values = self.keys(layer), self.values(layer)
        numbers = keys.numbers_KCD, values.numbers_KCD
        if keys.scales_KC is None or values.scales_KC is None:
            return *numbers, *numbers
        return *numbers, keys.scales_KC, values.scales_KC

    def _tensors(self) -> list[torch.Tensor]:
        scales = [one for one in (self.key_scales_LKC, self.value_scales_LKC) if one is not None]
        return [self.keys_LKCD, self.values_LKCD, *scales]

    @property
    def num_blocks(self) -> int:
        return self.keys_LKCD.shape[2] // BLOCK_TOKENS

    def copy_block(self, source: int, target: int) -> None:
        """Copy a whole block; tokens beyond the common prefix are overwritten before they are read."""
        take, put = source * BLOCK_TOKENS, target * BLOCK_TOKENS
        for tensor in self._tensors():
            tensor[:, :, put : put + BLOCK_TOKENS] = tensor[:, :, take : take + BLOCK_TOKENS]


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """On a CPU, memory that the operating system provides when a slot is first written: torch.zeros would write all."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + LINE_BYTES, np.uint8)
    first = -memory.ctypes.data % LINE_BYTES  # a vector that crosses two cache lines takes two loads
    return torch.from_numpy(memory[first : first + num_bytes]).view(dtype).view(shape)


def slot_mapping(blocks: Sequence[int], num_tokens: int) -> Any:
    """The slots of the first `num_tokens` tokens of a sequence."""
    starts = np.array(blocks[: -(-num_tokens // BLOCK_TOKENS)], np.int64) * BLOCK_TOKENS
    return (starts[:, None] + _IN_BLOCK).reshape(-1)[:num_tokens]
