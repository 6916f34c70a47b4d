"""Transfers of a step between host and GPU: one in and one out, through pinned memory, without a wait in between.

A copy from pageable memory waits for the device, and each copy and each wait costs the host microseconds in which the
GPU has no work. On CPU tensors the same code copies at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["InputTransfer", "TokenTransfer"]


class InputTransfer:
    """int32 inputs of a step: `tensor` on the device, and the same numbers on the host."""

    def __init__(self, size: int, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self.tensor = torch.zeros(size, dtype=torch.int32, device=device)
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=is_gpu)
        self._numbers = self._host.numpy()
        self._sent = torch.cuda.Event() if is_gpu else None

    def numbers(self) -> Any:
        """The host's numbers, to be overwritten. Waits until the last `send` has read them."""
        if self._sent is not None:
            self._sent.synchronize()  # returns at once before the first `send`
        return self._numbers

    def send(self) -> None:
        """Copy to the device, after all work launched before."""
        self.tensor.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()


class TokenTransfer:
    """Token ids of a step on their way to the host."""

    def __init__(self, size: int, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=is_gpu)
        self._arrived = torch.cuda.Event() if is_gpu else None

    def start(self, tokens: Tensor) -> Callable[[], list[int]]:
        """Copy up to `size` tokens after all work launched before. The returned function waits for them; call it before
        the next `start`.
        """
        if not len(tokens):
            return list
        host = self._host[: len(tokens)]
        host.copy_(tokens, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

        def read() -> list[int]:
            if self._arrived is not None:
                self._arrived.synchronize()
            found: list[int] = host.tolist()
            return found

        return read
