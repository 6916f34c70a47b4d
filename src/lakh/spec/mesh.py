"""A mesh: how many ranks lie along each axis of parallelism.

    dp_replicate  full replicas that average their gradients     (between zones or buildings: rare, large messages)
    pp            pipeline stages: consecutive blocks of the model
    dp_shard      ranks that shard one replica (FSDP2); -1 takes all remaining ranks
    cp            context parallelism: ranks that split each sequence
    tp            tensor parallelism: ranks that split each matrix  (inside a node: frequent, small messages)
    ep            expert parallelism: groups of neighbours along dp_shard x cp; does not multiply the rank count

Axes are listed from the outermost (slowest network tier) to the innermost. Ranks are numbered in this order unless
`order` says otherwise; placement.py shows what an order means for the network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from lakh.errors import ConfigError, InfeasiblePlan
from lakh.spec.model import Model

__all__ = ["AXES", "Mesh"]

Axis = Literal["dp_replicate", "pp", "dp_shard", "cp", "tp"]
AXES: tuple[Axis, ...] = ("dp_replicate", "pp", "dp_shard", "cp", "tp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    dp_replicate: int = 1
    """Full replicas of the model."""
    dp_shard: int = -1
    """Ranks that shard one replica (FSDP2); -1 takes all remaining ranks."""
    tp: int = 1
    """Tensor parallelism: ranks that split each matrix."""
    pp: int = 1
    """Pipeline stages."""
    cp: int = 1
    """Context parallelism: ranks that split each sequence."""
    ep: int = 1
    """Expert parallelism: ranks of dp_shard x cp that split the experts of a layer and exchange tokens."""
    pp_schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = "1f1b"
    """Pipeline schedule."""
    order: tuple[Axis, ...] = AXES
    """Rank numbering, from the axis whose ranks are farthest apart to the axis whose ranks are neighbours."""

    def __post_init__(self) -> None:
        for name in (*AXES, "ep"):
            size = getattr(self, name)
            if size < 1 and not (name == "dp_shard" and size == -1):
                raise ConfigError(name, f"{size} is not a number of ranks", "choose 1 or more")
        if sorted(self.order) != sorted(AXES):
            found = f"{list(self.order)} is not an order of the axes"
            raise ConfigError("order", found, f"name each once: {list(AXES)}")

    @property
    def ranks(self) -> int:
        """Number of ranks; with dp_shard = -1 the smallest number that fits."""
        return math.prod(abs(getattr(self, axis)) for axis in AXES)

    @property
    def data_ranks(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    def data_rank(self, rank: int) -> int:
        """Index of the part of a batch (0 to data_ranks - 1) that a rank of a resolved mesh reads."""
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def leads_stage(self, rank: int) -> bool:
        """Whether this is the first rank of its pipeline stage."""
        return not any(position for axis, position in self.coordinates(rank).items() if axis != "pp")

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Position of a rank of a resolved mesh along each axis."""
        positions: dict[Axis, int] = {}
        for axis in reversed(self.order):
            rank, positions[axis] = divmod(rank, getattr(self, axis))
        return positions

    def resolve(self, world: int) -> Mesh:
        """The mesh for exactly `world` ranks, with dp_shard = -1 replaced by a number."""
        if self.dp_shard == -1:
            if world % self.ranks:
                found = f"{self} comes in multiples of {self.ranks} ranks and there are {world}"
                raise InfeasiblePlan("mesh", found, f"start a multiple of {self.ranks} ranks, or make an axis smaller")
            return replace(self, dp_shard=world // self.ranks)
        if self.ranks != world:
            todo = f"start {self.ranks} ranks, or set mesh.dp_shard = -1 to use all ranks"
            raise InfeasiblePlan("mesh", f"{self} needs {self.ranks} ranks and there are {world}", todo)
        return self

    def check(self, model: Model) -> None:
        """Refuse a mesh that does not divide this model, naming the setting and the values that would work."""
        for name in ("heads", "kv_heads", "ffn", "vocab"):
            self._divides("tp", getattr(model, name), f"model.{name}")
        if model.traits.has_learned_positions:
            self._divides("tp", model.context, "model.context")
        self._divides("pp", model.layers, "model.layers")
        if self.cp > 1 and model.context % (2 * self.cp):
            pieces = f"each of {self.cp} ranks takes two pieces of a sequence, and 2 x {self.cp}"
            found = f"{pieces} does not divide model.context {model.context}"
            raise InfeasiblePlan("mesh.cp", found, "choose another size or context")
        if self.ep > 1:
            if model.experts is None:
                raise InfeasiblePlan("mesh.ep", f"is {self.ep}, and the model has no experts", "set it to 1")
            self._divides("ep", model.experts.count, "model.experts.count")

    @property
    def expert_shards(self) -> int:
        """Ranks of one replica, of a resolved mesh, that shard the same experts."""
        return self.dp_shard * self.cp // self.ep

    def _divides(self, axis: str, size: int, what: str) -> None:
        ranks = getattr(self, axis)
        if size % ranks:
            choices = ", ".join(str(i) for i in range(1, min(size, 128) + 1) if size % i == 0)
            raise InfeasiblePlan(f"mesh.{axis}", f"{ranks} does not divide {what} {size}", f"choose one of {choices}")

    def __str__(self) -> str:
        sizes = [f"{axis}={getattr(self, axis)}" for axis in (*AXES, "ep") if getattr(self, axis) != 1]
        return " x ".join(sizes) or "one rank"
