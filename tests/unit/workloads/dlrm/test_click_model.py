"""DLRM and DCNv2 learn, with lakh's tables as with torch's; AUC."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lakh.errors import ConfigError, UserError
from lakh.spec.embedding import ClickNetwork, EmbeddingTable
from lakh.workloads.dlrm.auc import area_under_curve
from lakh.workloads.dlrm.batch import ClickBatch
from lakh.workloads.dlrm.embedding.bags import EmbeddingBags
from lakh.workloads.dlrm.embedding.jagged import JaggedBags
from lakh.workloads.dlrm.loss import click_loss
from lakh.workloads.dlrm.model import ClickModel

TABLES = [EmbeddingTable(name=name, rows=rows, width=8, optimizer="sgd") for name, rows in (("user", 20), ("item", 30))]
NETWORKS = {
    "dlrm": ClickNetwork(dense_features=2, bottom=(8,), top=(16,)),
    "dcnv2": ClickNetwork(interaction="cross", dense_features=2, bottom=(8,), top=(16,), cross_layers=2, cross_rank=4),
}


class TorchTables(nn.Module):
    """The same tables as EmbeddingBags of torch with dense gradients."""

    def __init__(self, tables: EmbeddingBags) -> None:
        super().__init__()
        self.weights = nn.ParameterList(state.weights.clone() for state in tables.states)  # type: ignore[operator, union-attr]

    def forward(self, bags: JaggedBags) -> Tensor:
        parts = []
        for feature, weight in enumerate(self.weights):
            one = bags.select(feature, feature + 1)
            parts.append(nn.functional.embedding_bag(one.ids, weight, one.offsets[:-1], mode="sum"))
        return torch.cat(parts, dim=1)


def clicks(batch: int = 256) -> ClickBatch:
    """Whether user and item have the same parity decides."""
    random = torch.Generator().manual_seed(0)
    users, items = (torch.randint(0, rows, (batch,), generator=random) for rows in (20, 30))
    bags = JaggedBags.of_lengths(torch.cat([users, items]), torch.ones(2, batch, dtype=torch.int64))
    return ClickBatch(bags, torch.randn(batch, 2, generator=random), ((users + items) % 2).float())


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_training_equals_the_same_network_with_tables_of_torch(name: str) -> None:
    batch, lr = clicks(), 0.3
    ours = ClickModel(NETWORKS[name], TABLES, EmbeddingBags(TABLES, seed=1), seed=2)
    theirs = ClickModel(NETWORKS[name], TABLES, TorchTables(EmbeddingBags(TABLES, seed=1)), seed=2)
    ours_sgd, theirs_sgd = torch.optim.SGD(ours.dense_parameters(), lr), torch.optim.SGD(theirs.parameters(), lr)
    for _ in range(20):
        losses = []
        for model, optimizer in ((ours, ours_sgd), (theirs, theirs_sgd)):
            optimizer.zero_grad()
            loss = click_loss(model(batch), batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        ours.tables.step(lr)  # type: ignore[operator]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_models_learn_an_interaction_of_two_features(name: str) -> None:
    """Each feature alone predicts nothing."""
    batch = clicks()
    tables = [EmbeddingTable(name=t.name, rows=t.rows, width=8) for t in TABLES]
    model = ClickModel(NETWORKS[name], tables, EmbeddingBags(tables, seed=1), seed=2)
    optimizer = torch.optim.AdamW(model.dense_parameters(), lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        click_loss(model(batch), batch).backward()
        optimizer.step()
        model.tables.step(0.1)  # type: ignore[operator]
    assert area_under_curve(model(batch).detach(), batch.labels_B) > 0.97


def test_tables_of_several_widths_are_refused() -> None:
    tables = [TABLES[0], EmbeddingTable(name="wide", rows=4, width=16)]
    with pytest.raises(ConfigError, match=r"are \[8, 16\] wide"):
        ClickModel(NETWORKS["dlrm"], tables, EmbeddingBags(tables, seed=1), seed=1)


def test_auc_counts_pairs() -> None:
    random = torch.Generator().manual_seed(3)
    scores, labels = torch.randint(0, 9, (80,), generator=random).float(), torch.rand(80, generator=random).round()
    clicked, other = scores[labels > 0][:, None], scores[labels == 0][None]
    by_pairs = (clicked > other).double() + (clicked == other).double() / 2
    assert area_under_curve(scores, labels) == pytest.approx(float(by_pairs.mean()))
    with pytest.raises(UserError, match="0 clicks and 3 other"):
        area_under_curve(torch.zeros(3), torch.zeros(3))
