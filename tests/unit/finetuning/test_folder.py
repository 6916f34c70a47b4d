"""The folder of a fine-tuning after a failure: empty after a refusal, with its data after one of the run, never a run
without a checkpoint; the next call works."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.finetuning.test_tune import SETS, write_base, write_rows

from lakh.dashboard.find import find_runs
from lakh.errors import InfeasiblePlan, Interrupted, LakhError, UserError
from lakh.finetuning.dpo import tune_on_pairs
from lakh.finetuning.folder import TuningFolder
from lakh.finetuning.tune import tune


def write_code(folder: Path, files: int) -> str:
    folder.mkdir(exist_ok=True)
    for number in range(files):
        lines = [f"def function_{number}_{line}(value):\n    return value + {line * number}\n" for line in range(8)]
        (folder / f"module_{number}.py").write_text("\n\n".join(lines))
    return str(folder)


def write_pairs(path: Path, count: int) -> str:
    rows = [{"prompt": f"question {number}\n", "chosen": "b", "rejected": "c"} for number in range(count)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["code", "examples", "pairs"])
@pytest.mark.parametrize("exists", [False, True])
def test_refused_data_leaves_nothing_and_more_data_is_taken(kind: str, exists: bool, tmp_path: Path) -> None:
    base, out = write_base(tmp_path), tmp_path / "out"
    write = {"code": write_code, "examples": write_rows, "pairs": write_pairs}[kind]
    run = tune_on_pairs if kind == "pairs" else tune
    source = tmp_path / ("data" if kind == "code" else "data.jsonl")
    if exists:
        out.mkdir()
    write(source, 1)
    with pytest.raises(UserError, match="give at least two"):
        run(base, [str(source)], str(out), sets=SETS)
    assert (not out.exists()) if not exists else names(out) == set()
    write(source, 12)
    with pytest.raises(UserError, match="is no matrix"):  # which is found after the data was written
        run(base, [str(source)], str(out), sets=[*SETS, 'adapter.targets=["qkv"]'])
    assert (not out.exists()) if not exists else names(out) == set()


def test_a_run_that_is_refused_keeps_its_data_and_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, out = write_base(tmp_path), tmp_path / "out"

    def run_out_of_memory(*_: Any, **__: Any) -> Any:
        (out / "logs" / "rank-00000.0.err").write_text("")
        raise InfeasiblePlan("rank 0", "does not fit", "make data.micro_batch smaller")

    monkeypatch.setattr("lakh.trainer.launch.local.launch", lambda *_, **__: run_out_of_memory())
    monkeypatch.setattr("lakh.trainer.launch.local.write_settings", lambda run, out: (Path(out) / "logs").mkdir())
    with pytest.raises(InfeasiblePlan):
        tune(base, [write_code(tmp_path / "code", 12)], str(out), steps=2, sets=SETS)
    assert names(out) == {"tune.lock", "sources.json", "corpus", "tokens"}
    assert find_runs(tmp_path) == []
    with pytest.raises(InfeasiblePlan):  # other data replaces it: the command has no --force
        tune(base, [write_code(tmp_path / "other", 14)], str(out), steps=2, sets=SETS)
    assert json.loads((out / "corpus" / "manifest.json").read_text())["kept"] == 14


def test_an_interrupted_call_keeps_what_it_had_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("lakh.finetuning.tune.check_settings", interrupt)
    base, out = write_base(tmp_path), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        tune(base, [write_code(tmp_path / "code", 12)], str(out), sets=SETS)
    assert {"corpus", "tokens"} <= names(out)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    base, rows, out = write_base(tmp_path), write_rows(tmp_path / "rows.jsonl"), tmp_path / "work"
    (out / "tokens" / "train").mkdir(parents=True)  # made by lakh tokens pack
    with pytest.raises(UserError, match=r"holds other files \(tokens\)"):
        tune(base, [rows], str(out), sets=SETS)
    assert names(out) == {"tokens"}


def write_and_fail(out: Path, name: str, error: LakhError) -> None:
    with TuningFolder.open(str(out), ["code"]):
        (out / name).mkdir(parents=True)
        raise error


def test_an_interrupted_run_without_a_checkpoint_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        write_and_fail(tmp_path / "out", "logs", Interrupted("the launcher", "stopped by Ctrl-C", "again"))
    assert names(tmp_path / "out") == {"tune.lock", "sources.json"}


def test_what_was_there_before_a_refusal_stays(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        write_and_fail(tmp_path / "out", "corpus", Interrupted("here", "interrupted", "again"))
    with pytest.raises(UserError):
        write_and_fail(tmp_path / "out", "tokens", UserError("--set", "is wrong", "choose another"))
    assert names(tmp_path / "out") == {"tune.lock", "sources.json", "corpus"}


@pytest.mark.parametrize("error", [UserError, Interrupted])
def test_a_run_with_a_checkpoint_is_never_removed(error: type[LakhError], tmp_path: Path) -> None:
    with pytest.raises(error):
        write_and_fail(tmp_path / "out", "checkpoints/step-00000004", error("step 5", "failed", "try again"))
    assert names(tmp_path / "out") == {"tune.lock", "sources.json", "checkpoints"}
