"""Bursts of hundreds of rows on a GPU: the server's captured step, and drawing beside it without a look from the host.

A graph is captured for each of SIZES rows; a batch runs in the smallest that holds it. The graph computes scores and
moves every row one place on; the token it would take itself (the largest score) is replaced by the one that was drawn.
Nothing is read back before the end of a burst. Needs Triton; knows nothing of text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lakh.evals.bulk_rows import Draw, Row, numbers_of, pick
from lakh.server.model.gpu.decode import Decoder, can_decode

__all__ = ["Graphs", "can_decode"]

SIZES = (16, 64, 128, 256, 512)


class Graphs(Decoder):
    @torch.inference_mode()
    def run(self, rows: Sequence[Row], steps: int, draw: Draw) -> list[list[int]]:  # type: ignore[override]
        num = len(rows)
        bucket = self._bucket(next(size for size in SIZES if size >= num))
        size = len(bucket.tokens)
        control = np.full((size, 2 + self._table_width), self._scratch, np.int32)
        control[:, :2] = 0
        for index, row in enumerate(rows):
            control[index, 0], control[index, 1] = row.position, row.last
            control[index, 2 : 2 + len(row.blocks)] = row.blocks
        bucket.control.copy_(torch.from_numpy(control))
        self._begin(bucket)
        device = bucket.tokens.device
        numbers = torch.zeros(size, steps)
        numbers[:num] = numbers_of(rows, steps)
        numbers = numbers.to(device)
        history = torch.zeros(steps, size, dtype=torch.int64, device=device)
        for step in range(steps):
            bucket.step.zero_()  # its own history is not read: keep it from running past its end
            bucket.replay()
            drawn = pick(bucket.logits, draw, numbers[:, step])
            bucket.tokens.copy_(drawn)
            history[step] = drawn
        return history[:, :num].T.tolist()
