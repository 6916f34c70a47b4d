"""Files that an earlier version wrote still load, and ten steps of training still give its losses."""

import json
from pathlib import Path

import pytest
import torch

from lakh import checkpoint, events
from lakh.spec import load_run
from lakh.tokens.loading.stream import TokenSet, TokenSetLoader
from lakh.trainer.loop import train

HERE = Path(__file__).parent


def test_a_token_set_of_format_1_loads_and_keeps_its_order() -> None:
    tokens = TokenSet.open(HERE / "tokens-1", "train")
    assert tokens.verify() == 2
    assert tokens.fingerprint == "7d1feaeacf24c8f3d44ca9dc942c8bc85d35903519c08a07da1e2f044005a7c7"
    rows = TokenSetLoader(tokens, sequence=16, seed=7).read_range(100, 2).tokens
    assert rows.tolist() == [
        [304, 17, 214, 214, 316, 297, 78, 319, 87, 78, 40, 78, 31, 23, 289, 27, 236],
        [296, 78, 289, 78, 32, 31, 78, 31, 23, 286, 27, 297, 44, 33, 40, 305, 274],
    ]


def test_a_checkpoint_of_format_1_loads() -> None:
    run, weights = checkpoint.read_model(HERE / "checkpoint-1")
    assert run.name == "golden"
    assert sum(tensor.numel() for tensor in weights.values()) == run.model.parameters
    total = sum(float(tensor.double().abs().sum()) for tensor in weights.values())
    assert total == pytest.approx(429.38898623985006, rel=1e-9)  # reading is exact; the sum's order is not
    assert torch.isfinite(weights["embed.weight"]).all()


def test_ten_losses_are_those_of_before(tmp_path: Path) -> None:
    run = load_run(HERE / "checkpoint-1", [f"data.tokens={HERE / 'tokens-1'}"])
    train(run, tmp_path / "run")
    found = [e.loss for e in events.read(tmp_path / "run", rank=0) if isinstance(e, events.StepDone)]
    # Another CPU sums in another order: float32 rounding, amplified over ten steps, stays far below 1e-3.
    assert found == pytest.approx(json.loads((HERE / "losses.json").read_text()), abs=1e-3)
