"""After a loss: which ranks continue, at which step, and who takes whose tensors."""

from itertools import permutations

import pytest

from lakh.spec import Mesh
from lakh.spec.mesh import AXES
from lakh.trainer.recovery.replicas import ReplicaLayout, TensorProgress, choose_step

TWO_BY_TWO = ReplicaLayout(Mesh(dp_replicate=2, dp_shard=2))  # replicas {0, 1} and {2, 3}; parts {0, 2} and {1, 3}


def progress(**steps: int) -> dict[int, TensorProgress]:
    """progress(r0=5, r1=-5): rank 0 at step 5, rank 1 interrupted inside the update after step 5."""
    return {int(name[1:]): TensorProgress(abs(step), is_consistent=step >= 0) for name, step in steps.items()}


@pytest.mark.parametrize(
    ("present", "whole"),
    [((0, 1, 2), (0, 1)), ((0, 2, 3), (2, 3)), ((0, 1, 2, 3), (0, 1, 2, 3)), ((0, 3), ()), ((), ())],
)
def test_a_replica_without_one_of_its_ranks_leaves(present: tuple[int, ...], whole: tuple[int, ...]) -> None:
    assert TWO_BY_TWO.whole_replicas(present) == whole
    assert not whole or TWO_BY_TWO.mesh_of(whole).ranks == len(whole)


@pytest.mark.parametrize(
    ("found", "step", "sources"),
    [
        (progress(r0=5, r1=5, r2=5, r3=5), 5, {}),
        (progress(r0=5, r1=5), 5, {}),
        (progress(r0=6, r1=5, r2=5, r3=6), 6, {1: 3, 2: 0}),  # parts of the new step on different replicas
        (progress(r0=6, r1=5, r2=5, r3=5), 5, {0: 2}),  # the new step is nowhere complete: back to the old one
        (progress(r0=-5, r1=5, r2=5, r3=5), 5, {0: 2}),
        (progress(r0=-5, r1=5, r2=-5, r3=5), None, {}),  # one part is consistent nowhere
        (progress(r0=6, r1=5), None, {}),
    ],
)
def test_the_newest_step_that_is_consistent_for_every_part(found, step: int | None, sources: dict[int, int]) -> None:
    assert choose_step(found, TWO_BY_TWO) == step
    if step is not None:
        assert TWO_BY_TWO.sources(found, step) == sources


@pytest.mark.parametrize("order", list(permutations(AXES))[::7])
def test_added_replicas_keep_the_parts_for_any_numbering(order) -> None:
    layout = ReplicaLayout(Mesh(dp_replicate=2, dp_shard=2, tp=2, order=order))
    members = layout.whole_replicas([*range(8), *range(8, 12), *range(16, 20)])  # replica 3 left
    after = ReplicaLayout(layout.mesh_of(members))
    assert sorted(members) == [*range(12), *range(16, 20)]
    assert after.mesh.ranks == 16
    assert [after.part_of(rank) for rank in range(16)] == [layout.part_of(member) for member in members]


@pytest.mark.parametrize("order", list(permutations(AXES))[::7])
def test_the_remaining_ranks_keep_their_parts_for_any_numbering(order) -> None:
    layout = ReplicaLayout(Mesh(dp_replicate=3, dp_shard=2, tp=2, order=order))
    for lost in range(layout.mesh.ranks):
        members = layout.whole_replicas(set(range(layout.mesh.ranks)) - {lost})
        after = ReplicaLayout(layout.mesh_of(members))
        assert len(members) == after.mesh.ranks == 8
        assert [after.part_of(rank) for rank in range(8)] == [layout.part_of(member) for member in members]
