"""The same run on 1, 2 and 4 processes, stopped and resumed across them, reads the same tokens and ends alike."""

from pathlib import Path

import pytest

from lakh.errors import PeerError

pytestmark = pytest.mark.timeout(280)

HARD = ("data.packing=best-fit", "data.fim_rate=0.5", "data.document_mask=true", "optim.kind=muon")


@pytest.mark.parametrize("settings", [(), HARD], ids=["plain", "best-fit with masks, fim and muon"])
def test_stopped_on_four_ranks_resumed_on_two_then_one(
    settings: tuple[str, ...], tiny_recipe: Path, tmp_path: Path, run_lakh, run_launcher, train_in_process
) -> None:
    sets = [word for setting in settings for word in ("--set", setting)]
    calm = train_in_process(tiny_recipe, tmp_path / "calm", *settings)
    moved = tmp_path / "moved"
    no_restart = ("--max-restarts", "0")
    first = ("train", str(tiny_recipe), "--out", str(moved), "--nproc", "4", *sets, *no_restart)
    with pytest.raises(PeerError):
        run_launcher(*first, "--fault", "kill(rank=3, step=5)")
    second = ("resume", str(moved), "--nproc", "2", *no_restart)
    with pytest.raises(PeerError):
        run_launcher(*second, "--fault", "kill(rank=0, step=10)")
    ended = train_in_process(moved, moved)
    assert ended["stream_sha256"] == calm["stream_sha256"]
    read = run_lakh("tokens", "stream", str(tiny_recipe), *sets)  # without training at all
    assert ended["stream_sha256"] == read["stream_sha256"]
    # float32 sums in another order: 1e-5 is what ten steps of this size can make of rounding
    assert ended["loss"] == pytest.approx(calm["loss"], abs=1e-5)
    assert ended["val_loss"] == pytest.approx(calm["val_loss"], abs=1e-5)
    assert ended["tokens"] == calm["tokens"]
    classes = ended["goodput"]["classes_s"]
    assert sum(classes.values()) == pytest.approx(ended["goodput"]["total_s"])
    assert classes["lost"] > 0
    assert classes["restart"] > 0
