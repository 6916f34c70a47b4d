"""On a GPU: the same run as on a CPU. Skipped where there is none."""

from pathlib import Path

import pytest
import torch

from lakh import events
from lakh.spec import load_run
from lakh.trainer.loop import train

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]


F32 = ["train.device=cuda", "train.precision=f32"]


def losses(run_dir: Path) -> list[float]:
    return [event.loss for event in events.read(run_dir, rank=0) if isinstance(event, events.StepDone)]


def test_bf16_on_the_gpu_learns_like_f32(tiny_recipe: Path, tmp_path: Path) -> None:
    train(load_run(tiny_recipe, F32), tmp_path / "f32")
    train(load_run(tiny_recipe, ["train.device=cuda", "train.precision=auto"]), tmp_path / "bf16")
    exact, rounded = losses(tmp_path / "f32"), losses(tmp_path / "bf16")
    # bf16 products round to 3 significant digits; over twelve steps the losses stay within two per cent.
    assert rounded == pytest.approx(exact, rel=0.02)
    assert exact[-1] < exact[0] - 1


def test_a_run_started_on_the_gpu_resumes_there(tiny_recipe: Path, tmp_path: Path) -> None:
    train(load_run(tiny_recipe, F32), tmp_path / "whole")
    train(load_run(tiny_recipe, [*F32, "train.steps=8"]), tmp_path / "parts")
    outcome = train(load_run(tiny_recipe, F32), tmp_path / "parts")
    assert outcome.step == 12
    assert torch.isfinite(torch.tensor(losses(tmp_path / "parts"))).all()


def test_a_rank_that_was_forked_uses_the_gpu_and_restarts_there(tiny_recipe: Path, tmp_path: Path, run_lakh) -> None:
    """The launcher's fork server must not have initialised CUDA."""
    settings = [word for setting in F32 for word in ("--set", setting)]
    run = ("train", str(tiny_recipe), "--out", str(tmp_path / "run"), *settings, "--fault", "kill(rank=0, step=6)")
    assert run_lakh(*run)["attempts"] == 2
    train(load_run(tiny_recipe, F32), tmp_path / "calm")
    last_loss = {
        event.step: event.loss for event in events.read(tmp_path / "run") if isinstance(event, events.StepDone)
    }
    assert list(last_loss.values()) == pytest.approx(losses(tmp_path / "calm"), abs=1e-4)
