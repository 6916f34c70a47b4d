"""Where a restart runs: the devices that are left, and the mesh for them. Independent of torch.

A device is lost if the driver does not list it, if a health check drains it (lakh.health), or if a rank noted that it
is gone. Fewer devices give up replicas first, because ranks of one replica keep their memory; then the shards of the
last replica. Tensor, pipeline and context parallelism stay as they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lakh.errors import InfeasiblePlan
from lakh.health.checks import HealthReading
from lakh.health.decisions import evaluate_checks
from lakh.health.sources.nvml import read_gpus
from lakh.spec import Mesh, Run
from lakh.spec.parallel_check import check_parallelism
from lakh.trainer.launch.decision import can_continue_without_ranks
from lakh.trainer.recovery.replicas import ReplicaLayout

__all__ = ["RestartPlan", "find_devices", "first_plan", "keep_healthy", "note_lost_device", "plan_restart"]

_LOST = "lost-device-"


@dataclass(frozen=True)
class RestartPlan:
    ranks: int
    mesh: Mesh
    sets: tuple[str, ...] = ()
    """Settings of the mesh, for the ranks' command line."""
    replicas: ReplicaLayout | None = None
    """Not None if ranks can be lost without a restart."""
    on_gpus: bool = False
    """Whether the ranks use GPUs, if there are some."""


def first_plan(run: Run, ranks: int) -> RestartPlan:
    """The plan that the run asks for."""
    mesh = run.mesh.resolve(ranks)
    is_elastic, _ = can_continue_without_ranks(run.train, run.mesh, ranks)
    return RestartPlan(ranks, mesh, (), ReplicaLayout(mesh) if is_elastic else None, run.train.device != "cpu")


def plan_restart(run: Run, before: RestartPlan, devices: int) -> RestartPlan | None:
    """The plan with the most ranks on up to `devices` devices; None if there is none."""
    if devices >= before.ranks:
        return before
    mesh = before.mesh
    inner = mesh.tp * mesh.pp * mesh.cp
    for data_ranks in range(devices // inner, 0, -1):
        for planned in _meshes(mesh, data_ranks):
            sets = (f"mesh.dp_replicate={planned.dp_replicate}", f"mesh.dp_shard={planned.dp_shard}")
            changed = replace(run, mesh=planned)
            try:
                check_parallelism(changed, planned.ranks)
            except InfeasiblePlan:
                continue
            return replace(first_plan(changed, planned.ranks), sets=sets)
    return None


def _meshes(mesh: Mesh, data_ranks: int) -> list[Mesh]:
    if data_ranks >= mesh.dp_shard:
        whole = data_ranks % mesh.dp_shard == 0
        return [replace(mesh, dp_replicate=data_ranks // mesh.dp_shard)] if whole else []
    return [replace(mesh, dp_replicate=1, dp_shard=data_ranks)]


def note_lost_device(rendezvous: str | Path, device: int) -> None:
    """Called by a rank whose device is gone, before it ends."""
    (Path(rendezvous).parent / f"{_LOST}{device}").touch()


def find_devices(
    rendezvous: Path,
    devices: Sequence[int],
    *,
    on_gpus: bool,
    read: Callable[[str], Iterable[HealthReading]] = read_gpus,
) -> list[int]:
    """Those of the devices, numbered as local ranks, that a restart may use."""
    noted = {int(path.name.removeprefix(_LOST)) for path in rendezvous.parent.glob(f"{_LOST}*")}
    left = [device for device in devices if device not in noted]
    return keep_healthy(left, list(read("")), os.environ.get("CUDA_VISIBLE_DEVICES", "")) if on_gpus else left


def keep_healthy(devices: Sequence[int], readings: Sequence[HealthReading], visible: str) -> list[int]:
    """The devices that the driver lists and that no check drains. All of them on a machine without GPUs, or if
    CUDA_VISIBLE_DEVICES does not use numbers."""
    listed = {int(found[1]) for reading in readings if (found := re.fullmatch(r"gpu(\d+)", reading.device))}
    drained = {f.device for f in evaluate_checks(readings) if not f.ok and f.level != "watch"}
    numbers = [part.strip() for part in visible.split(",") if part.strip()] or [str(gpu) for gpu in sorted(listed)]
    if not listed or not all(number.isdecimal() for number in numbers):
        return list(devices)
    usable = [place for place, gpu in enumerate(numbers) if int(gpu) in listed and f"gpu{gpu}" not in drained]
    return [device for device in devices if device in usable]
