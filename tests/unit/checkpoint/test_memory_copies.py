"""Copies in memory: the newest complete step is chosen, damaged copies are found, old ones are removed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from lakh.checkpoint.memory_copies import CopyFacts, MemoryFolder, choose_copies
from lakh.errors import CorruptCheckpoint

FACTS = CopyFacts(
    step=10,
    rank=1,
    world=2,
    mesh="dp_shard=2",
    run_id="id",
    run_sha256="r",
    data_sha256="d",
    sequence_index=80,
    stream="",
    skip=((3, 5),),
)
TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(3, dtype=torch.int64)}


@pytest.fixture
def folder(tmp_path: Path) -> MemoryFolder:
    return MemoryFolder(tmp_path / "memory")


def test_a_copy_is_read_as_it_was_written_and_older_ones_are_removed(folder: MemoryFolder) -> None:
    for step in (10, 20, 30):
        folder.write(dataclasses.replace(FACTS, step=step), TENSORS)
    folder.write(dataclasses.replace(FACTS, rank=0, step=20), TENSORS)
    assert [(facts.step, facts.rank) for facts in folder.list_copies()] == [(20, 0), (20, 1), (30, 1)]
    last = folder.list_copies()[-1]
    assert last == dataclasses.replace(FACTS, step=30)
    read = folder.read(last)
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())
    folder.clear()
    assert folder.list_copies() == []


def test_a_copy_without_its_facts_does_not_count(folder: MemoryFolder) -> None:
    folder.write(FACTS, TENSORS)
    (folder.path / f"{FACTS.name}.json").unlink()
    assert folder.list_copies() == []
    folder.write(FACTS, TENSORS)
    (folder.path / f"{FACTS.name}.json").write_text("{")
    assert folder.list_copies() == []


def test_every_flipped_bit_is_found(folder: MemoryFolder) -> None:
    folder.write(FACTS, TENSORS)
    file = folder.tensor_file(FACTS)
    content = file.read_bytes()
    for at in range(len(content)):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(CorruptCheckpoint):
            folder.read(FACTS)
    file.write_bytes(content[:-1])
    with pytest.raises(CorruptCheckpoint, match="instead of"):
        folder.read(FACTS)


@pytest.mark.parametrize(
    ("holdings", "chosen"),
    [
        ([[(5, 0)], [(5, 1)]], (5, [0, 1])),
        ([[(5, 0), (5, 1)], []], (5, [0, 0])),  # node 1 is new: its copy comes from node 0
        ([[], [(5, 0), (5, 1)]], (5, [1, 1])),
        ([[(5, 0), (9, 0)], [(5, 1)]], (5, [0, 1])),  # step 9 was not finished everywhere
        ([[(5, 0)], []], None),
        ([[], []], None),
    ],
)
def test_the_newest_step_of_which_every_copy_exists(holdings, chosen) -> None:
    assert choose_copies(holdings, 2) == chosen
