"""A restart uses the devices that are left: replicas go first, then shards. The trainer accepts every plan."""

from pathlib import Path

import pytest

from lakh.health.checks import HealthReading
from lakh.spec import Data, Mesh, Run, Training
from lakh.trainer.launch.restart_plan import find_devices, first_plan, keep_healthy, note_lost_device, plan_restart


def run(batch: int = 8, **mesh: int) -> Run:
    return Run(
        name="r",
        data=Data(batch=batch, micro_batch=1),
        mesh=Mesh(**mesh),
        train=Training(backend="c3", device="cpu"),
    )


@pytest.mark.parametrize(
    ("mesh", "ranks", "devices", "planned"),
    [
        ({}, 4, 4, (4, 1, 4)),  # nothing was lost
        ({}, 4, 3, (2, 1, 2)),  # 3 shards do not divide a batch of 8
        ({}, 4, 1, (1, 1, 1)),
        ({"dp_replicate": 4, "dp_shard": 1}, 4, 3, (2, 2, 1)),
        ({"dp_replicate": 2, "dp_shard": 4}, 8, 7, (4, 1, 4)),  # a whole replica leaves
        ({"dp_replicate": 2, "dp_shard": 4}, 8, 3, (2, 1, 2)),  # the last replica has fewer shards
        ({"tp": 2}, 4, 3, (2, 1, 1)),
        ({"tp": 2}, 4, 1, None),  # tensor parallelism stays
    ],
)
def test_the_largest_mesh_that_fits(mesh, ranks: int, devices: int, planned) -> None:
    asked = run(**mesh)
    plan = plan_restart(asked, first_plan(asked, ranks), devices)
    assert planned == (plan and (plan.ranks, plan.mesh.dp_replicate, plan.mesh.dp_shard))
    if plan is not None:
        assert (plan.replicas is not None) == (plan.mesh.dp_replicate > 1)


def test_a_device_that_a_rank_noted_as_lost_is_not_used_again(tmp_path: Path) -> None:
    note_lost_device(tmp_path / "0", 1)
    assert find_devices(tmp_path / "1", [0, 1, 2], on_gpus=False) == [0, 2]


def gpus(*ecc_errors: int) -> list[HealthReading]:
    return [HealthReading(f"gpu{n}", f"s{n}", "ecc_uncorrectable", errors) for n, errors in enumerate(ecc_errors)]


@pytest.mark.parametrize(
    ("readings", "visible", "left"),
    [
        ([], "", [0, 1, 2]),  # no driver
        (gpus(0, 0, 0), "", [0, 1, 2]),
        (gpus(0, 1, 0), "", [0, 2]),
        (gpus(0, 0), "", [0, 1]),  # one fell off the bus
        (gpus(0, 0, 0, 1), "1,2,3", [0, 1]),
        (gpus(0, 1), "GPU-aa,GPU-bb", [0, 1, 2]),
    ],
)
def test_gpus_that_a_check_drains_are_not_used_again(readings, visible: str, left: list[int]) -> None:
    assert keep_healthy([0, 1, 2], readings, visible) == left
