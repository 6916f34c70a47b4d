"""The flight record of a run: in a shared file, the last collective that every rank has entered, per group.

Ranks write it (collectives.py). A rank that waits in vain reads it, and so does the launcher when ranks have ended
without an error of their own, as NCCL's watchdog ends them. Does not import torch.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

__all__ = ["RECORD_BYTES", "SLOT", "SLOTS", "board_path", "describe_missing", "find_absent", "read_record"]

SLOT = struct.Struct("<QQ16s")  # group, number of its last collective, name
SLOTS = 8  # groups per rank that are recorded
RECORD_BYTES = SLOTS * SLOT.size


def board_path(rendezvous: str | Path) -> str:
    return f"{rendezvous}.board"


def read_record(memory: bytes | mmap.mmap, rank: int) -> Iterator[tuple[int, int, str]]:
    """(group, number, name) of the last collective of a rank in each of its groups."""
    start = rank * RECORD_BYTES
    for group, number, name in SLOT.iter_unpack(memory[start : start + RECORD_BYTES]):
        if number:
            yield group, number, name.rstrip(b"\0").decode(errors="replace")


def describe_missing(kind: str, number: int, entered: dict[int, int]) -> str:
    """The ranks that have not entered collective `number`, from the last number that each rank has entered."""
    absent = {rank: last for rank, last in entered.items() if last < number}
    parts = [f"rank {rank} did not enter {kind} number {number} (its last was {last})" for rank, last in absent.items()]
    return "; ".join(parts[:4]) + (f"; and {len(parts) - 4} more ranks" if len(parts) > 4 else "")


def find_absent(path: str | Path) -> str:
    """The ranks that have not entered the last collective of the others, in their largest group; empty if there are
    none, or no record."""
    try:
        memory = Path(path).read_bytes()
    except OSError:
        return ""
    groups: dict[int, dict[int, tuple[int, str]]] = {}
    silent = []
    for rank in range(len(memory) // RECORD_BYTES):
        found = list(read_record(memory, rank))
        for group, number, name in found:
            groups.setdefault(group, {})[rank] = (number, name)
        silent += [] if found else [rank]
    for members in sorted(groups.values(), key=len, reverse=True):
        number, name = max(members.values())
        entered = {rank: last for rank, (last, _) in members.items()} | dict.fromkeys(silent, 0)
        if text := describe_missing(name, number, dict(sorted(entered.items()))):
            return text
    return ""
