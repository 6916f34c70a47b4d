"""Copies of tensors in host memory, reused between saves.

The copy is complete when `take` returns. Copies of GPU tensors use pinned memory where possible, which copies at bus
speed; allocating it is slow, so it is kept for the life of this object.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["HostCopies"]


class HostCopies:
    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._spare: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors. Overwrites the copies of an earlier call."""
        copies = {name: self._buffer_for(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            copies[name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        self._buffers |= copies
        return copies

    def prepare_spare(self, pinned: Mapping[str, Tensor]) -> None:
        """Allocate memory for the copies that `exchange` will give away, like `pinned`; slow, for another thread."""
        with contextlib.suppress(RuntimeError):  # no more pinned memory: the next `take` finds other memory
            for name, tensor in pinned.items():
                if tensor.is_pinned():
                    self._spare[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def exchange(self, kept: Mapping[str, Tensor], free: Mapping[str, Tensor]) -> None:
        """Leave the copies among `kept` to the caller, and use the memory of `free` for the next ones instead."""
        for name, tensor in kept.items():
            buffer = self._buffers.get(name)
            if buffer is not None and buffer.data_ptr() == tensor.data_ptr():
                del self._buffers[name]
                spare = free.get(name, self._spare.pop(name, None))
                if spare is not None:
                    self._buffers[name] = spare

    def _buffer_for(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
            return buffer
        if tensor.is_cuda:
            try:
                return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            except RuntimeError:  # no more pinned memory: pageable memory is only slower
                pass
        return torch.empty(tensor.shape, dtype=tensor.dtype)
