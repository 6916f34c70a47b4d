"""Bursts of hundreds of rows on a GPU: the server's captured step, and drawing beside it without a look from the host.

A graph is captured for each of SIZES rows; a batch runs in the smallest that holds it. The graph computes scores and
moves every row one place on; the token it would take itself (the largest score) is replaced by the one that was drawn.
Nothing is read back before the end of a burst. Needs Triton; knows nothing of text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lakh.evals.bulk_rows import Draw, Row, keys_of, pick
from lakh.server.model.gpu.decode import Decoder, can_decode
from lakh.server.model.inference import InferenceModel
from lakh.server.model.kv_cache import PagedCache

__all__ = ["Graphs", "can_decode"]

SIZES = (16, 64, 128, 256, 512)


class Graphs:
    def __init__(self, network: InferenceModel, cache: PagedCache) -> None:
        self._decoder = Decoder(network, cache)

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], steps: int, draw: Draw) -> list[list[int]]:
        num = len(rows)
        last, positions = [row.last for row in rows], [row.position for row in rows]
        batch = self._decoder.load_batch(last, positions, [row.blocks for row in rows], SIZES)
        device = batch.tokens.device
        keys = torch.zeros(len(batch), steps, dtype=torch.int64)
        keys[:num] = keys_of(rows, steps)
        keys = keys.to(device)
        history = torch.zeros(steps, len(batch), dtype=torch.int64, device=device)
        for step in range(steps):
            batch.replay()
            drawn = pick(batch.logits, draw, keys[:, step])
            batch.set_tokens(drawn)
            history[step] = drawn
        return history[:, :num].T.tolist()
