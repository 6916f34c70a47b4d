"""Combinations that the trainer does not support are refused with the reason before anything is built."""

import dataclasses
from typing import Any

import pytest

from lakh.errors import InfeasiblePlan
from lakh.spec import Data, Mesh, Model, Run, Training
from lakh.spec.model import Experts
from lakh.spec.parallel_check import check_parallelism

MODEL = Model(layers=4, width=64, heads=8, kv_heads=4, ffn=96, vocab=128, context=64, tied=False)


def run(
    *,
    tied: bool = False,
    sequence: int = 32,
    train: dict[str, Any] | None = None,
    experts: Experts | None = None,
    **mesh: Any,
) -> Run:
    return Run(
        name="cut",
        model=dataclasses.replace(MODEL, tied=tied, experts=experts),
        mesh=Mesh(**mesh),
        data=Data(sequence=sequence, batch=8, micro_batch=1),
        train=Training(**(train or {})),
    )


@pytest.mark.parametrize(
    ("refused", "world", "words"),
    [
        (run(pp=2, pp_schedule="zero_bubble"), 4, "wrong gradients without an error"),
        (run(pp=2, tied=True), 2, "model.tied makes them one matrix"),
        (run(pp=4, pp_schedule="interleaved"), 4, "8 stages .* do not divide model.layers 4"),
        (run(tp=4, cp=2, sequence=36), 8, "do not divide sequences of 18 tokens"),
        (run(train={"compile": "model"}), 2, 'train.compile: 2 ranks .* set train.compile = "block"'),
        (run(dp_replicate=2, train={"replica_codec": "int8"}), 2, "needs train.backend = c3"),
        (run(pp=4, dp_replicate=4), 16, "needs at least 4"),
        (run(pp=2, train={"reduce_dtype": "float64"}), 2, "float64: a pipeline adds the gradients"),
        (
            run(dp_replicate=2, train={"reduce_dtype": "float64", "replica_codec": "int8", "backend": "c3"}),
            2,
            "rounds what replicas exchange",
        ),
    ],
)
def test_unsupported_combinations_are_refused(refused: Run, world: int, words: str) -> None:
    with pytest.raises(InfeasiblePlan, match=words):
        check_parallelism(refused, world)


def test_a_supported_mesh_is_returned_resolved() -> None:
    assert check_parallelism(run(pp=2, tp=2), 8) == Mesh(dp_shard=2, pp=2, tp=2)
    assert check_parallelism(run(train={"compile": "model"}), 1).ranks == 1


def of_experts(count: int = 4, *, capacity: float = 0.0, train: dict[str, Any] | None = None, **mesh: Any) -> Run:
    return run(train=train, experts=Experts(count=count, top_k=2, ffn=50, capacity=capacity), **mesh)


@pytest.mark.parametrize(
    ("refused", "world", "words"),
    [
        (of_experts(ep=4), 2, "mesh.ep: 4 does not divide the 2 ranks of dp_shard x cp"),
        (of_experts(count=2, ep=2, tp=2), 16, "4 ranks share 1 experts and divide neither"),
        (
            of_experts(ep=2, dp_replicate=2, train={"replica_codec": "int8", "backend": "c3"}),
            4,
            "experts have their own",
        ),
        (of_experts(ep=2, train={"reduce_dtype": "float64"}), 2, "added by their own ranks"),
        (of_experts(capacity=1.0, cp=2), 2, "model.experts.capacity: .* each of 2 context-parallel ranks"),
    ],
)
def test_experts_that_cannot_be_split_are_refused(refused: Run, world: int, words: str) -> None:
    with pytest.raises(InfeasiblePlan, match=words):
        check_parallelism(refused, world)


def test_experts_are_split_over_shards_and_context_ranks() -> None:
    mesh = check_parallelism(of_experts(ep=4, cp=2), 8)
    assert (mesh.ep, mesh.expert_shards, str(mesh)) == (4, 2, "dp_shard=4 x cp=2 x ep=4")
