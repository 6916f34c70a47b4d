"""Bad input to a training run: one line with a remedy, the right exit code, nothing that looks complete."""

import json
import shutil
from pathlib import Path

import pytest

from lakh.errors import PeerError, UserError

pytestmark = pytest.mark.timeout(200)

CASES = [
    (["--set", "mesh.tp=3"], 2, "does not divide model.heads"),
    (["--set", "mesh.tp=2"], 2, "mesh"),
    (["--set", "mesh.dp_shard=3"], 2, "needs 3 ranks and there are 1"),
    (["--set", "optim.lrr=1"], 2, "did you mean optim.lr?"),
    (["--set", "train.steps=many"], 2, "is not a whole number"),
    (["--set", "data.tokens=/nowhere"], 2, "no such folder"),
    (["--set", "model.vocab=300"], 2, "is smaller than the tokenizer"),
    (["--set", "data.batch=100000"], 2, "100000 are needed"),
    (["--set", "train.device=tpu"], 2, "is not one of 'auto', 'cpu', 'cuda'"),
    (["--fault", "burn(rank=1)"], 2, "is not a fault"),
    (["--nproc", "3"], 2, "cannot be split"),
    (["--set", "model.width=32768"], 2, "memory of one GPU"),
    (["--set", "model.width=32768", "--dry-run"], 2, "GiB are usable"),
    (["--set", "data.skip=[[5, 2]]"], 2, "is not a range"),
    (["--set", 'train.hooks=["nowhere:f"]'], 2, "cannot be loaded"),
    (["--set", "train.eval_sequences=100000000000000000000"], 2, "is too large"),
    (["--set", "train.replica_codec=int8"], 2, "needs train.backend = c3"),
]


@pytest.mark.parametrize(("arguments", "code", "words"), CASES, ids=[" ".join(case[0]) for case in CASES])
def test_wrong_settings_are_rejected(
    arguments: list[str], code: int, words: str, tiny_recipe: Path, tmp_path: Path, run_lakh
) -> None:
    out = tmp_path / "run"
    done = run_lakh("train", str(tiny_recipe), "--out", str(out), *arguments, check=False)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["error"]["exit_code"] == code
    assert not list(out.glob("checkpoints/*/manifest.json"))


@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_a_damaged_token_shard_is_named(
    damage: str, tiny_recipe: Path, tokens_dir: Path, tmp_path: Path, run_lakh
) -> None:
    tokens = tmp_path / "tokens"
    shutil.copytree(tokens_dir, tokens)
    shard = tokens / "train" / "tokens-00000.bin"
    if damage == "remove":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-2])
    done = run_lakh(
        *("train", str(tiny_recipe), "--out", str(tmp_path / "run"), "--set", f"data.tokens={tokens}"), check=False
    )
    assert done.returncode == 65, done.stderr
    assert "tokens-00000.bin" in done.stderr
    assert "Traceback" not in done.stderr


def test_data_that_changed_under_a_run_is_detected(
    tiny_recipe: Path, tokens_dir: Path, tmp_path: Path, run_lakh, run_launcher
) -> None:
    run_dir = tmp_path / "run"
    run_launcher("train", str(tiny_recipe), "--out", str(run_dir), "--set", "train.steps=4")
    with pytest.raises(UserError, match="lakh resume"):
        run_launcher("train", str(tiny_recipe), "--out", str(run_dir))
    other = tmp_path / "other"
    corpus, tokenizer = tokens_dir.parent / "corpus", tokens_dir.parent / "tokenizer"
    run_lakh("tokens", "pack", str(corpus), "--tokenizer", str(tokenizer), "--out", str(other), "--heldout", "0.4")
    before = (run_dir / "run.toml").read_text()
    with pytest.raises(UserError, match="fingerprint differs"):
        run_launcher("resume", str(run_dir), "--set", f"data.tokens={other}", "--set", "train.steps=8")
    assert (run_dir / "run.toml").read_text() == before  # the run can still go on as it was


@pytest.mark.parametrize("copies", [1, 2])
def test_a_silent_rank_ends_the_run_after_the_timeout(
    copies: int, tiny_recipe: Path, tmp_path: Path, run_launcher
) -> None:
    with pytest.raises(PeerError, match=r"(?s)rank 0.*lakh resume"):
        run_launcher(
            *("train", str(tiny_recipe), "--out", str(tmp_path / "run"), "--nproc", "2", "--max-restarts", "0"),
            *("--fault", "stop(rank=1, step=5)", "--set", "train.peer_timeout_s=5"),
            *("--set", f"mesh.dp_replicate={copies}"),
        )
