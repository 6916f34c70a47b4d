"""`lakh tune --method dpo`: chosen answers are preferred afterwards, a stopped run continues, bad rows are named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.unit.finetuning.test_examples import make_tokenizer
from tests.unit.finetuning.test_tune import write_base

from lakh import checkpoint
from lakh.cli.main import cli
from lakh.errors import ConfigError, UserError
from lakh.finetuning.dpo import tune_on_pairs
from lakh.finetuning.examples import ExampleEncoder
from lakh.finetuning.preferences import encode_pair

SETS = ["data.sequence=96", "data.batch=4", "optim.lr=0.01", "train.threads=1", "train.device=cpu"]


def write_pairs(path: Path, count: int = 40) -> str:
    rows = [
        {"prompt": f"question {number}\n", "chosen": f"yes {number % 5}", "rejected": f"no {number % 5}"}
        for number in range(count)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_adapters_learn_to_prefer_chosen_answers_and_a_stopped_run_continues(tmp_path: Path) -> None:
    base, pairs, out = write_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl"), str(tmp_path / "tuned")
    arguments = [
        "tune",
        base,
        "--method",
        "dpo",
        "--pairs",
        pairs,
        "--out",
        out,
        "--rank",
        "4",
        "--steps",
        "12",
        "--json",
    ]
    result = CliRunner().invoke(cli, [*arguments, *(word for item in SETS for word in ("--set", item))])
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert (report["data"], report["steps"], report["before"]["pairs"]) == ("pairs", 12, 4)
    assert report["before"]["loss"] == pytest.approx(math.log(2))
    assert report["after"]["loss"] < 0.9 * report["before"]["loss"]
    assert report["after"]["reward_accuracy"] == 1.0
    assert report["adapter_bytes"] > 0

    # The same call continues, here a finished run, and computes no reference again.
    written = (tmp_path / "tuned" / "reference.npz").stat().st_mtime_ns
    again = tune_on_pairs(base, [pairs], out, rank=4, steps=12, sets=SETS)
    assert again["after"] == report["after"]
    assert (tmp_path / "tuned" / "reference.npz").stat().st_mtime_ns == written
    with pytest.raises(UserError, match="another objective"):
        tune_on_pairs(base, [pairs], out, rank=4, beta=0.5, sets=SETS)

    # A run that was interrupted in the middle ends with the same weights.
    halves = str(tmp_path / "halves")
    tune_on_pairs(base, [pairs], halves, rank=4, steps=12, sets=[*SETS, "checkpoint.every=6", "checkpoint.keep=3"])
    whole = checkpoint.read_model(checkpoint.find(halves))[1]
    newest = sorted((tmp_path / "halves" / "checkpoints").iterdir())[-1]
    (newest / "manifest.json").unlink()
    tune_on_pairs(base, [pairs], halves, rank=4, steps=12, sets=[*SETS, "checkpoint.every=6", "checkpoint.keep=3"])
    for name, tensor in checkpoint.read_model(checkpoint.find(halves))[1].items():
        assert tensor.equal(whole[name]), name


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_weight_learns_with_rank_0(tmp_path: Path) -> None:
    base, pairs = write_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl")
    sets = [*SETS, "optim.lr=0.001"]
    report = tune_on_pairs(base, [pairs], str(tmp_path / "tuned"), rank=0, steps=8, sets=sets)
    assert (report["adapter"], report["adapter_bytes"]) == (None, 0)
    assert report["after"]["loss"] < 0.95 * report["before"]["loss"]


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ([], "is not a JSON object"),
        ({"prompt": "a", "chosen": "b"}, "rejected is missing"),
        ({"prompt": "a", "chosen": " ", "rejected": "b"}, "chosen is missing, empty"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
        ({"chosen": "b", "rejected": "c"}, "neither a prompt nor messages"),
        ({"messages": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": "c"}, "no chat template"),
    ],
)
def test_rows_that_are_no_pairs_are_named(row: Any, found: str, tmp_path: Path) -> None:
    encoder = ExampleEncoder(make_tokenizer(tmp_path), None)
    with pytest.raises(UserError, match=f"pairs.jsonl, line 3.*{found}"):
        encode_pair(encoder, row, "pairs.jsonl, line 3")


def test_unusable_settings_and_files_are_refused(tmp_path: Path) -> None:
    base, out = write_base(tmp_path), str(tmp_path / "tuned")
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    with pytest.raises(UserError, match=r"0 pairs .* were found, 40 in all"):
        tune_on_pairs(base, [pairs], out, sets=["data.sequence=16"])
    with pytest.raises(ConfigError, match="two halves"):
        tune_on_pairs(base, [pairs], out, sets=["data.document_mask=true"])
    with pytest.raises(ConfigError, match="compared in full precision"):
        tune_on_pairs(base, [pairs], out, sets=["adapter.base_bits=4"])
    (tmp_path / "broken.jsonl").write_text('{"prompt": \n')
    with pytest.raises(UserError, match=r"line 1: is not valid JSON.*chosen"):
        tune_on_pairs(base, [str(tmp_path / "broken.jsonl")], out, sets=SETS)
    for words, found in (
        (["--method", "dpo", "--data", pairs], "--data is given"),
        (["--pairs", pairs], "--pairs is given"),
        (["--method", "dpo"], "none is given"),
    ):
        result = CliRunner().invoke(cli, ["tune", base, "--out", out, *words])
        assert isinstance(result.exception, UserError), result.output
        assert found in str(result.exception)
