"""Sample files: errors name their line, and valid files are read back."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lakh.errors import UserError
from lakh.evals.generation.samples import Sample, canonical_samples, read_samples, write_samples
from lakh.evals.task import Task, cut_at_stops

GOOD = json.dumps({"task_id": "Toy/0", "completion": "x"})

BAD_LINES = {
    "{": "is not JSON",
    "[" * 100_000: "is not JSON",
    "[]": "is not a JSON object",
    '{"task_id": "Toy/0"}': "has no completion",
    '{"completion": "x"}': "has no task_id",
    '{"task_id": 0, "completion": "x"}': "task_id is not a string",
    '{"task_id": "Toy/0", "completion": null}': "completion is not a string",
    '{"task_id": "Toy/7", "completion": "x"}': "is not a problem of this task",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=BAD_LINES.values())
def test_the_error_of_an_invalid_line_has_its_number(tmp_path: Path, toy_task: Task, line: str) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n")
    with pytest.raises(UserError, match=BAD_LINES[line]) as caught:
        read_samples(str(path), toy_task)
    assert caught.value.where == f"{path}:3"


def test_a_problem_without_a_sample_is_an_error_unless_partial(tmp_path: Path, toy_task: Task) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(f"{GOOD}\n{GOOD}\n")
    with pytest.raises(UserError, match=r"2 of 3 problems \(Toy/1, Toy/2\).*--partial"):
        read_samples(str(path), toy_task)
    assert read_samples(str(path), toy_task, partial=True) == [Sample("Toy/0", "x")] * 2


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_an_error(tmp_path: Path, toy_task: Task, content: str) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match="holds no samples"):
        read_samples(str(path), toy_task, partial=True)


def test_a_missing_file_a_folder_and_a_truncated_gzip_are_errors(tmp_path: Path, toy_task: Task) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_samples(str(tmp_path / "none.jsonl"), toy_task)
    with pytest.raises(UserError, match="is a folder"):
        read_samples(str(tmp_path), toy_task)
    torn = tmp_path / "samples.jsonl.gz"
    torn.write_bytes(gzip.compress(GOOD.encode())[:-9])
    with pytest.raises(UserError, match="cannot be unpacked"):
        read_samples(str(torn), toy_task)


def test_extra_keys_gzip_and_any_order_are_accepted(tmp_path: Path, toy_task: Task) -> None:
    path = tmp_path / "samples.jsonl.gz"
    rows = [{"task_id": f"Toy/{i}", "completion": f"c{i}", "passed": True} for i in (2, 0, 1, 0)]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    with pytest.raises(UserError, match="has 2 samples of Toy/0 and 1 of Toy/2"):
        read_samples(str(path), toy_task)
    found = [(sample.task_id, sample.completion) for sample in read_samples(str(path), toy_task, partial=True)]
    assert found == [("Toy/0", "c0"), ("Toy/0", "c0"), ("Toy/1", "c1"), ("Toy/2", "c2")]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(texts=st.lists(st.text(), min_size=3, max_size=3))
def test_written_samples_are_read_back(tmp_path: Path, toy_task: Task, texts: list[str]) -> None:
    samples = [Sample(f"Toy/{i}", text) for i, text in enumerate(texts)]
    path = str(tmp_path / "samples.jsonl")
    write_samples(path, samples)
    assert read_samples(path, toy_task) == samples


def test_canonical_samples_are_the_benchmarks_own(toy_task: Task) -> None:
    assert canonical_samples(toy_task)[2] == Sample("Toy/2", "    return x + 2\n")


def test_text_is_cut_at_the_earliest_stop() -> None:
    stops = ("\ndef", "\nclass")
    assert cut_at_stops("    return 1\nclass A:\ndef f", stops) == "    return 1"
    assert cut_at_stops("    return 1\n", stops) == "    return 1\n"
    assert cut_at_stops("\ndef", stops) == ""
