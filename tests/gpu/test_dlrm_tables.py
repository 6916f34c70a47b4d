"""Embedding tables on the GPU: lookups and exact updates are those of the CPU, with the same bits in every run.

Without a GPU, Triton's interpreter can run the kernels: TRITON_INTERPRET=1, where Triton is installed.
"""

import os

import pytest
import torch

from lakh.errors import UserError
from lakh.spec.embedding import EmbeddingTable, TableSlice
from lakh.workloads.dlrm.embedding.bags import EmbeddingBags
from lakh.workloads.dlrm.embedding.gpu_bags import GpuEmbeddingBags
from lakh.workloads.dlrm.embedding.jagged import JaggedBags

pytest.importorskip("triton", reason="needs Triton, which comes with torch for NVIDIA GPUs")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
BATCH, POOLING, RUNS = (4, 3, 2) if INTERPRETED else (2048, 20, 100)


def tables(optimizer: str, width: int = 20) -> list[EmbeddingTable]:
    shared = {"width": width, "optimizer": optimizer}
    return [
        EmbeddingTable(name="hot", rows=1, **shared),  # type: ignore[arg-type]
        EmbeddingTable(name="item", rows=50, features=2, **shared),  # type: ignore[arg-type]
        EmbeddingTable(name="user", rows=3000, **shared),  # type: ignore[arg-type]
    ]


def bags_of(seed: int) -> JaggedBags:
    """Bags of 0 to POOLING ids; the rows of small tables are looked up many times."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, POOLING + 1, (4, BATCH), generator=random)
    sizes = lengths.sum(1).tolist()
    ids = [torch.randint(0, rows, (n,), generator=random) for rows, n in zip((1, 50, 50, 3000), sizes, strict=True)]
    return JaggedBags.of_lengths(torch.cat(ids), lengths)


def on_device(bags: JaggedBags) -> JaggedBags:
    return JaggedBags(bags.ids.to(DEVICE), bags.offsets.to(DEVICE), bags.features)


def gradient_of(bags: JaggedBags, columns: int, seed: int) -> torch.Tensor:
    """Multiples of 1/64, so that f32 sums of thousands of them are exact in any order."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(-64, 65, (bags.batch, columns), generator=random) / 64


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise-adagrad", "rowwise-adam"])
def test_training_equals_the_cpu(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr("lakh.workloads.dlrm.embedding.triton_update.CHUNK", 2)  # hot rows have several chunks
    ours, theirs = GpuEmbeddingBags(tables(optimizer), seed=1, device=DEVICE), EmbeddingBags(tables(optimizer), seed=1)
    for step in range(2):
        bags = bags_of(step)
        grad_BC = gradient_of(bags, ours.columns, step)
        out, expected = ours(on_device(bags)), theirs(bags)
        # f32 sums of up to POOLING rows in another order
        torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)
        out.backward(grad_BC.to(DEVICE))
        expected.backward(grad_BC)
        ours.step(lr=0.01)
        theirs.step(lr=0.01)
    weights = torch.cat([theirs.held_tensors()[t.name, "weights"].local for t in tables(optimizer)])
    torch.testing.assert_close(ours.weights.cpu(), weights, rtol=1e-5, atol=1e-5)


def test_every_run_has_the_same_bits() -> None:
    bags, results = on_device(bags_of(5)), set()
    grad_BC = torch.randn(BATCH, 4 * 20, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for _ in range(RUNS):
        module = GpuEmbeddingBags(tables("rowwise-adagrad"), seed=1, device=DEVICE)
        module(bags).backward(grad_BC)
        module.step(lr=0.1)
        results.add((module.weights.cpu().numpy().tobytes(), module.square.cpu().numpy().tobytes()))
    assert len(results) == 1


def test_the_bits_of_a_table_do_not_depend_on_the_tables_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that every placement of whole tables has the same result. Random gradients: their sums depend on the order."""
    if INTERPRETED:
        monkeypatch.setattr("lakh.workloads.dlrm.embedding.triton_update.CHUNK", 2)
    bags, width = bags_of(6), 20
    grad_BC = torch.randn(BATCH, 4 * width, generator=torch.Generator().manual_seed(2))
    together = GpuEmbeddingBags(tables("rowwise-adagrad"), seed=1, device=DEVICE)
    together.keep_gradient(on_device(bags), grad_BC.to(DEVICE))
    together.step(lr=0.1)
    first = 0
    for table, features in zip(tables("rowwise-adagrad"), ((0, 1), (1, 3), (3, 4)), strict=True):
        alone = GpuEmbeddingBags([table], seed=1, device=DEVICE)
        columns = slice(features[0] * width, features[1] * width)
        alone.keep_gradient(on_device(bags.select(*features)), grad_BC[:, columns].to(DEVICE))
        alone.step(lr=0.1)
        assert torch.equal(together.weights[first : first + table.rows], alone.weights), table.name
        first += table.rows


def test_passes_add_up() -> None:
    """Two passes and one step update each row once, as on the CPU."""
    ours, theirs = (
        GpuEmbeddingBags(tables("rowwise-adam"), seed=1, device=DEVICE),
        EmbeddingBags(tables("rowwise-adam"), seed=1),
    )
    for number in range(2):
        bags = bags_of(number)
        grad_BC = gradient_of(bags, ours.columns, number)
        ours.keep_gradient(on_device(bags), grad_BC.to(DEVICE))
        theirs.keep_gradient(bags, grad_BC)
    assert ours.gradient_square() == pytest.approx(theirs.gradient_square(), rel=1e-6)
    ours.step(0.01, scale=0.5)
    theirs.step(0.01, scale=0.5)
    weights = torch.cat([theirs.held_tensors()[t.name, "weights"].local for t in tables("rowwise-adam")])
    torch.testing.assert_close(ours.weights.cpu(), weights, rtol=1e-5, atol=1e-5)


def test_an_id_out_of_range_changes_nothing() -> None:
    module = GpuEmbeddingBags(tables("sgd"), seed=1, device=DEVICE)
    before = module.weights.clone()
    for wrong in (-1, 50):
        ids, lengths = torch.tensor([0, 3, wrong, 5]), torch.tensor([[1], [1], [1], [1]])
        module(on_device(JaggedBags.of_lengths(ids, lengths))).sum().backward()
        with pytest.raises(UserError, match=r"feature 2, sample 0: has an id that is not in \[0, 50\)"):
            module.step(lr=0.1)
        module.discard()
    assert torch.equal(before, module.weights)


def test_tables_of_several_kinds_are_refused() -> None:
    with pytest.raises(UserError, match="one width and one optimizer"):
        GpuEmbeddingBags([*tables("sgd"), EmbeddingTable(name="x", rows=2, width=8)], seed=1, device=DEVICE)


def test_a_part_with_an_odd_width_is_refused() -> None:
    part = TableSlice(EmbeddingTable(name="x", rows=2, width=8, optimizer="sgd"), (0, 2), (0, 6))
    with pytest.raises(UserError, match=r"table x: has a part 6 columns wide"):
        GpuEmbeddingBags([part], seed=1, device=DEVICE)
