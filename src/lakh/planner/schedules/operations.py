"""Operations of a pipeline schedule: one computation of one micro-batch on one stage.

A stage is a part of the model that one rank computes at once. Its number is its position in the model; a schedule with
two directions (DualPipe) has two copies of every stage, and the second copy is numbered from `stages` on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["BACKWARD", "FORWARD", "INPUT", "WEIGHT", "Operation", "PipelineSchedule", "number_micro_batches"]

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
"""Backward computes both gradients; input and weight are its two halves."""


class Operation(NamedTuple):
    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class PipelineSchedule:
    name: str
    ranks: int
    micro_batches: int
    stages: int
    """Of one copy of the model."""
    stage_ranks: tuple[int, ...]
    """Rank of each stage, of all copies."""
    operations: tuple[tuple[Operation, ...], ...]
    """Of each rank, in order."""

    @property
    def stages_per_rank(self) -> int:
        """Of one copy."""
        return self.stages // self.ranks

    @property
    def copies(self) -> int:
        """Copies of the model's weights in the pipeline."""
        return len(self.stage_ranks) // self.stages

    def is_first(self, stage: int) -> bool:
        return stage % self.stages == 0

    def is_last(self, stage: int) -> bool:
        return stage % self.stages == self.stages - 1


def number_micro_batches(order: Sequence[tuple[str, int]], most: int) -> tuple[Operation, ...]:
    """(kind, stage) in order -> operations: the n-th of a kind on a stage works on micro-batch n.

    A backward pass counts as both of its halves. Operations on micro-batches from `most` on are left out.
    """
    done: dict[tuple[str, int], int] = {}
    found = []
    for kind, stage in order:
        number = done.get((INPUT if kind == BACKWARD else kind, stage), 0)
        for part in (INPUT, WEIGHT) if kind == BACKWARD else (kind,):
            done[part, stage] = done.get((part, stage), 0) + 1
        if number < most:
            found.append(Operation(kind, stage, number))
    return tuple(found)
