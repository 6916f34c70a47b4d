"""The inputs of a step of up to a number of tokens, in one tensor for a single transfer.

    ids, positions, slots     of each token; padding writes to a scratch slot
    scored                    places of the tokens that get logits
    tile_sequence, _first, _count    tiles of consecutive tokens of one sequence, which attention reads together
    tables                    the cache blocks of each sequence

Which tile belongs to which sequence is data, not shape: one graph serves a prompt of 15 tokens, and three decoding
sequences beside a prompt of 9. Independent of Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lakh.server.model.block_pool import BLOCK_TOKENS
from lakh.server.model.gpu.transfer import InputTransfer
from lakh.server.model.inference import SequenceChunk

__all__ = ["MAX_SCORED", "MAX_SEQUENCES", "StepInputs"]

MAX_SEQUENCES = 128
MAX_SCORED = 256


class StepInputs:
    def __init__(self, tokens: int, tile: int, table_width: int, scratch_slot: int, device: torch.device) -> None:
        self.tokens, self.tile = tokens, tile
        self.sequences, self.scored = min(tokens, MAX_SEQUENCES), min(tokens, MAX_SCORED)
        self.tiles = tokens // tile + self.sequences  # each sequence wastes less than one tile
        sizes = {
            "ids": tokens,
            "positions": tokens,
            "slots": tokens,
            "scored": self.scored,
            "tile_sequence": self.tiles,
            "tile_first": self.tiles,
            "tile_count": self.tiles,
            "tables": self.sequences * table_width,
        }
        ends = np.cumsum(list(sizes.values())).tolist()
        self._at = {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}
        self._transfer = InputTransfer(ends[-1], device)
        numbers = self._transfer.numbers()
        self._part = {name: numbers[where] for name, where in self._at.items()}  # views of the host's numbers
        self._tables = self._part["tables"].reshape(self.sequences, table_width)
        self._part["slots"][:] = scratch_slot
        self._padding = numbers.copy()
        self._transfer.send()

    def __getitem__(self, name: str) -> Tensor:
        """A part on the device."""
        return self._transfer.tensor[self._at[name]]

    def send(self, chunks: Sequence[SequenceChunk]) -> int:
        """Send these chunks to the device; returns the number of scored tokens."""
        self._transfer.numbers()[:] = self._padding
        part = self._part
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        scored: list[int] = []
        tiles: list[tuple[int, int, int]] = []  # sequence, first token, number of tokens
        for number, chunk in enumerate(chunks):
            first, end = len(ids), len(ids) + len(chunk.tokens)
            ids += chunk.tokens
            positions += range(chunk.start, chunk.start + len(chunk.tokens))
            slots += _slots(chunk)
            scored += range(end - chunk.scored, end)
            tiles += [(number, at, min(self.tile, end - at)) for at in range(first, end, self.tile)]
            self._tables[number, : len(chunk.blocks)] = chunk.blocks
        for name, values in (("ids", ids), ("positions", positions), ("slots", slots), ("scored", scored)):
            part[name][: len(values)] = values
        for name, column in zip(("tile_sequence", "tile_first", "tile_count"), zip(*tiles, strict=True), strict=True):
            part[name][: len(tiles)] = column
        self._transfer.send()
        return len(scored)


def _slots(chunk: SequenceChunk) -> list[int]:
    """Where the keys and values of the tokens go, block by block."""
    slots: list[int] = []
    at, end = chunk.start, chunk.start + len(chunk.tokens)
    while at < end:
        block, offset = divmod(at, BLOCK_TOKENS)
        count = min(BLOCK_TOKENS - offset, end - at)
        slot = chunk.blocks[block] * BLOCK_TOKENS + offset
        slots += range(slot, slot + count)
        at += count
    return slots
