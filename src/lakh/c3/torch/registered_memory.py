"""Registered memory: torch tensors in memory that all ranks of a host can access.

An all_reduce of such tensors needs no copy: every rank reduces its part directly into all ranks' tensors. Freed memory
stays in a pool by size, because peers map it when they first use it.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from typing import Any

import torch

from lakh.c3 import native
from lakh.errors import DiskFull

__all__ = ["registered_empty", "registered_like"]

_pool: dict[int, list[int]] = {}
_lock = threading.Lock()


def registered_empty(*shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An uninitialised CPU tensor in registered memory."""
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    count = math.prod(int(size) for size in sizes)
    size_bytes = max(1, count * dtype.itemsize)
    with _lock:
        free = _pool.get(size_bytes)
        address = free.pop() if free else 0
    address = address or native.require_library().lakh_c3_allocate(size_bytes)
    if not address:
        found = f"no shared memory for {size_bytes} bytes"
        raise DiskFull("c3 registered memory", found, "free memory or use ordinary tensors")
    memory = (ctypes.c_char * size_bytes).from_address(address)
    weakref.finalize(memory, _return_to_pool, size_bytes, address)
    flat = torch.frombuffer(memory, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype)
    return flat.view(sizes)


def registered_like(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor` in registered memory."""
    copy = registered_empty(tuple(tensor.shape), dtype=tensor.dtype)
    copy.copy_(tensor)
    return copy


def _return_to_pool(size_bytes: int, address: int) -> None:
    with _lock:
        _pool.setdefault(size_bytes, []).append(address)
