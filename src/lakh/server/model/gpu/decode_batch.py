"""Where a number of rows has its place on the GPU: what a step reads and writes, and bursts of greedy steps there.

Knows nothing of how a step is computed (decode.py).
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from lakh.server.model.gpu.graphs import Step

__all__ = ["HISTORY", "DecodeBatch", "MultiStepDecode"]

HISTORY = 64  # steps that a batch remembers


class DecodeBatch:
    """Static inputs, outputs and the graph of one number of rows.

    `replay` scores the tokens, draws greedily, and moves every row one place on.
    """

    def __init__(self, rows: int, table_width: int, device: torch.device) -> None:
        # One transfer in: of all rows the positions, the tokens, the steps so far, the tables of blocks.
        self.control = torch.zeros(rows * (3 + table_width), dtype=torch.int32, device=device)
        self.positions, self.tokens, self.steps, tables = self.control.split([rows, rows, rows, rows * table_width])
        self.tables = tables.view(rows, table_width)
        self.history = torch.zeros(HISTORY, rows, dtype=torch.int32, device=device)
        self.seen = torch.zeros(HISTORY, rows, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.logits = torch.empty(0)
        self.replay: Step = lambda: None

    def __len__(self) -> int:
        """Rows, the empty ones included."""
        return len(self.tokens)

    def set_tokens(self, tokens: Tensor) -> None:
        """These tokens instead of those that the last step drew. What it drew is then not to be read."""
        self.tokens.copy_(tokens)
        self.steps.zero_()  # its own history would run past its end


class MultiStepDecode:
    """Greedy steps of the rows that were put into a batch, at most HISTORY of them, read while they go on.

    Whoever puts other rows there ends it: their steps come after those that were launched, read or not.
    """

    def __init__(self, batch: DecodeBatch, num_rows: int) -> None:
        self._batch, self._num_rows, self._launched = batch, num_rows, 0
        self._unread: deque[tuple[slice, torch.cuda.Event | None]] = deque()

    @torch.inference_mode()
    def launch(self, steps: int) -> None:
        """So many steps more, without waiting for them."""
        batch, part = self._batch, slice(self._launched, self._launched + steps)
        self._launched += steps
        assert self._launched <= HISTORY  # the kernel would write on
        for _ in range(steps):
            batch.replay()
        batch.seen[part].copy_(batch.history[part], non_blocking=True)
        done = None
        if batch.history.is_cuda:
            done = torch.cuda.Event()
            done.record()
        self._unread.append((part, done))

    def read(self) -> list[list[int]]:
        """Wait for the oldest launch that was not read: the tokens of each of its steps."""
        part, done = self._unread[0]
        if done is not None:
            done.synchronize()
        tokens: list[list[int]] = self._batch.seen[part, : self._num_rows].tolist()
        self._unread.popleft()
        return tokens
