"""The process group of a run: join it, reduce, gather, leave.

Joins by the variables of torchrun and Slurm (RANK, WORLD_SIZE, MASTER_ADDR ...), or by the file that lakh's launcher
names in LAKH_RENDEZVOUS, which needs no port. A single rank makes no process group. When a peer dies or does not
answer, every other rank raises PeerLost or PeerTimeout (exit 75).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from lakh.errors import PeerError, PeerLost, PeerTimeout, UserError
from lakh.spec import Mesh, Training
from lakh.spec.mesh import AXES
from lakh.trainer.observability.collective_records import board_path
from lakh.trainer.observability.collectives import CollectiveBoard
from lakh.workloads.code.parallel import ParallelGroups

__all__ = ["World"]


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device
    backend: str
    attempt: int = 0
    local_size: int = 1
    """Ranks on this machine."""
    board: CollectiveBoard | None = None
    """The last collectives of the ranks on this machine; None under other launchers."""
    member: int = -1
    """The rank this process was started as; the rank changes when others are lost (recovery/elastic.py)."""
    is_joining: bool = False
    """Whether this process asks to join a run that trains already (recovery/joining.py)."""

    @staticmethod
    @contextlib.contextmanager
    def join(settings: Training) -> Iterator[World]:
        """Be a rank of the run inside the block."""
        rank, size, local_rank, local_size = _from_environment()
        device = _choose_device(settings.device, local_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            cores = len(os.sched_getaffinity(0))
            torch.set_num_threads(settings.threads or max(1, cores // local_size))
        backend = settings.backend
        if backend == "auto":
            backend = "nccl" if device.type == "cuda" else "gloo"
        if backend == "c3":
            import lakh.c3.torch.backend  # noqa: F401 - registers the name
        attempt = int(os.environ.get("LAKH_ATTEMPT", "0"))
        world = World(rank, size, device, backend, attempt=attempt, local_size=local_size, member=rank)
        if joins_as := os.environ.get("LAKH_JOIN_AS"):
            world = dataclasses.replace(world, member=int(joins_as), is_joining=True)
        try:
            if world.size > 1 and not world.is_joining:
                world = world._join(settings)
            with world.peer_errors("training", settings.peer_timeout_s):
                yield world
        finally:
            if dist.is_initialized():
                with contextlib.suppress(Exception):  # fails after a lost peer
                    dist.destroy_process_group()

    def _join(self, settings: Training) -> World:
        """Make the process group of all ranks."""
        if self.backend == "nccl" and (self.device.type != "cuda" or not dist.is_nccl_available()):
            found = f"needs GPUs and a torch built with NCCL, and rank {self.rank} is on {self.device}"
            raise UserError("train.backend = nccl", found, "choose auto, gloo or c3")
        rendezvous = os.environ.get("LAKH_RENDEZVOUS")
        for name in () if rendezvous else ("MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise UserError(name, f"is not set, and RANK={self.rank} is", "start with torchrun, or unset RANK")
        with self.peer_errors("joining the run", settings.peer_timeout_s):
            dist.init_process_group(
                self.backend,
                init_method=f"file://{rendezvous}" if rendezvous else "env://",
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=settings.peer_timeout_s),
            )
        if not rendezvous:
            return self
        return dataclasses.replace(self, board=CollectiveBoard(board_path(rendezvous), self.rank, self.size))

    @contextlib.contextmanager
    def peer_errors(self, doing: str, timeout_s: float) -> Iterator[None]:
        """Raise PeerLost or PeerTimeout for errors of torch.distributed, with the ranks that were missing."""
        try:
            yield
        except (PeerLost, PeerTimeout) as error:  # as c3 raises them
            missing = self.board.missing() if self.board is not None else ""
            if missing and missing not in error.found:
                error.found = f"{error.found}; {missing}"
                error.args = (error.where, error.found, error.todo)
            raise
        except RuntimeError as error:
            kind = _c3_error_kind() if self.backend == "c3" else None
            kind = kind or _peer_error_kind(error)
            if kind is None:
                raise
            first_line = str(error).partition("\n")[0][:200]
            found = f"a peer died ({first_line})"
            if kind is PeerTimeout:
                found = f"a peer did not answer for {timeout_s:g} s ({first_line})"
            if self.board is not None and (missing := self.board.missing()):
                found = f"{found}; {missing}"
            raise kind(f"rank {self.rank}, {doing}", found, "lakh resume continues from the last checkpoint") from error

    def groups(self, mesh: Mesh, timeout_s: float) -> ParallelGroups:
        """The process groups of this rank along each axis of a resolved mesh. A collective."""
        sizes = {
            "dp_replicate": mesh.dp_replicate,
            "pp": mesh.pp,
            "fsdp": mesh.dp_shard * mesh.cp,
            "tp": mesh.tp,
        }
        ranks = ranks_by_axis(mesh)
        # FSDP over one rank is needed for replicas; without replicas it has no effect.
        wanted = {name: size for name, size in sizes.items() if size > 1 or (name == "fsdp" and mesh.dp_replicate > 1)}
        if not wanted:
            return ParallelGroups()
        root = DeviceMesh(self.device.type, ranks.reshape(*wanted.values()), mesh_dim_names=tuple(wanted))
        cp = None
        if mesh.cp > 1:
            pieces = ranks.reshape(-1, mesh.cp, mesh.tp)
            inner = DeviceMesh(self.device.type, pieces, mesh_dim_names=("outer", "cp", "inner"))
            cp = inner.get_group("cp")
        axes = tuple(name for name in ("dp_replicate", "fsdp") if name in wanted)
        experts = None
        if mesh.ep > 1:  # a mesh of its own: the same ranks, with fsdp in two axes
            wanted_by_experts: dict[str, int] = {}
            for name, size in wanted.items():
                wanted_by_experts |= {"fsdp": mesh.expert_shards, "ep": mesh.ep} if name == "fsdp" else {name: size}
            shape, names = tuple(wanted_by_experts.values()), tuple(wanted_by_experts)
            experts = DeviceMesh(self.device.type, ranks.reshape(shape), mesh_dim_names=names)
        groups = ParallelGroups(
            fsdp=root[axes] if axes else None,
            experts=experts[("ep", "tp") if mesh.tp > 1 else ("ep",)] if experts else None,
            expert_fsdp=experts[axes] if experts else None,
            tp=root["tp"] if mesh.tp > 1 else None,
            cp=cp,
            pp=root.get_group("pp") if mesh.pp > 1 else None,
        )
        all_groups = [*root.get_all_groups(), *(experts.get_all_groups() if experts else []), *([cp] if cp else [])]
        for group in all_groups:  # torch gives some of them 30 minutes
            _set_pg_timeout(timedelta(seconds=timeout_s), group)
        return groups

    def sum(self, *values: float) -> list[float]:
        """Element-wise sum over all ranks, in float64."""
        if self.size == 1:
            return list(values)
        device = self.device if self.backend == "nccl" else torch.device("cpu")
        total = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def is_equal_everywhere(self, digest: bytes) -> bool:
        """Whether every rank gives the same bytes (at most 32). A collective of constant size."""
        if self.size == 1:
            return True
        numbers = [int.from_bytes(digest[start : start + 7], "little") for start in range(0, 35, 7)]
        device = self.device if self.backend == "nccl" else torch.device("cpu")
        both = torch.tensor([*numbers, *(-number for number in numbers)], dtype=torch.int64, device=device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        largest, smallest = both.tolist()[:5], [-number for number in both.tolist()[5:]]
        return bool(largest == smallest)

    def gather(self, value: Any) -> list[Any] | None:
        """One value of each rank, on rank 0; None elsewhere."""
        if self.size == 1:
            return [value]
        result: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, result)
        return result

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]


def ranks_by_axis(mesh: Mesh) -> torch.Tensor:
    """The ranks of a resolved mesh with one tensor dim for each of AXES, for any order of numbering."""
    numbered = torch.arange(mesh.ranks, dtype=torch.int).reshape([getattr(mesh, axis) for axis in mesh.order])
    return numbered.permute([mesh.order.index(axis) for axis in AXES])


def _from_environment() -> tuple[int, int, int, int]:
    """(rank, size, local rank, local size) from torchrun, Slurm or lakh's launcher; a single rank by default."""
    try:
        rank = int(os.environ.get("RANK", "0"))
        size = int(os.environ.get("WORLD_SIZE", "1"))
        local = int(os.environ.get("LOCAL_RANK", "0"))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
    except ValueError as error:
        raise UserError("RANK, WORLD_SIZE, LOCAL_RANK", f"are not numbers ({error})", "start with torchrun") from None
    if not 0 <= rank < size:
        raise UserError(f"RANK={rank}", f"is not below WORLD_SIZE={size}", "start with torchrun or --nproc")
    return rank, size, local, local_size


def _choose_device(wanted: str, local_rank: int) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if local_rank >= gpus:
        found = f"rank {local_rank} of this machine has no GPU: there are {gpus}"
        raise UserError("train.device", found, "start fewer ranks here, or train with --set train.device=cpu")
    return torch.device("cuda", local_rank)


def _c3_error_kind() -> type[PeerError] | None:
    """The class of the failure of c3's groups, which torch's futures and autograd turn into a plain RuntimeError."""
    from lakh.c3.torch.backend import find_failure

    failure = find_failure()
    return type(failure) if isinstance(failure, PeerError) else None


def _peer_error_kind(error: RuntimeError) -> type[PeerError] | None:
    """PeerLost or PeerTimeout for an error of torch.distributed about a peer, None for any other error.

    torch raises DistError for its stores and for NCCL, and has no class for timeouts inside a collective or for gloo,
    whose errors are RuntimeErrors that begin with gloo's source file (pytorch/pytorch#75512). Only this function reads
    torch's texts.
    """
    first_line = str(error).partition("\n")[0]
    if not isinstance(error, dist.DistError) and not any(name in str(error) for name in ("gloo", "Gloo", "NCCL")):
        return None
    return PeerTimeout if "imed out" in first_line or "imeout" in first_line else PeerLost
