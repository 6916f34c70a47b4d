"""A rank knows where it lies along each axis of the mesh, as the groups that it works with do."""

from hypothesis import given
from hypothesis import strategies as st

from lakh.spec import Mesh
from lakh.spec.mesh import AXES, Axis
from lakh.trainer.world import ranks_by_axis


@given(st.permutations(AXES))
def test_groups_and_coordinates_agree_in_any_order_of_the_axes(order: list[Axis]) -> None:
    mesh = Mesh(dp_replicate=2, pp=3, dp_shard=2, cp=2, tp=2, order=tuple(order))
    ranks = ranks_by_axis(mesh)
    for rank in range(mesh.ranks):
        at = mesh.coordinates(rank)
        assert int(ranks[tuple(at[axis] for axis in AXES)]) == rank
