"""Ids out of range that lookups on a GPU find: the host reads the result without a wait for the work after them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["IdCheck"]


class IdCheck:
    bag: Tensor
    """On the device: the number of a bag with an id out of range, or -1. Lookups write it."""

    def __init__(self, device: torch.device) -> None:
        self.bag = torch.full((), -1, dtype=torch.int64, device=device)
        self._is_on_gpu = device.type == "cuda"
        self._on_host = torch.full((), -1, dtype=torch.int64, pin_memory=self._is_on_gpu)
        self._copied = torch.cuda.Event() if self._is_on_gpu else None

    def after_lookup(self) -> None:
        self._on_host.copy_(self.bag, non_blocking=True)
        if self._copied:
            self._copied.record()

    def take_bad_bag(self) -> int | None:
        """A bag with an id out of range since the last call. Waits for the last lookup, not for what follows it."""
        if self._copied:
            self._copied.synchronize()
        bag = int(self._on_host)
        if bag < 0:
            return None
        self._on_host.fill_(-1)
        self.bag.fill_(-1)
        return bag
