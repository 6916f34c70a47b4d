"""The inputs of a step and its transfers, on CPU tensors: the same code as on a GPU, without its graphs."""

from __future__ import annotations

import random

import pytest
import torch

from lakh.server.model.block_pool import BLOCK_TOKENS
from lakh.server.model.gpu.step_inputs import StepInputs
from lakh.server.model.gpu.transfer import InputTransfer, TokenTransfer
from lakh.server.model.inference import SequenceChunk

CPU = torch.device("cpu")
SCRATCH_SLOT, WIDTH = 1600, 8


def random_chunks(seed: int, most: int) -> list[SequenceChunk]:
    numbers, chunks, left = random.Random(seed), [], most
    blocks = list(range(99))
    numbers.shuffle(blocks)
    while left > 0 and len(chunks) < 12:
        count = numbers.choice([1, 1, 2, 5, 8, 17, 40])
        count = min(count, left)
        start = numbers.randrange(0, WIDTH * BLOCK_TOKENS - count)
        own = [blocks.pop() for _ in range(-(-(start + count) // BLOCK_TOKENS))] if len(blocks) >= WIDTH else None
        if own is None:
            break
        tokens = [numbers.randrange(4096) for _ in range(count)]
        chunks.append(SequenceChunk(tokens, start, own, numbers.choice([0, 1, count])))
        left -= count
    return chunks


@pytest.mark.parametrize("seed", range(8))
def test_every_token_has_its_position_its_slot_and_one_tile(seed: int) -> None:
    inputs = StepInputs(64, 8, WIDTH, SCRATCH_SLOT, CPU)
    for step in range(3):  # what an earlier step left behind does not show
        chunks = random_chunks(100 * step + seed, 64 if step < 2 else 9)
        num_scored = inputs.send(chunks)
        part = {name: inputs[name].tolist() for name in ("ids", "positions", "slots", "scored")}
        tables = inputs["tables"].view(-1, WIDTH).tolist()
        tokens = [(number, chunk, i) for number, chunk in enumerate(chunks) for i in range(len(chunk.tokens))]
        assert part["ids"][: len(tokens)] == [chunk.tokens[i] for _, chunk, i in tokens]
        assert part["positions"][: len(tokens)] == [chunk.start + i for _, chunk, i in tokens]
        places = [divmod(chunk.start + i, BLOCK_TOKENS) for _, chunk, i in tokens]
        slots = [chunk.blocks[at] * BLOCK_TOKENS + off for (_, chunk, _), (at, off) in zip(tokens, places, strict=True)]
        assert part["slots"] == slots + [SCRATCH_SLOT] * (64 - len(tokens))
        last = [i >= len(chunk.tokens) - chunk.scored for _, chunk, i in tokens]
        assert part["scored"][:num_scored] == [at for at, is_scored in enumerate(last) if is_scored]
        for number, chunk in enumerate(chunks):
            assert tables[number][: len(chunk.blocks)] == list(chunk.blocks)
        tiles = zip(*(inputs[name].tolist() for name in ("tile_sequence", "tile_first", "tile_count")), strict=True)
        covered = [(number, at) for number, first, count in tiles for at in range(first, first + count)]
        assert covered == [(number, at) for at, (number, _, _) in enumerate(tokens)]


def test_the_inputs_before_the_first_step_only_touch_the_scratch_slot() -> None:
    inputs = StepInputs(16, 8, WIDTH, SCRATCH_SLOT, CPU)
    assert set(inputs["slots"].tolist()) == {SCRATCH_SLOT}
    assert not inputs["tile_count"].any()


def test_inputs_reach_the_device_when_they_are_sent() -> None:
    transfer = InputTransfer(3, CPU)
    transfer.numbers()[:] = [1, 2, 3]
    assert transfer.tensor.tolist() == [0, 0, 0]
    transfer.send()
    transfer.numbers()[:] = 9
    assert transfer.tensor.tolist() == [1, 2, 3]


def test_tokens_are_those_at_the_start_of_their_transfer() -> None:
    tokens, transfer = torch.tensor([5, 6, 7]), TokenTransfer(4, CPU)
    read = transfer.start(tokens[:2])
    tokens.zero_()
    assert read() == [5, 6]
    assert transfer.start(tokens[:0])() == []  # a step that scores nothing
