"""The model of `init_from` must be that of the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lakh.errors import UserError
from lakh.spec.model import Model
from lakh.trainer.initial_weights import read_weights
from lakh.workloads.code.formats import hf
from lakh.workloads.code.model import CodeModel, init_weights

LEARNED = Model(
    layers=1, width=32, heads=2, kv_heads=1, ffn=32, vocab=64, context=48, family="gpt_bigcode", gated=False
)


def save(spec: Model, folder: Path) -> dict[str, torch.Tensor]:
    model = CodeModel(spec)
    init_weights(model, 1)
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    hf.save(folder, spec, weights, None)
    return weights


def test_a_run_may_change_the_context_but_not_the_number_of_learned_positions(tmp_path: Path) -> None:
    weights = save(LEARNED, tmp_path / "learned")
    found = read_weights(str(tmp_path / "learned"), LEARNED)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    with pytest.raises(UserError, match=r"model\.context = 64: .* has 48; set model\.context = 48"):
        read_weights(str(tmp_path / "learned"), replace(LEARNED, context=64))
    rotated = replace(LEARNED, family="starcoder2")
    save(rotated, tmp_path / "rotated")
    assert read_weights(str(tmp_path / "rotated"), replace(rotated, context=64))
