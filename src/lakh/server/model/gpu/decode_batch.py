"""A decode batch of fixed size on the GPU: the inputs and outputs of a step, and several greedy steps in a row."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from lakh.server.model.gpu.graphs import StepFunction
from lakh.server.model.gpu.transfer import InputTransfer

__all__ = ["HISTORY", "DecodeBatch", "MultiStepDecode"]

HISTORY = 512  # steps whose tokens a batch keeps


class DecodeBatch:
    """Static inputs, outputs and the graph of one batch size. `replay` runs one greedy step of every sequence."""

    def __init__(self, size: int, table_width: int, device: torch.device) -> None:
        # One transfer for all inputs: positions, tokens, steps so far and block tables of all sequences.
        self.inputs = InputTransfer(size * (3 + table_width), device)
        parts = self.inputs.tensor.split([size, size, size, size * table_width])
        self.positions, self.tokens, self.steps, tables = parts
        self.tables = tables.view(size, table_width)
        self.history = torch.zeros(HISTORY, size, dtype=torch.int32, device=device)
        self.seen = torch.zeros(HISTORY, size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.logits = torch.empty(0)
        self.replay: StepFunction = lambda: None

    def __len__(self) -> int:
        """Sequences, including padding."""
        return len(self.tokens)

    def set_tokens(self, tokens: Tensor) -> None:
        """Replace the tokens that the last step sampled; its history is then invalid."""
        self.tokens.copy_(tokens)
        self.steps.zero_()  # otherwise the history would overflow


class MultiStepDecode:
    """Up to HISTORY greedy steps of the sequences in a batch; their tokens are read while later steps run.

    Loading other sequences into the batch ends it: their steps run after the launched ones, read or not.
    """

    def __init__(self, batch: DecodeBatch, num_sequences: int) -> None:
        self._batch, self._num_sequences, self._launched = batch, num_sequences, 0
        self._unread: deque[tuple[slice, torch.cuda.Event | None]] = deque()

    @torch.inference_mode()
    def launch(self, steps: int) -> None:
        """Start that many more steps without waiting for them."""
        batch, part = self._batch, slice(self._launched, self._launched + steps)
        self._launched += steps
        assert self._launched <= HISTORY  # the kernel writes without a bounds check
        for _ in range(steps):
            batch.replay()
        batch.seen[part].copy_(batch.history[part], non_blocking=True)
        done = None
        if batch.history.is_cuda:
            done = torch.cuda.Event()
            done.record()
        self._unread.append((part, done))

    def read(self) -> list[list[int]]:
        """Wait for the oldest unread launch; returns the tokens of each of its steps."""
        part, done = self._unread[0]
        if done is not None:
            done.synchronize()
        tokens: list[list[int]] = self._batch.seen[part, : self._num_sequences].tolist()
        self._unread.popleft()
        return tokens
