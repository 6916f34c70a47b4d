"""Comparing two results, and reproducing one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.errors import UserError
from lakh.evals.sandbox import Sandbox, SandboxLimits
from lakh.evals.scoring.compare import compare, mcnemar, read_result, sign_flip
from lakh.evals.scoring.protocol import EvalProtocol, Origin
from lakh.evals.task import Task
from lakh.evals.tasks import TASKS, load_task


def result(passed: list[int], n: int = 1, **settings: Any) -> dict[str, Any]:
    rows = [{"task_id": f"T/{i}", "num_samples": n, "num_passed": count} for i, count in enumerate(passed)]
    return {"task": "toy", "settings": {"data_sha256": "0", **settings}, "problem_scores": rows}


@pytest.mark.parametrize(
    ("won", "lost", "p"), [(0, 0, 1.0), (5, 5, 1.0), (1, 0, 1.0), (8, 0, 2 / 256), (0, 8, 2 / 256), (9, 1, 22 / 1024)]
)
def test_mcnemar_is_the_exact_binomial(won: int, lost: int, p: float) -> None:
    assert mcnemar(won, lost) == pytest.approx(p)


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_a_probability_and_symmetric(won: int, lost: int) -> None:
    assert 0 < mcnemar(won, lost) <= 1
    assert mcnemar(won, lost) == mcnemar(lost, won)


def test_sign_flips_agree_with_mcnemar_on_single_samples() -> None:
    assert sign_flip([1.0] * 9 + [-1.0]) == pytest.approx(mcnemar(9, 1), abs=0.01)
    assert sign_flip([0.0] * 5) == 1.0
    assert sign_flip([0.5] * 20) < 0.001


def test_a_clear_difference_is_significant_and_a_small_one_is_not() -> None:
    found = compare(result([0] * 10 + [1] * 10), result([1] * 20))
    assert found.difference == pytest.approx(0.5)
    assert found.interval[0] > 0
    assert found.p_value == pytest.approx(2 / 1024)
    assert found.verdict.startswith("right is better")
    assert found.gained == tuple(f"T/{i}" for i in range(10))
    luck = compare(result([0, 1, 1, 1]), result([1, 0, 1, 1]))
    assert (luck.difference, luck.p_value) == (0.0, 1.0)
    assert luck.verdict.startswith("no difference shown")


def test_several_samples_use_sign_flips_and_differing_settings_are_listed() -> None:
    found = compare(result([1, 2, 3], 5, seed=1), result([2, 3, 4], 5, seed=2))
    assert "sign flips" in found.test
    assert found.settings == (("seed", 1, 2),)


def test_results_that_cannot_be_compared_are_errors() -> None:
    with pytest.raises(UserError, match="compare results of one task"):
        compare(result([1]), result([1]) | {"task": "other"})
    with pytest.raises(UserError, match="different data"):
        compare(result([1]), result([1], data_sha256="1"))
    with pytest.raises(UserError, match="no problem in common"):
        compare(result([1]), result([]))


def test_a_file_that_is_not_a_result_is_an_error(tmp_path: Path) -> None:
    row = {"task_id": "T/0", "num_samples": 1, "num_passed": 2}
    odd: list[Any] = [{}, [], {"settings": {}}, {"settings": [], "problem_scores": 7}, {"problem_scores": [row]}]
    for document in odd:
        (tmp_path / "result.json").write_text(json.dumps(result([1]) | document if document else document))
        with pytest.raises(UserError, match="is not a result"):
            read_result(str(tmp_path))
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        read_result(str(tmp_path))
    with pytest.raises(UserError, match="no such file"):
        read_result(str(tmp_path / "none"))


# --- the commands ------------------------------------------------------------------------------------------------

Lakh = Callable[..., tuple[int, str, str]]


@pytest.fixture
def samples(toy_task: Task, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setitem(TASKS, "toy", lambda data: toy_task)
    path = tmp_path / "samples.jsonl"
    texts = ["    return x\n", "    return x - 7\n", "    return x + 2\n"]
    path.write_text("".join(json.dumps({"task_id": f"Toy/{i}", "completion": t}) + "\n" for i, t in enumerate(texts)))
    return path


def test_a_result_is_reproduced_from_its_folder_or_its_protocol_line(
    sandbox: Sandbox, samples: Path, tmp_path: Path, lakh: Lakh, last_line: Callable[[str], dict[str, Any]]
) -> None:
    code, out, _ = lakh("eval", "score", str(samples), "--task", "toy", "--out", str(tmp_path / "a"), "--json")
    assert code == 0
    first = last_line(out)
    assert (first["passed"], first["total"]) == (2, 3)
    (tmp_path / "line.txt").write_text(first["protocol"])
    for source in (tmp_path / "a", tmp_path / "a" / "result.json", tmp_path / "line.txt"):
        code, out, _ = lakh("eval", "reproduce", str(source), "--json")
        again = last_line(out)
        assert code == 0, out
        assert again["identical"]
        assert again["settings_that_differ"] == {}
        assert again["result"]["protocol"] == first["protocol"]


def test_a_partial_result_is_reproduced_with_its_own_problems(
    sandbox: Sandbox, samples: Path, tmp_path: Path, lakh: Lakh, last_line: Callable[[str], dict[str, Any]]
) -> None:
    samples.write_text(samples.read_text().splitlines()[2] + "\n")
    lakh("eval", "score", str(samples), "--task", "toy", "--partial", "--out", str(tmp_path / "a"))
    code, out, _ = lakh("eval", "reproduce", str(tmp_path / "a"), "--json")
    assert code == 0, out
    assert last_line(out)["result"]["total"] == 1


def test_a_result_that_differs_exits_with_65(
    sandbox: Sandbox, samples: Path, tmp_path: Path, lakh: Lakh, last_line: Callable[[str], dict[str, Any]]
) -> None:
    lakh("eval", "score", str(samples), "--task", "toy", "--out", str(tmp_path / "a"))
    path = tmp_path / "a" / "verdicts.jsonl"
    path.write_text(path.read_text().replace('"failed"', '"passed"'))
    code, out, _ = lakh("eval", "reproduce", str(tmp_path / "a"), "--json")
    assert code == 65
    assert last_line(out)["changed"] == [{"task_id": "Toy/1", "before": "passed", "now": "failed"}]
    samples.write_text(samples.read_text().replace("x - 7", "x + 1"))
    code, _, err = lakh("eval", "reproduce", str(tmp_path / "a"), "--samples", str(samples))
    assert code == 2
    assert "other samples" in err


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"cpu_s": 3', '"cpu_s": "3"'),
        ('"memory_MiB": 1024', '"memory_MiB": 0'),
        ('"wall_s": 60.0', '"wall_s": null'),
        ('n="1"', 'n="many"'),
        ("problems=3", "problems=[]"),
        ("cpu_s_of={}", 'cpu_s_of={"Toy/1": -1}'),
        ("cpu_s_of={}", "cpu_s_of=[]"),
        ("samples_sha256", "samples_sha512"),
        ("limits={", 'limits={"new": 1, '),
    ],
)
def test_a_protocol_line_with_invalid_values_is_an_error(
    sandbox: Sandbox, samples: Path, tmp_path: Path, lakh: Lakh, before: str, after: str
) -> None:
    task = replace(load_task("toy"), limits=SandboxLimits(cpu_s=3))
    protocol = EvalProtocol(task, Origin(str(samples)), "some isolation", 3, "1", "ab" * 32)
    assert before in protocol.line()
    (tmp_path / "line.txt").write_text(protocol.line().replace(before, after))
    code, _, err = lakh("eval", "reproduce", str(tmp_path / "line.txt"))
    assert (code, "Traceback" in err) == (2, False)


def test_a_reproduction_uses_the_limits_of_the_protocol_line(
    sandbox: Sandbox, samples: Path, tmp_path: Path, lakh: Lakh, last_line: Callable[[str], dict[str, Any]]
) -> None:
    code, out, _ = lakh("eval", "score", str(samples), "--task", "toy", "--cpu-limit", "7", "--json")
    line = last_line(out)["protocol"].replace('"memory_MiB": 1024', '"memory_MiB": 300')
    (tmp_path / "line.txt").write_text(line)
    code, out, _ = lakh("eval", "reproduce", str(tmp_path / "line.txt"), "--json")
    assert code == 0
    assert last_line(out)["result"]["protocol"] == line


@pytest.mark.parametrize("damage", ["garbage\n", "", '{"kind": "passed"}\n', "[]\n[]\n[]\n"])
def test_damaged_verdicts_exit_with_65(
    sandbox: Sandbox, samples: Path, tmp_path: Path, lakh: Lakh, damage: str
) -> None:
    lakh("eval", "score", str(samples), "--task", "toy", "--cpu-limit", "3", "--out", str(tmp_path / "a"))
    (tmp_path / "a" / "verdicts.jsonl").write_text(damage)
    code, _, err = lakh("eval", "reproduce", str(tmp_path / "a"))
    assert code == 65
    assert "is damaged" in err


def test_diff_prints_the_statistical_test(
    sandbox: Sandbox, samples: Path, tmp_path: Path, lakh: Lakh, last_line: Callable[[str], dict[str, Any]]
) -> None:
    lakh("eval", "score", str(samples), "--task", "toy", "--out", str(tmp_path / "a"))
    lakh("eval", "score", "--canonical", "--task", "toy", "--out", str(tmp_path / "b"))
    code, out, _ = lakh("eval", "diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json")
    assert code == 0
    found = last_line(out)
    assert found["gained"] == ["Toy/1"]
    assert found["p_value"] == 1.0
    code, out, _ = lakh("eval", "diff", str(tmp_path / "a"), str(tmp_path / "b"))
    assert "McNemar" in out


def test_samples_are_exported_for_evalplus_and_read_back(
    sandbox: Sandbox, samples: Path, tmp_path: Path, lakh: Lakh, last_line: Callable[[str], dict[str, Any]]
) -> None:
    out_file = tmp_path / "evalplus.jsonl"
    code, _, _ = lakh("eval", "export", str(samples), "--task", "toy", "--out", str(out_file))
    assert code == 0
    rows = [json.loads(line) for line in out_file.read_text().splitlines()]
    assert all(set(row) == {"task_id", "solution"} for row in rows)
    assert rows[0]["solution"].startswith("def add(x):")
    code, out, _ = lakh("eval", "score", str(out_file), "--task", "toy", "--json")
    assert (code, last_line(out)["passed"]) == (0, 2)


def test_a_wrong_number_of_samples_is_an_error(samples: Path, lakh: Lakh) -> None:
    samples.write_text(samples.read_text() + samples.read_text().splitlines()[0] + "\n")
    code, _, err = lakh("eval", "score", str(samples), "--task", "toy", "--n", "1")
    assert code == 2
    assert "has 2 samples of Toy/0" in err


def bits(values: list[float], **settings: Any) -> dict[str, Any]:
    rows = [{"name": f"{i}.py", "bits": value, "bytes": 100} for i, value in enumerate(values)]
    return {"task": "bits-per-byte", "settings": {"data_sha256": "0", **settings}, "document_scores": rows}


def test_bits_per_byte_are_paired_by_document() -> None:
    """The documents differ far more than the two models, whose own intervals overlap."""
    hard_and_easy = [20.0 + 10 * (i % 7) for i in range(30)]
    found = compare(bits(hard_and_easy), bits([value - 1 for value in hard_and_easy]))
    assert (found.metric, found.problems, len(found.gained)) == ("bits per byte", 30, 30)
    assert found.difference == pytest.approx(-0.01)
    assert found.interval == pytest.approx((-0.01, -0.01))
    assert found.verdict.startswith("right is better")
    assert compare(bits([10.0, 20.0]), bits([20.0, 10.0])).verdict.startswith("no difference shown")
