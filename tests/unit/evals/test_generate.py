"""Generation and the command, with a tiny engine beside instead of a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lakh.cli import main
from lakh.errors import UserError
from lakh.evals.generate import check_request, generate, load_engine
from lakh.evals.protocol import Origin
from lakh.evals.sandbox import Sandbox
from lakh.evals.task import Task
from lakh.evals.tasks import TASKS


@dataclass
class FakeEngine:
    """Answers every prompt from a function of (prompt, seed), and remembers what it was asked."""

    answer: Callable[[str, int | None], str]
    asked: list[Any] = field(default_factory=list)

    def generate(
        self, prompts: Sequence[str], sampling: Any, *, progress: Callable[[int], None] | None = None
    ) -> list[Any]:
        from lakh.server.engine import Completion

        self.asked.append(sampling)
        completions = []
        for prompt in prompts:
            completions.append(Completion(self.answer(prompt, sampling.seed), (), "stop", len(prompt)))
            if progress:
                progress(len(completions))
        return completions


def solve(prompt: str, seed: int | None) -> str:
    """Right for Toy/0 and Toy/1, and says more than it was asked for."""
    number = min(int(prompt.split("adds ")[1].split()[0]), 1)
    return f"    return x + {number}\ndef more():\n    pass\n"


def test_samples_of_a_problem_stand_together_and_each_pass_has_its_seed(toy_task: Task) -> None:
    engine = FakeEngine(lambda prompt, seed: f"    return {seed}")
    heard: list[int] = []
    origin = Origin("fake", temperature=0.8, top_p=0.9, seed=5, max_tokens=17)
    samples = generate(engine, toy_task, origin, n=2, progress=heard.append)
    assert [(s.task_id, s.completion.strip()) for s in samples[:4]] == [
        ("Toy/0", "return 5"),
        ("Toy/0", "return 6"),
        ("Toy/1", "return 5"),
        ("Toy/1", "return 6"),
    ]
    assert heard == [1, 2, 3, 4, 5, 6]
    asked = engine.asked[0]
    assert (asked.temperature, asked.top_p, asked.max_tokens, asked.stop) == (0.8, 0.9, 17, ("\ndef",))


def test_what_follows_a_stop_string_is_cut_off(toy_task: Task) -> None:
    samples = generate(FakeEngine(solve), toy_task, Origin("fake", temperature=0.0, seed=0))
    assert samples[0].completion == "    return x + 0"


def test_many_equal_samples_are_refused(toy_task: Task) -> None:
    with pytest.raises(UserError, match="temperature"):
        check_request(toy_task, Origin("fake", temperature=0.0), n=2)


def test_a_url_is_refused_with_a_way_out() -> None:
    with pytest.raises(UserError, match="lakh eval score"):
        load_engine("http://127.0.0.1:1/v1")


# --- the command -------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    with pytest.raises(SystemExit) as ended:
        main(["eval", *arguments, "--json"])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), json.loads(captured.out.splitlines()[-1]), captured.err


@pytest.fixture
def toys(toy_task: Task, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = FakeEngine(solve)
    monkeypatch.setitem(TASKS, "toy", lambda data: toy_task)
    monkeypatch.setitem(TASKS, "toy2", lambda data: toy_task)
    monkeypatch.setattr("lakh.cli.eval.load_engine", lambda path: engine)
    return engine


def test_eval_of_a_model_generates_runs_and_scores(
    sandbox: Sandbox, toys: FakeEngine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, data, _ = run(capsys, "some-model", "--tasks", "toy", "--out", str(tmp_path))
    assert code == 0
    assert (data["task"], data["passed"], data["total"]) == ("toy", 2, 3)
    assert data["pass_at_k"]["1"] == pytest.approx(2 / 3)
    assert "source: some-model" in data["protocol"]
    keys = {"interval", "timeouts", "sandbox_errors", "sandbox", "seconds"}
    assert keys <= data.keys()
    assert (tmp_path / "result.json").exists()


def test_options_may_stand_before_the_model_and_several_tasks_give_a_list(
    sandbox: Sandbox, toys: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    code, data, _ = run(capsys, "--tasks", "toy,toy2", "--limit", "2", "some-model")
    assert code == 0
    assert [(result["passed"], result["total"]) for result in data["results"]] == [(2, 2), (2, 2)]


def test_score_reads_samples_and_runs_the_canonical_ones(
    sandbox: Sandbox, toys: FakeEngine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, data, _ = run(capsys, "score", "--canonical", "--task", "toy", "--out", str(tmp_path))
    assert (code, data["passed"], data["total"]) == (0, 3, 3)
    code, again, _ = run(capsys, "score", str(tmp_path / "samples.jsonl"), "--task", "toy", "--limit", "1")
    assert (code, again["passed"], again["total"]) == (0, 1, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["score", "--task", "toy"], "either a samples file or --canonical"),
        (["score", "x.jsonl", "--canonical", "--task", "toy"], "either a samples file or --canonical"),
        (["score", "x.jsonl", "--task", "toy"], "no such file"),
        (["score", "--canonical", "--task", "tpy"], "did you mean toy"),
        (["model", "some-model", "--tasks", "toy,toy"], "twice"),
        (["some-model", "--tasks", ","], "names no task"),
        (["some-model", "--tasks", "toy", "--n", "2"], "all samples are equal"),
        (["some-model", "--tasks", "toy", "--n", "0"], "--n"),
        (["some-model"], "--tasks"),
    ],
)
def test_wrong_words_end_with_exit_code_2(
    toys: FakeEngine, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, data, err = run(capsys, *arguments)
    assert code == 2
    assert words in err + json.dumps(data)


def test_unsafe_warns(toys: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    code, data, err = run(capsys, "some-model", "--tasks", "toy", "--unsafe")
    assert code == 0
    assert "warning: --unsafe" in err
    assert "--unsafe" in data["sandbox"]
