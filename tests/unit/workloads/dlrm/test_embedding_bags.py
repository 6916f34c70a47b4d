"""Pooled lookups and sparse updates against plain torch: the same sums, each row updated once, the same bits always."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from torch import Tensor

from lakh.errors import ConfigError, UserError
from lakh.spec.embedding import EmbeddingTable, TableSlice
from lakh.workloads.dlrm.embedding.bags import EmbeddingBags, SparseSettings
from lakh.workloads.dlrm.embedding.jagged import JaggedBags

BATCH = 6


def tables(optimizer: str = "rowwise-adagrad") -> list[EmbeddingTable]:
    sizes = [("user", 50, 8, 1), ("item", 3000, 16, 2), ("one", 1, 4, 1)]
    return [
        EmbeddingTable(name=name, rows=rows, width=width, features=features, optimizer=optimizer)  # type: ignore[arg-type]
        for name, rows, width, features in sizes
    ]


def bags_of(seed: int, batch: int = BATCH) -> JaggedBags:
    """Bags of 0 to 5 ids with many repetitions."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (4, batch), generator=random)
    rows = torch.tensor([50, 3000, 3000, 1]).repeat_interleave(lengths.sum(1))
    ids = (torch.rand(len(rows), generator=random) ** 4 * rows).long()
    return JaggedBags.of_lengths(ids, lengths)


def pooled_by_torch(weights: list[Tensor], bags: JaggedBags) -> Tensor:
    parts = []
    for feature, table in enumerate([0, 1, 1, 2]):
        one = bags.select(feature, feature + 1)
        parts.append(torch.nn.functional.embedding_bag(one.ids, weights[table], one.offsets[:-1], mode="sum"))
    return torch.cat(parts, dim=1)


def weights_of(module: EmbeddingBags) -> list[Tensor]:
    return [state.weights.clone() for state in module.states]  # type: ignore[operator, union-attr]


def reference_update(
    weights: list[Tensor], states: list[dict[str, Tensor]], bags: JaggedBags, grad_BC: Tensor, lr: float, kind: str,
    step: int,
) -> None:  # fmt: skip
    """The formulas in float64 over the dense gradient of torch's autograd."""
    leaves = [weight.clone().requires_grad_() for weight in weights]
    pooled_by_torch(leaves, bags).backward(grad_BC.double())
    for weight, leaf, state in zip(weights, leaves, states, strict=True):
        grad = leaf.grad
        assert grad is not None
        touched = grad.abs().sum(1) > 0
        square = grad.square().mean(1)
        if kind == "sgd":
            weight -= lr * grad
        elif kind == "rowwise-adagrad":
            state["square"] += square
            weight -= torch.where(touched, lr / (state["square"].sqrt() + 1e-8), 0)[:, None] * grad
        else:
            state["square"] = torch.where(touched, 0.999 * state["square"] + 0.001 * square, state["square"])
            mean = 0.9 * state["mean"] + 0.1 * grad
            state["mean"] = torch.where(touched[:, None], mean, state["mean"])
            rate = lr / (1 - 0.9**step) / ((state["square"] / (1 - 0.999**step)).sqrt() + 1e-8)
            weight -= torch.where(touched[:, None], rate[:, None] * state["mean"], 0)


@pytest.mark.slow  # compiles the kernels if the cache is empty
def test_pooled_lookups_are_those_of_torch() -> None:
    module, bags = EmbeddingBags(tables(), seed=1), bags_of(0)
    torch.testing.assert_close(module(bags), pooled_by_torch(weights_of(module), bags))
    assert module.columns == 8 + 2 * 16 + 4


@pytest.mark.parametrize("kind", ["sgd", "rowwise-adagrad", "rowwise-adam"])
def test_updates_match_the_formulas(kind: str) -> None:
    module = EmbeddingBags(tables(kind), seed=1)
    weights = [weight.double() for weight in weights_of(module)]
    states = [{"square": torch.zeros(len(w)).double(), "mean": torch.zeros_like(w)} for w in weights]
    for step in range(1, 6):
        bags = bags_of(step)
        grad_BC = torch.randn(BATCH, module.columns, generator=torch.Generator().manual_seed(step))
        module(bags).backward(grad_BC)
        module.step(lr=0.05)
        reference_update(weights, states, bags, grad_BC, 0.05, kind, step)
    for ours, theirs in zip(weights_of(module), weights, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)


def take(bags: JaggedBags, samples: torch.Tensor) -> JaggedBags:
    """The bags of some samples, in the given order."""
    pieces = bags.ids.split(bags.lengths_FB.reshape(-1).tolist())
    ids = [pieces[feature * bags.batch + int(s)] for feature in range(bags.features) for s in samples]
    return JaggedBags.of_lengths(torch.cat(ids), bags.lengths_FB[:, samples])


def test_micro_batches_add_up_to_the_bits_of_one_batch() -> None:
    whole, parts = EmbeddingBags(tables(), seed=1), EmbeddingBags(tables(), seed=1)
    bags, grad_BC = bags_of(3), torch.randn(BATCH, whole.columns)
    whole(bags).backward(grad_BC)
    for first, end in ((0, 2), (2, 6)):
        parts(take(bags, torch.arange(first, end))).backward(grad_BC[first:end])
    whole.step(lr=0.1)
    parts.step(lr=0.1)
    for one, other in zip(weights_of(whole), weights_of(parts), strict=True):
        assert torch.equal(one, other)


def test_threads_do_not_change_the_bits() -> None:
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            module = EmbeddingBags(tables("rowwise-adam"), seed=1)
            for step in range(3):
                module(bags_of(step, 64)).backward(torch.full((64, module.columns), 0.3))
                module.step(lr=0.1)
            results.append(weights_of(module))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_discarded_gradients_change_nothing() -> None:
    module = EmbeddingBags(tables(), seed=1)
    before = weights_of(module)
    module(bags_of(0)).backward(torch.ones(BATCH, module.columns))
    module.discard()
    module.step(lr=1.0)
    assert all(torch.equal(one, other) for one, other in zip(before, weights_of(module), strict=True))


def test_state_dict_restores_a_module() -> None:
    """The next update of a restored module has the same bits, so weights, moments and the step count are all there."""
    module, restored = (EmbeddingBags(tables("rowwise-adam"), seed=seed) for seed in (1, 2))
    for step in range(3):
        module(bags_of(step)).backward(torch.ones(BATCH, module.columns))
        module.step(lr=0.1)
    restored.load_state_dict(module.state_dict())
    for each in (module, restored):
        each(bags_of(9)).backward(torch.ones(BATCH, each.columns))
        each.step(lr=0.1)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(module), weights_of(restored), strict=True))


def test_a_slice_starts_with_the_values_of_its_table() -> None:
    table = tables()[1]
    whole = weights_of(EmbeddingBags([table], seed=4))[0]
    blocks = SparseSettings(state_width=4)
    part = weights_of(EmbeddingBags([TableSlice(table, (100, 200), (4, 12))], seed=4, settings=blocks))[0]
    assert torch.equal(part, whole[100:200, 4:12])
    assert whole.abs().max() <= 3000**-0.5
    assert abs(float(whole.mean())) < 1e-3
    assert not torch.equal(whole, weights_of(EmbeddingBags([table], seed=5))[0])


@pytest.mark.parametrize("kind", ["rowwise-adagrad", "rowwise-adam"])
def test_slices_of_columns_have_the_bits_of_the_table(kind: str) -> None:
    """With one state for each block of 8 columns, a table does not depend on how it is cut at multiples of 8."""
    table, blocks = EmbeddingTable(name="t", rows=40, width=24, optimizer=kind), SparseSettings(state_width=8)  # type: ignore[arg-type]
    whole = EmbeddingBags([table], seed=1, settings=blocks)
    parts = [EmbeddingBags([TableSlice(table, (0, 40), cut)], seed=1, settings=blocks) for cut in ((0, 8), (8, 24))]
    random = torch.Generator().manual_seed(1)
    for _ in range(3):
        ids = torch.randint(0, 40, (30,), generator=random)
        bags = JaggedBags.of_lengths(ids, torch.full((1, 10), 3))
        grad_BC = torch.randn(10, 24, generator=random)
        for module, grad in ((whole, grad_BC), (parts[0], grad_BC[:, :8]), (parts[1], grad_BC[:, 8:])):
            module(bags).backward(grad)
            module.step(lr=0.1)
    joined = torch.cat([weights_of(part)[0] for part in parts], dim=1)
    assert torch.equal(joined, weights_of(whole)[0])
    squares = [part.held_tensors()["t", "square"] for part in parts]
    assert torch.equal(torch.cat([part.local for part in squares], dim=1), whole.held_tensors()["t", "square"].local)
    assert [(part.shape, part.offset) for part in squares] == [((40, 3), (0, 0)), ((40, 3), (0, 1))]
    with pytest.raises(UserError, match="not whole blocks of 8"):
        EmbeddingBags([TableSlice(table, (0, 40), (4, 24))], seed=1, settings=blocks)


def test_bad_ids_name_table_sample_and_range() -> None:
    module = EmbeddingBags(tables()[:1], seed=1)
    for wrong in (50, -1):
        bags = JaggedBags.of_lengths(torch.tensor([3, wrong]), torch.tensor([[1, 1]]))
        with pytest.raises(UserError, match=rf"table user, sample 1: id {wrong} is not in \[0, 50\)"):
            module(bags)


def test_bad_bags_and_tables_are_refused() -> None:
    with pytest.raises(UserError, match="add up to 3, there are 2 ids"):
        JaggedBags.of_lengths(torch.tensor([1, 2]), torch.tensor([[2, 1]]))
    with pytest.raises(UserError, match="int64"):
        JaggedBags.of_lengths(torch.tensor([1, 2], dtype=torch.int32), torch.tensor([[1, 1]]))
    with pytest.raises(UserError, match="has 1 features, the tables have 4"):
        EmbeddingBags(tables(), seed=1)(JaggedBags.of_lengths(torch.tensor([1]), torch.tensor([[1]])))
    with pytest.raises(UserError, match="weights of type bf16"):
        EmbeddingBags([EmbeddingTable(name="t", rows=2, width=4, dtype="bf16")], seed=1)
    with pytest.raises(ConfigError, match="twice"):
        EmbeddingBags([*tables(), *tables()], seed=1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_ids_of_features_are_counted(device: str) -> None:
    """On a device that the host cannot read, too: the sizes of the features are known since the copy."""
    bags = JaggedBags.of_lengths(torch.arange(9), torch.tensor([[2, 0], [1, 3], [0, 3]])).to(torch.device(device))
    assert [bags.count_ids(features) for features in ([2, 0], [1], [0, 1, 2], [])] == [5, 4, 9, 0]


def test_empty_batch() -> None:
    module = EmbeddingBags(tables(), seed=1, settings=SparseSettings(eps=1e-6))
    bags = JaggedBags.of_lengths(torch.zeros(0, dtype=torch.int64), torch.zeros(4, 3, dtype=torch.int64))
    out = module(bags)
    assert torch.equal(out, torch.zeros(3, module.columns))
    out.backward(torch.ones_like(out))
    module.step(lr=0.1)


@pytest.mark.skipif(importlib.util.find_spec("fbgemm_gpu") is None, reason="needs fbgemm; docs/how-to/dlrm.md")
def test_rowwise_adagrad_is_that_of_fbgemm() -> None:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    table = EmbeddingTable(name="t", rows=100, width=16)
    ours = EmbeddingBags([table], seed=1)
    theirs = SplitTableBatchedEmbeddingBagsCodegen(
        [(100, 16, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.05,
        eps=1e-8,
    )
    theirs.split_embedding_weights()[0].copy_(weights_of(ours)[0])
    for step in range(5):
        lengths = torch.randint(0, 6, (1, 32), generator=torch.Generator().manual_seed(step))
        ids = torch.randint(0, 100, (int(lengths.sum()),), generator=torch.Generator().manual_seed(step))
        bags = JaggedBags.of_lengths(ids, lengths)
        grad_BC = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        ours(bags).backward(grad_BC)
        ours.step(lr=0.05)
        theirs(bags.ids, bags.offsets).backward(grad_BC)
    torch.testing.assert_close(weights_of(ours)[0], theirs.split_embedding_weights()[0].detach(), rtol=1e-5, atol=1e-6)


def test_the_gradient_norm_adds_equal_rows_and_its_scale_applies_to_the_update() -> None:
    table = EmbeddingTable(name="t", rows=50, width=8, optimizer="sgd")
    random = torch.Generator().manual_seed(3)
    batches = [
        JaggedBags.of_lengths(torch.randint(0, 50, (24,), generator=random), torch.full((1, 8), 3)) for _ in range(2)
    ]
    grads = [torch.randn(8, 8, generator=random) for _ in batches]
    bags = EmbeddingBags([table], seed=1)
    weights = bags.held_tensors()["t", "weights"].local
    dense = weights.clone().requires_grad_()
    for ids, grad in zip(batches, grads, strict=True):  # two micro-batches of one step
        bags(ids).backward(grad)
        torch.nn.functional.embedding_bag(ids.ids, dense, ids.offsets[:-1], mode="sum").backward(grad)
    assert dense.grad is not None
    assert bags.gradient_square() == pytest.approx(float(dense.grad.double().square().sum()), rel=1e-6)
    bags.step(0.1, 0.25)
    torch.testing.assert_close(weights, (dense - 0.1 * 0.25 * dense.grad).detach())
    assert bags.gradient_square() == 0.0
    bags(batches[0]).backward(torch.full((8, 8), float("nan")))
    assert math.isnan(bags.gradient_square())
