"""Ranks die during training over c3 and the others continue: no restart, same data stream, same losses."""

from pathlib import Path

import pytest

from lakh import checkpoint, events

pytestmark = pytest.mark.timeout(280)


def losses(run_dir: Path) -> dict[int, float]:
    return {e.step: e.loss for e in events.read(run_dir, rank=0) if isinstance(e, events.StepDone)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tokens_dir: Path, run_lakh):
    """An undisturbed run on one rank: its output and its folder."""
    made = []

    def get(recipe: Path):
        if not made:
            folder = tmp_path_factory.mktemp("alone") / "run"
            made.append((run_lakh("train", str(recipe), "--out", str(folder)), folder))
        return made[0]

    return get


@pytest.mark.parametrize(
    ("ranks", "faults"),
    [
        (2, ["kill(rank=0, step=6)"]),  # the rank that writes events
        (4, ["kill(rank=3, step=3)", "kill(rank=1, step=3)", "kill(rank=0, step=8)"]),
    ],
)
def test_the_others_continue_with_the_same_stream_and_losses(
    ranks: int, faults: list[str], alone, tiny_recipe: Path, tmp_path: Path, run_lakh
) -> None:
    calm, calm_dir = alone(tiny_recipe)
    hurt_dir = tmp_path / "run"
    options = [word for fault in faults for word in ("--fault", fault)]
    settings = ["--set", "train.backend=c3", "--set", f"mesh.dp_replicate={ranks}", "--max-restarts", "0"]
    hurt = run_lakh("train", str(tiny_recipe), "--out", str(hurt_dir), "--nproc", str(ranks), *settings, *options)
    assert hurt["attempts"] == 1
    found = events.read(hurt_dir)
    assert not [event for event in found if isinstance(event, events.Restarted)]
    lost = [event for event in found if isinstance(event, events.RanksLost)]
    assert sum(len(event.lost) for event in lost) == len(faults)
    assert lost[-1].left == ranks - len(faults)
    assert hurt["stream_sha256"] == calm["stream_sha256"]
    assert hurt["steps"] == calm["steps"]
    expected, got = losses(calm_dir), losses(hurt_dir)
    # A step may go unreported if a rank dies before its metrics arrive; its update is not lost.
    assert len(expected) - len(got) <= len(faults)
    for step, loss in got.items():
        assert loss == pytest.approx(expected[step], abs=1e-5)  # sums in another order
    assert hurt["val_loss"] == pytest.approx(calm["val_loss"], abs=1e-5)
    checkpoint.verify(checkpoint.find(hurt_dir))
