"""Which ranks continue after a loss, at which step, and who takes whose tensors. Pure decisions, independent of torch.

A replica holds the whole model, split over its ranks by any axes (FSDP, TP, PP, CP). Ranks of different replicas at the
same place hold the same part. Members are named by the ranks that they were started as, on the first mesh; those of
replicas beyond its size are numbered replica by replica.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from lakh.spec import Mesh
from lakh.spec.mesh import AXES, Axis

__all__ = ["ReplicaLayout", "TensorProgress", "choose_step"]


@dataclass(frozen=True)
class TensorProgress:
    step: int
    """Steps that the tensors of the member have taken."""
    is_consistent: bool
    """False if the loss interrupted an update."""


@dataclass(frozen=True)
class ReplicaLayout:
    mesh: Mesh
    """The resolved mesh that the run was started with."""

    @cached_property
    def replica_size(self) -> int:
        return self.mesh.ranks // self.mesh.dp_replicate

    @cached_property
    def _first_coordinates(self) -> list[dict[Axis, int]]:
        return [self.mesh.coordinates(rank) for rank in range(self.mesh.ranks)]

    def coordinates(self, member: int) -> dict[Axis, int]:
        """Position of a member along each axis; beyond the first size along dp_replicate for added replicas."""
        if member < len(self._first_coordinates):
            return self._first_coordinates[member]
        replica, place = divmod(member, self.replica_size)
        return replace(self.mesh, dp_replicate=1).coordinates(place) | {"dp_replicate": replica}

    def replica_of(self, member: int) -> int:
        return self.coordinates(member)["dp_replicate"]

    def part_of(self, member: int) -> tuple[int, ...]:
        """The part of the model that a member holds; equal for members that hold the same part."""
        at = self.coordinates(member)
        return tuple(at[axis] for axis in AXES if axis != "dp_replicate")

    def whole_replicas(self, members: Iterable[int]) -> tuple[int, ...]:
        """The members whose replica has all of its ranks, in the order of their ranks on `mesh_of` them."""
        by_replica: dict[int, list[int]] = defaultdict(list)
        for member in members:
            by_replica[self.replica_of(member)].append(member)
        whole = [member for group in by_replica.values() if len(group) == self.replica_size for member in group]
        return tuple(sorted(whole, key=self._place))

    def mesh_of(self, members: Iterable[int]) -> Mesh:
        """The mesh of whole replicas."""
        return replace(self.mesh, dp_replicate=len({self.replica_of(member) for member in members}))

    def _place(self, member: int) -> tuple[int, ...]:
        at = self.coordinates(member)
        return tuple(at[axis] for axis in self.mesh.order)

    def sources(self, progress: Mapping[int, TensorProgress], step: int) -> dict[int, int]:
        """For each member whose tensors are not those of `step`, the member to take them from."""
        current = TensorProgress(step, is_consistent=True)
        source_of_part: dict[tuple[int, ...], int] = {}
        for member in sorted(progress):
            if progress[member] == current:
                source_of_part.setdefault(self.part_of(member), member)
        return {
            member: source_of_part[self.part_of(member)] for member in sorted(progress) if progress[member] != current
        }


def choose_step(progress: Mapping[int, TensorProgress], layout: ReplicaLayout) -> int | None:
    """The newest step at which each part of the model is consistent on some member; None if there is none."""
    steps_of_part: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for member, found in progress.items():
        steps_of_part[layout.part_of(member)] |= {found.step} if found.is_consistent else set()
    common = set.intersection(*steps_of_part.values()) if steps_of_part else set()
    return max(common, default=None)
