"""Evaluations and training data of a run: found, read, and safe to read from anybody's folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lakh.dashboard.page import page
from lakh.dashboard.run_files.evaluations import find_evaluations, read_samples
from lakh.dashboard.run_files.training_data import training_data
from lakh.dashboard.run_view import RunView
from lakh.dashboard.runs import RunCollection

NewEvaluation = Callable[[Path, list[tuple[str, str, str]]], None]
SAMPLES = [("T/0", "    return 1\n", "passed"), ("T/1", "<script>alert(1)</script>", "failed")]


def test_evaluations_are_listed_by_step_and_read_with_samples(tmp_path: Path, new_evaluation: NewEvaluation) -> None:
    new_evaluation(tmp_path / "evals" / "humaneval", SAMPLES)
    new_evaluation(tmp_path / "evals" / "00000100" / "humaneval", SAMPLES)
    new_evaluation(tmp_path / "evals" / "00000050" / "humaneval", SAMPLES[1:])
    found = find_evaluations(tmp_path)
    assert [(item["id"], item["step"]) for item in found] == [
        ("00000050/humaneval", 50),
        ("00000100/humaneval", 100),
        ("humaneval", None),
    ]
    assert (found[1]["passed"], found[1]["total"], found[1]["pass_at_1"]) == (1, 2, 0.5)
    assert found[1]["kinds"] == {"passed": 1, "failed": 1}
    samples = read_samples(tmp_path, "humaneval")
    assert samples is not None
    assert [(row["task_id"], row["kind"], row["text"]) for row in samples] == [(a, c, b) for a, b, c in SAMPLES]
    assert samples[1]["detail"] == "failed because"


def test_what_is_malformed_or_a_link_is_left_out(tmp_path: Path, new_evaluation: NewEvaluation) -> None:
    outside = tmp_path / "outside"
    new_evaluation(outside, SAMPLES)
    run = tmp_path / "run"
    new_evaluation(run / "evals" / "odd", [("T/0", "x" * 100_000, "passed")])
    result = json.loads((run / "evals" / "odd" / "result.json").read_text())
    result |= {"pass_at_k": {"1": {"no": 1}}, "interval": ["<b>", float("nan")], "kinds": {"passed": "many"}}
    (run / "evals" / "odd" / "result.json").write_text(json.dumps(result))
    with (run / "evals" / "odd" / "samples.jsonl").open("a") as file:
        file.write('{"task_id": "T/1", "comp')
    (run / "evals" / "linked").symlink_to(outside)
    for name, text in (("torn", '{"task": "hum'), ("list", "[]"), ("deep", "[" * 100_000), ("bits", '{"task": "x"}')):
        (run / "evals" / name).mkdir()
        (run / "evals" / name / "result.json").write_text(text)
    (run / "evals" / "file-link").mkdir()
    (run / "evals" / "file-link" / "result.json").symlink_to(outside / "result.json")
    (found,) = find_evaluations(run)
    assert (found["id"], found["pass_at_1"], found["low"], found["high"], found["kinds"]) == (
        "odd",
        None,
        None,
        None,
        {},
    )
    samples = read_samples(run, "odd")
    assert samples is not None
    assert [(row["kind"], len(row["text"]) < 5000) for row in samples] == [("passed", True), ("", True)]
    for name in ("linked", "../../outside", "/etc", "", "torn", "odd/../odd"):
        assert read_samples(run, name) is None


def test_a_run_shows_both_and_notices_a_new_evaluation(
    fake_run: Any, tmp_path: Path, new_evaluation: NewEvaluation, new_data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakh.dashboard.run_view.LOOK_FOR_FILES_EVERY_S", 0.0)
    tokens = new_data(tmp_path / "data")
    (fake_run.run_dir / "run.toml").write_text(f'[data]\ntokens = "{tokens}"\n')
    fake_run.begin()
    run = RunView("run", fake_run.run_dir)
    run.refresh()
    before = run.changes
    run.refresh()
    assert run.changes == before
    new_evaluation(fake_run.run_dir / "evals" / "humaneval", SAMPLES)
    run.refresh()
    assert run.changes == before + 1
    found = run.data(fake_run.now_s, points=10)
    assert [item["id"] for item in found["evaluations"]] == ["humaneval"]
    assert found["training_data"]["corpus"]["dropped"] == {"not-code": 30, "licence": 10}
    assert list(found["training_data"]["tokens"]["splits"]) == ["train", "heldout"]
    saved = RunCollection(str(fake_run.run_dir)).data_with_samples()
    assert saved["details"][0]["evaluations"] == []  # nothing has been read yet
    runs = RunCollection(str(fake_run.run_dir))
    runs.read_all()
    (evaluation,) = runs.data_with_samples()["details"][0]["evaluations"]
    assert len(evaluation["samples"]) == 2
    assert runs.samples("run", "../run") is None
    assert runs.samples("no such run", "humaneval") is None


def test_the_corpus_is_found_by_its_hash(tmp_path: Path, new_data: Callable[[Path], Path]) -> None:
    tokens = new_data(tmp_path)
    found = training_data(str(tokens))
    assert found is not None
    assert found["corpus"]["path"] == str(tmp_path / "corpus")
    assert found["corpus"]["redactions"] == [{"place": "a.py", "before": "me@••••", "after": "EMAIL"}]
    (tmp_path / "corpus" / "manifest.json").write_text('{"output_sha256": "c1", "dropped": {}}')
    without = training_data(str(tokens))
    assert without is not None
    assert without["corpus"] is None
    (tokens / "manifest.json").write_text('{"splits": {"train": []')
    for url in (str(tokens), str(tmp_path / "none"), "s3://bucket/tokens", None, 7):
        assert training_data(url) is None


def test_the_first_page_is_small() -> None:
    assert len(page(None).encode()) < 150_000
