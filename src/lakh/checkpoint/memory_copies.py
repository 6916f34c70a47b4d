"""Copies of the training state in a node's memory: files on tmpfs, which outlive the ranks and need no storage.

    FOLDER/step-00000050.rank-00003.safetensors   all tensors of rank 3, as it held them
    FOLDER/step-00000050.rank-00003.json          its facts and hashes; written last

A folder holds copies of this node's ranks and, where there are several nodes, of the ranks of another node. A copy fits
only the same mesh; checkpoints in storage fit any.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lakh import storage
from lakh.errors import CorruptCheckpoint, LakhError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CopyFacts", "MemoryFolder", "choose_copies"]

KEEP = 2  # the newest copy may be incomplete on other nodes


@dataclass(frozen=True)
class CopyFacts:
    """What a copy is a copy of. Copies with equal facts, apart from the rank, form one state."""

    step: int
    rank: int
    world: int
    mesh: str
    run_id: str
    """Of the run's folder."""
    run_sha256: str
    data_sha256: str
    sequence_index: int
    stream: str
    """The hash of the stream so far, as the checkpointer writes it; empty if unknown."""
    skip: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}.rank-{self.rank:05d}"


def choose_copies(holdings: Sequence[Sequence[tuple[int, int]]], world: int) -> tuple[int, list[int]] | None:
    """The newest step of which every rank's copy exists, and for each rank the rank whose node holds it.

    `holdings`: for each rank, the (step, rank) of the copies on its node. A rank takes the copy of its own node if
    there is one. None if no step is complete.
    """
    for step in sorted({step for held in holdings for step, _ in held}, reverse=True):
        holders = []
        for rank in range(world):
            found = [holder for holder, held in enumerate(holdings) if (step, rank) in held]
            if not found:
                break
            holders.append(rank if rank in found else found[0])
        else:
            return step, holders
    return None


class MemoryFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, facts: CopyFacts, tensors: Mapping[str, Tensor]) -> None:
        """Write the copy of a rank of this node, and remove its older ones."""
        from lakh.checkpoint.tensor_file import write_tensors

        storage.make_dir(self.path)
        entry = write_tensors(str(self.tensor_file(facts)), tensors)
        document = {"facts": dataclasses.asdict(facts), "file": dataclasses.asdict(entry)}
        self.commit(facts, json.dumps(document).encode())

    def commit(self, facts: CopyFacts, document: bytes) -> None:
        """Complete a copy whose tensors are written."""
        storage.write_bytes(str(self.path / f"{facts.name}.json"), document)
        copies = sorted(self.path.glob(f"step-*.rank-{facts.rank:05d}.json"), reverse=True)
        for old in copies[KEEP:]:
            old.unlink(missing_ok=True)
            old.with_suffix(".safetensors").unlink(missing_ok=True)

    def tensor_file(self, facts: CopyFacts) -> Path:
        return self.path / f"{facts.name}.safetensors"

    def document(self, facts: CopyFacts) -> bytes:
        return storage.read_bytes(str(self.path / f"{facts.name}.json"))

    def list_copies(self) -> list[CopyFacts]:
        """The complete copies; a damaged file is not listed."""
        found = []
        for path in sorted(self.path.glob("step-*.rank-*.json")):
            with contextlib.suppress(LakhError, ValueError, KeyError, TypeError):
                facts = read_facts(storage.read_bytes(str(path)))
                if facts.name == path.stem and self.tensor_file(facts).is_file():
                    found.append(facts)
        return found

    def read(self, facts: CopyFacts) -> dict[str, Tensor]:
        """The tensors of a copy, mapped from memory. Raises CorruptCheckpoint if they do not match their hashes."""
        import safetensors.torch

        from lakh.checkpoint.chunk_hashes import chunks_of, find_damage
        from lakh.checkpoint.format import StoredFile

        entry = json.loads(self.document(facts))["file"]
        stored = StoredFile(entry["bytes"], tuple(entry["sha256"]), entry["chunk_bytes"])
        file = self.tensor_file(facts)
        todo = "restore from a checkpoint"
        if file.stat().st_size != stored.bytes:
            raise CorruptCheckpoint(str(file), f"has {file.stat().st_size} bytes instead of {stored.bytes}", todo)
        if damage := find_damage(str(self.path), chunks_of(file.name, stored)):
            raise CorruptCheckpoint(str(file), f"the {damage[2]} bytes at {damage[1]} do not match their hash", todo)
        return safetensors.torch.load_file(file)

    def clear(self) -> None:
        storage.remove_tree(str(self.path))


def read_facts(document: bytes) -> CopyFacts:
    fields: dict[str, Any] = json.loads(document)["facts"]
    return CopyFacts(**{**fields, "skip": tuple((first, end) for first, end in fields["skip"])})
