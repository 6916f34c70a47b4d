"""Memory for quantized weights in pages of 2 MiB, where Linux gives them on request.

A decode step reads all weights once. With pages of 4 KiB the translation of addresses is a part of that cost: products
with all weights of a 135M model take 8.0 ms with small pages and 7.7 ms with large ones (Neoverse-N1, one thread, best
of eight alternating runs on a busy machine).
Matrices are smaller than a page of 2 MiB, so they share mappings; a mapping is freed with its last tensor.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch
from torch import Tensor

__all__ = ["place"]

MAPPING_BYTES = 64 << 20
ALIGNMENT = 64

_lock = threading.Lock()
_mapping = torch.empty(0, dtype=torch.uint8)
_used = 0


def place(tensor: Tensor) -> Tensor:
    """A copy of a contiguous tensor in such memory; the tensor itself where the system has none."""
    if not hasattr(mmap, "MADV_HUGEPAGE") or not tensor.nbytes:
        return tensor
    with _lock:
        memory = _take(tensor.nbytes)
    return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _take(num_bytes: int) -> Tensor:
    global _mapping, _used
    if _used + num_bytes > len(_mapping):
        mapping = mmap.mmap(-1, max(MAPPING_BYTES, num_bytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without large pages gives ordinary ones
            mapping.madvise(mmap.MADV_HUGEPAGE)
        _mapping, _used = torch.frombuffer(mapping, dtype=torch.uint8), 0
    found = _mapping[_used : _used + num_bytes]
    _used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return found
