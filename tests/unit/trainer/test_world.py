"""Process groups along each axis of the mesh, and errors of joining a run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.errors import UserError
from lakh.spec import Mesh, Training
from lakh.spec.mesh import AXES, Axis
from lakh.trainer.launch.world import World, ranks_by_axis


@given(st.permutations(AXES))
def test_groups_and_coordinates_agree_in_any_order_of_the_axes(order: list[Axis]) -> None:
    mesh = Mesh(dp_replicate=2, pp=3, dp_shard=2, cp=2, tp=2, order=tuple(order))
    ranks = ranks_by_axis(mesh)
    for rank in range(mesh.ranks):
        at = mesh.coordinates(rank)
        assert int(ranks[tuple(at[axis] for axis in AXES)]) == rank


def test_nccl_without_gpus_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(UserError, match=r"train\.backend = nccl: needs GPUs"),
        World.join(Training(backend="nccl", device="cpu", threads=1)),
    ):
        pass


def test_a_missing_rendezvous_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    for name in ("LAKH_RENDEZVOUS", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with (
        pytest.raises(UserError, match="MASTER_PORT: is not set, and RANK=0 is; start with torchrun"),
        World.join(Training(device="cpu", threads=1)),
    ):
        pass
