"""DPO: the loss and its gradients are those of the formula, and a pair's sides do not see each other."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lakh.errors import DataError, UserError
from lakh.spec.model import Model
from lakh.tokens.dataset.shards import CONTEXT
from lakh.workloads.code.batch import IGNORED
from lakh.workloads.code.model import CodeModel, init_weights
from lakh.workloads.code.preference import (
    PreferenceBatch,
    ReferenceFile,
    pair_log_probabilities,
    preference_losses,
    split_sides,
)

SPEC = Model(layers=2, width=32, heads=2, kv_heads=1, ffn=48, vocab=64, context=32, tied=False)
LENGTH = 12


def pairs(count: int = 3) -> np.ndarray:
    """Random pairs: prompts of 4 tokens, answers of 5 and 3 with their ends, padding."""
    generator = np.random.default_rng(0)
    rows = generator.integers(1, SPEC.vocab, (count, 2 * LENGTH + 1)).astype(np.int32)
    for start, answer in ((0, 5), (LENGTH, 3)):
        rows[:, start : start + 4] |= CONTEXT
        rows[:, start + 4 + answer : start + LENGTH] = CONTEXT
    rows[:, -1] = 0
    return rows


def plain_log_probability(model: CodeModel, row: np.ndarray, start: int) -> torch.Tensor:
    """Of the answer that begins at `start`, from the logits of this side alone."""
    side = torch.from_numpy(row[start : start + LENGTH].astype(np.int64))
    ids, is_answer = side & ~CONTEXT, side < CONTEXT
    logs = model(ids[None])[0].log_softmax(-1)
    picked = logs[:-1].gather(-1, ids[1:, None])[:, 0]
    return picked[is_answer[1:]].sum()


def make(spec: Model, *, seed: int = 1) -> CodeModel:
    model = CodeModel(spec)
    init_weights(model, seed)
    for parameter in model.parameters():
        parameter.data *= 4  # logits that are far from even
    return model


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, tied=True)], ids=["head", "tied"])
@pytest.mark.parametrize("frozen_head", [False, True])
def test_loss_and_gradients_are_those_of_the_papers_formula(spec: Model, frozen_head: bool) -> None:
    rows, beta = pairs(), 0.3
    reference_model, model = make(spec, seed=2), make(spec)
    if frozen_head:
        model.head_weight.requires_grad_(False)
    with torch.no_grad():
        reference = torch.stack(
            [torch.stack([plain_log_probability(reference_model, row, start) for start in (0, LENGTH)]) for row in rows]
        )
    inputs, targets = (torch.from_numpy(array) for array in split_sides(rows))
    batch = PreferenceBatch(inputs, targets, reference)
    loss = preference_losses(pair_log_probabilities(model, batch), batch.reference, beta).mean()
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    # Equation 7 of arXiv 2305.18290, pair by pair: the ratios of policy and reference, and -log of a plain sigmoid.
    terms = []
    for row, (ref_chosen, ref_rejected) in zip(rows, reference, strict=True):
        chosen, rejected = (plain_log_probability(model, row, start) for start in (0, LENGTH))
        ratio = beta * (chosen - ref_chosen) - beta * (rejected - ref_rejected)
        terms.append(-torch.log(1 / (1 + torch.exp(-ratio))))
    expected = torch.stack(terms).mean()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert loss.item() != pytest.approx(math.log(2), abs=1e-3)  # the two models differ
    expected.backward()
    assert len(found) == sum(p.grad is not None for p in model.parameters())
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(found[name], parameter.grad, atol=1e-6, rtol=1e-4), name


def test_an_untrained_policy_has_the_loss_of_a_coin() -> None:
    values = torch.randn(5, 2)
    assert torch.allclose(preference_losses(values, values, 0.1), torch.full((5,), math.log(2)))
    better = values + torch.tensor([1.0, -1.0])
    assert torch.allclose(preference_losses(better, values, 0.1), torch.full((5,), -math.log(1 / (1 + math.exp(-0.2)))))
    assert torch.allclose(preference_losses(better, values, 0.1), F.softplus(torch.full((5,), -0.2)))


def test_targets_are_the_answers_alone() -> None:
    inputs, targets = split_sides(pairs(1))
    assert inputs.shape == targets.shape == (2, LENGTH)
    assert (targets != IGNORED).sum(1).tolist() == [5, 3]
    assert inputs.max() < SPEC.vocab


def test_a_reference_is_found_by_the_tokens_of_its_pair(tmp_path: Path) -> None:
    rows, values = pairs(4), np.arange(8.0).reshape(4, 2)
    url = str(tmp_path / "reference.npz")
    ReferenceFile.write(url, rows, values)
    assert np.array_equal(ReferenceFile.read(url).of(rows[[2, 0]]), values[[2, 0]])
    other = rows[:1].copy()
    other[0, 5] ^= 1
    with pytest.raises(DataError, match="it was made for others"):
        ReferenceFile.read(url).of(other)
    Path(url).write_bytes(Path(url).read_bytes()[:100])
    with pytest.raises(DataError, match="is damaged"):
        ReferenceFile.read(url)
    with pytest.raises(UserError, match="does not exist"):
        ReferenceFile.read(str(tmp_path / "missing.npz"))
