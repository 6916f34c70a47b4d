"""Copies of tensors in host memory, kept between saves and filled again.

What is copied may change at once afterwards: the copy is complete when `take` returns. Copies of a GPU's tensors lie in
pinned memory where the system gives it, which is what makes the way there as fast as the bus; getting that memory is
slow, and is why it is kept. Cost: once the bytes of the tensors, for as long as this object lives.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["HostCopies"]


class HostCopies:
    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as they are now. What an earlier `take` gave is overwritten."""
        copies = {name: self._place_for(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            copies[name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        self._kept = copies
        return copies

    def _place_for(self, name: str, tensor: Tensor) -> Tensor:
        kept = self._kept.get(name)
        if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
            return kept
        if tensor.is_cuda:
            try:
                return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            except RuntimeError:  # the system gives no more of it: the plain kind only costs time
                pass
        return torch.empty(tensor.shape, dtype=tensor.dtype)
