"""The ranks of a mesh, and meshes that do not divide a model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.errors import ConfigError, InfeasiblePlan
from lakh.spec import Mesh, Model

MODEL = Model(layers=8, width=64, heads=8, kv_heads=4, ffn=128, vocab=256, context=64)
sizes = st.integers(1, 4)


@given(replicate=sizes, tp=sizes, pp=sizes, cp=sizes, shard=sizes)
def test_dp_shard_minus_one_takes_the_remaining_ranks(replicate: int, tp: int, pp: int, cp: int, shard: int) -> None:
    world = replicate * tp * pp * cp * shard
    mesh = Mesh(dp_replicate=replicate, tp=tp, pp=pp, cp=cp).resolve(world)
    assert mesh.dp_shard == shard
    assert mesh.ranks == world
    assert mesh.data_ranks == replicate * shard
    assert mesh.resolve(world) == mesh


def test_a_wrong_number_of_ranks_is_refused_with_the_right_one() -> None:
    with pytest.raises(InfeasiblePlan, match="multiples of 4 ranks and there are 6"):
        Mesh(tp=4).resolve(6)
    with pytest.raises(InfeasiblePlan, match=r"needs 8 ranks and there are 4; start 8 ranks"):
        Mesh(tp=4, dp_shard=2).resolve(4)


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        (Mesh(tp=3), "mesh.tp: 3 does not divide model.heads 8; choose one of 1, 2, 4, 8"),
        (Mesh(tp=8), "mesh.tp: 8 does not divide model.kv_heads 4"),
        (Mesh(pp=3), "mesh.pp: 3 does not divide model.layers 8"),
        (Mesh(cp=5), "mesh.cp"),
        (Mesh(ep=2), "no experts"),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_names_the_setting(mesh: Mesh, words: str) -> None:
    with pytest.raises(InfeasiblePlan, match=words):
        mesh.check(MODEL)


def test_tensor_parallel_ranks_share_a_table_of_learned_positions() -> None:
    sizes = {"family": "gpt_bigcode", "gated": False, "heads": 8, "kv_heads": 8, "ffn": 512}
    Mesh(tp=4).check(Model(**sizes, context=512))
    with pytest.raises(InfeasiblePlan, match=r"mesh.tp: 4 does not divide model.context 510"):
        Mesh(tp=4).check(Model(**sizes, context=510))


def test_a_mesh_of_no_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 is not a number of ranks"):
        Mesh(tp=0)
