"""Tables with a cache of rows have the bits of tables without one, for every policy and tier."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lakh.errors import InfeasiblePlan, UserError
from lakh.spec.embedding import CachePolicy, EmbeddingTable, TableSlice
from lakh.workloads.dlrm.embedding.bags import EmbeddingBags
from lakh.workloads.dlrm.embedding.cached_bags import CachedEmbeddingBags, CachedRows
from lakh.workloads.dlrm.embedding.jagged import JaggedBags
from lakh.workloads.dlrm.embedding.row_cache import RowCache

BATCH, STEPS = 8, 30


def tables() -> list[EmbeddingTable]:
    return [
        EmbeddingTable(name="item", rows=3000, width=8, features=2, optimizer="rowwise-adam"),
        EmbeddingTable(name="user", rows=500, width=8, optimizer="rowwise-adagrad"),
        EmbeddingTable(name="tiny", rows=3, width=8, optimizer="sgd"),
    ]


def stream() -> list[JaggedBags]:
    """Batches with hot and cold rows."""
    random = np.random.default_rng(1)
    batches = []
    for _ in range(STEPS):
        ids = [(rows * random.random(BATCH * 2) ** 4).astype(np.int64) for rows in (3000, 3000, 500, 3)]
        batches.append(JaggedBags.of_lengths(torch.from_numpy(np.concatenate(ids)), torch.full((4, BATCH), 2)))
    return batches


@pytest.mark.parametrize("policy", ["lru", "lfu", "lookahead"])
@pytest.mark.parametrize("in_file", [False, True])
def test_a_cache_changes_no_bit(policy: CachePolicy, in_file: bool, tmp_path: Path) -> None:
    plain = EmbeddingBags(tables(), seed=1)
    folder = str(tmp_path) if in_file else None
    slots = {"item": 80, "user": 40}  # "tiny" is whole in memory
    caches = {name: CachedRows(slots=count, folder=folder, policy=policy) for name, count in slots.items()}
    cached = CachedEmbeddingBags(tables(), seed=1, caches=caches)
    batches = stream()
    for step, bags in enumerate(batches):
        grad_BC = torch.randn(BATCH, plain.columns, generator=torch.Generator().manual_seed(step))
        ours, theirs = cached(bags, batches[step + 1 : step + 4]), plain(bags)
        assert torch.equal(ours, theirs)
        ours.backward(grad_BC)
        theirs.backward(grad_BC)
        assert cached.gradient_square() == plain.gradient_square()  # in any order of the rows
        cached.step(0.05)
        plain.step(0.05)
    assert 0 < cached.hit_rate < 1
    for name, held in cached.held_tensors().items():
        assert torch.equal(held.local, plain.held_tensors()[name].local), name
    assert torch.equal(cached(batches[0]), plain(batches[0]))  # the caches were empty


def test_a_cache_of_a_slice_holds_its_rows_and_columns() -> None:
    part = TableSlice(tables()[0], (1000, 1400), (0, 8))
    plain = EmbeddingBags([part], seed=1)
    cached = CachedEmbeddingBags([part], seed=1, caches={"item": CachedRows(slots=7)})
    bags = JaggedBags.of_lengths(torch.tensor([0, 399, 5, 5, 17, 200]), torch.tensor([[2, 1], [0, 3]]))
    for tables_of in (plain, cached):
        tables_of(bags).square().sum().backward()
        tables_of.step(0.1)
    for name, held in plain.held_tensors().items():
        mine = cached.held_tensors()[name]
        assert (mine.shape, mine.offset) == (held.shape, held.offset)
        assert torch.equal(mine.local, held.local)


def test_an_evaluation_keeps_no_rows() -> None:
    cached = CachedEmbeddingBags(tables()[1:2], seed=1, caches={"user": CachedRows(slots=2)}).eval()
    for first in range(0, 500, 2):  # more rows than slots, without a step
        cached(JaggedBags.of_lengths(torch.tensor([first, first + 1]), torch.tensor([[2]])))


def test_looking_ahead_misses_least() -> None:
    """Belady's choice is optimal if it knows all coming batches."""
    batches, rates = stream(), {}
    policies: tuple[CachePolicy, ...] = ("lru", "lfu", "lookahead")
    for policy in policies:
        cache = RowCache(
            "t", {"weights": np.zeros((3000, 4), np.float32)}, {"weights": np.zeros((60, 4), np.float32)}, policy
        )
        rows = [np.unique(bags.select(0, 2).ids.numpy()) for bags in batches]
        for step, wanted in enumerate(rows):
            cache.admit(wanted, rows[step + 1 :])
            cache.release()
        rates[policy] = cache.hits / (cache.hits + cache.misses)
    assert rates["lookahead"] >= max(rates["lru"], rates["lfu"])
    assert rates["lookahead"] > rates["lru"]


def test_a_cache_that_is_too_small_and_bad_ids_are_refused() -> None:
    cached = CachedEmbeddingBags(tables()[1:2], seed=1, caches={"user": CachedRows(slots=2)})
    bags = JaggedBags.of_lengths(torch.tensor([1, 2, 3]), torch.tensor([[3]]))
    with pytest.raises(InfeasiblePlan, match="table user: a step uses 3 rows, its cache holds 2"):
        cached(bags)
    with pytest.raises(UserError, match=r"table user: id 500 is not in \[0, 500\)"):
        cached(JaggedBags.of_lengths(torch.tensor([500]), torch.tensor([[1]])))
