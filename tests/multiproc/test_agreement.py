"""Ranks that were started with different settings or data refuse to train, and name what differs."""

import json
from pathlib import Path

import pytest
from tests.forks import Fork, Forks

pytestmark = [pytest.mark.timeout(200), pytest.mark.slow]


def start_ranks(forks: Forks, recipe: Path, folder: Path, settings_of_rank_1: list[str]) -> list[Fork]:
    """As torchrun starts them: each is the whole command."""
    command = ["train", str(recipe), "--out", str(folder / "run"), "--json"]
    different = [word for setting in settings_of_rank_1 for word in ("--set", setting)]
    return [
        forks.start(
            "lakh",
            *command,
            *(different if rank == 1 else []),
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            LAKH_RENDEZVOUS=str(folder / "file"),
            GLOO_SOCKET_IFNAME="lo",
        )
        for rank in range(2)
    ]


@pytest.mark.parametrize("what", ["settings", "data"])
def test_ranks_that_disagree_are_named_with_the_setting(
    what: str, tiny_recipe: Path, tokens_dir: Path, tmp_path: Path, run_lakh, forks: Forks
) -> None:
    if what == "settings":
        different = ["optim.lr=0.002", "train.z_loss=1e-4"]
        words = ["rank 1: optim.lr is 0.002 and 0.01 on rank 0", "train.z_loss is 0.0001 and 0.0 on rank 0"]
    else:
        corpus, tokenizer = tokens_dir.parent / "corpus", tokens_dir.parent / "tokenizer"
        pack = ["tokens", "pack", str(corpus), "--tokenizer", str(tokenizer)]
        run_lakh(*pack, "--out", str(tmp_path / "other"), "--heldout", "0.4")
        different, words = [f"data.tokens={tmp_path / 'other'}"], ["rank 1: data is '"]
    for rank in start_ranks(forks, tiny_recipe, tmp_path, different):
        done = rank.finish(timeout_s=120)
        assert done.returncode == 2, done.stderr
        error = json.loads(done.stdout.splitlines()[-1])["error"]
        assert error["where"] == "1 of 2 ranks disagree with rank 0"
        for word in words:
            assert word in error["found"]
    assert not (tmp_path / "run" / "checkpoints").exists()
