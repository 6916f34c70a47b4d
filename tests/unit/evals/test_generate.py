"""Generation and its commands, with a fake engine instead of a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lakh.cli import main
from lakh.errors import UserError
from lakh.evals.generation.generate import check_request, generate, load_engine
from lakh.evals.journal import Journal
from lakh.evals.sandbox import Sandbox
from lakh.evals.scoring.protocol import Origin
from lakh.evals.task import Problem, Task
from lakh.evals.tasks import TASKS
from lakh.evals.tasks.humaneval import program
from lakh.evals.tasks.infilling import _first_line, _has_line


@dataclass
class FakeEngine:
    """Completes every prompt by a function of (prompt, seed), and keeps the sampling parameters."""

    answer: Callable[[str, int | None], str]
    asked: list[Any] = field(default_factory=list)
    holes: list[tuple[str, str, int, str]] = field(default_factory=list)
    max_seqs: int = 1

    def infill(self, prefix: str, suffix: str, max_tokens: int, order: str = "psm") -> str:
        self.holes.append((prefix, suffix, max_tokens, order))
        return prefix

    def generate(
        self,
        prompts: Sequence[str],
        samplings: Sequence[Any],
        *,
        stop_when: Callable[[str], bool] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Any]:
        from lakh.server.engine import Completion

        self.asked += dict.fromkeys(samplings)
        completions = []
        for prompt, sampling in zip(prompts, samplings, strict=True):
            completions.append(Completion(self.answer(prompt, sampling.seed), (), "stop", len(prompt)))
            if progress:
                progress(len(completions))
        return completions


def solve(prompt: str, seed: int | None) -> str:
    """Correct for Toy/0 and Toy/1, with text after the stop string."""
    number = min(int(prompt.split("adds ")[1].split()[0]), 1)
    return f"    return x + {number}\ndef more():\n    pass\n"


def test_samples_are_grouped_by_problem_and_each_pass_has_its_seed(toy_task: Task) -> None:
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


def test_trailing_white_space_of_prompts_can_be_stripped(toy_task: Task) -> None:
    prompts: list[str] = []
    engine = FakeEngine(lambda prompt, seed: prompts.append(prompt) or "\n    return x")
    for stripped in (None, True):
        generate(engine, toy_task, Origin("fake", temperature=0.0, stripped=stripped))
    raw, without = prompts[: len(toy_task.problems)], prompts[len(toy_task.problems) :]
    assert raw == [problem.prompt for problem in toy_task.problems]
    assert all(text.endswith("\n") for text in raw)
    assert without == [text.rstrip() for text in raw]


def test_several_samples_at_temperature_0_are_an_error(toy_task: Task) -> None:
    with pytest.raises(UserError, match="temperature"):
        check_request(toy_task, Origin("fake", temperature=0.0), n=2)


def test_a_chat_needs_an_endpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is for endpoints"):
        load_engine(str(tmp_path), chat=True)


def test_passes_in_the_journal_are_not_generated_again(toy_task: Task, tmp_path: Path) -> None:
    origin = Origin("fake", temperature=0.8, seed=5)
    path = str(tmp_path / "journal.jsonl")
    first = generate(FakeEngine(lambda prompt, seed: f"{seed}"), toy_task, origin, n=2, journal=Journal(path, "key"))
    engine = FakeEngine(lambda prompt, seed: f"{seed}")
    again = generate(engine, toy_task, origin, n=3, journal=Journal(path, "key"))
    assert [sampling.seed for sampling in engine.asked] == [7]
    assert [sample.completion for sample in again[:3]] == ["5", "6", "7"]
    assert [again[0], again[1]] == first[:2]
    assert Journal(path, "another key").done == []


def test_infilling_sends_prefix_and_suffix_and_takes_one_line() -> None:
    problem = Problem(
        "Hole/0", "def f():\n", "    return 1\n", "def check(f): assert f() == 1", "f", suffix="\n# end\n"
    )
    engine = FakeEngine(lambda prompt, seed: "\n    return 1\n    return 2\n")
    task = Task("hole", (problem,), (), "", "", "0" * 64, program, take=_first_line, is_infilling=True)
    generate(engine, task, Origin("fake", temperature=0.0, fill_order="spm"))
    assert engine.holes.pop()[-1] == "spm"
    samples = generate(engine, task, Origin("fake", temperature=0.0))
    assert engine.holes == [("def f():\n", "\n# end\n", 256, "psm")]
    assert [_has_line(text) for text in ("\n", "  x", "\n x\n")] == [False, False, True]
    assert samples[0].completion == "\n    return 1\n"
    with pytest.raises(UserError, match="cannot be generated in a chat"):
        check_request(task, Origin("http://x", form="chat"), 1)


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
    monkeypatch.setattr("lakh.cli.eval.load_engine", lambda path, **_: engine)
    return engine


def test_eval_of_a_model_generates_runs_and_scores(
    sandbox: Sandbox, toys: FakeEngine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, data, _ = run(capsys, "some-model", "--task", "toy", "--out", str(tmp_path))
    assert code == 0
    assert (data["task"], data["passed"], data["total"]) == ("toy", 2, 3)
    assert data["pass_at_k"]["1"] == pytest.approx(2 / 3)
    assert 'source="some-model"' in data["protocol"]
    keys = {"interval", "timeouts", "sandbox_errors", "sandbox", "seconds"}
    assert keys <= data.keys()
    assert (tmp_path / "result.json").exists()


def test_options_may_precede_the_model_and_several_tasks_give_a_list(
    sandbox: Sandbox, toys: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    code, data, _ = run(capsys, "--task", "toy,toy2", "--limit", "2", "some-model")
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
        (["model", "some-model", "--task", "toy,toy"], "twice"),
        (["some-model", "--task", ","], "names no task"),
        (["some-model", "--task", "toy", "--n", "2"], "all samples are equal"),
        (["some-model", "--task", "toy", "--n", "0"], "--n"),
        (["some-model"], "--task"),
    ],
)
def test_invalid_arguments_exit_with_2(
    toys: FakeEngine, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, data, err = run(capsys, *arguments)
    assert code == 2
    assert words in err + json.dumps(data)


def test_the_result_of_generated_samples_has_their_origin(
    sandbox: Sandbox,
    toys: FakeEngine,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    asked = [
        "--task",
        "toy",
        "--n",
        "2",
        "--temperature",
        "0.4",
        "--top-p",
        "0.9",
        "--seed",
        "3",
        "--max-tokens",
        "33",
    ]
    with monkeypatch.context() as without:
        without.setattr("lakh.cli.eval.Sandbox.choose", lambda **_: pytest.fail("generating needs no sandbox"))
        code, data, _ = run(capsys, "generate", "some-model", *asked, "--out", str(tmp_path))
    assert (code, data["generated"][0]["samples"]) == (0, 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["generated.json", "samples.jsonl"]
    samples = tmp_path / "samples.jsonl"
    code, data, _ = run(capsys, "score", str(samples), "--task", "toy", "--n", "2")
    assert (code, data["passed"], data["total"]) == (0, 4, 6)
    made = {key: data["settings"][key] for key in ("source", "temperature", "top_p", "seed", "max_tokens")}
    assert made == {"source": "some-model", "temperature": 0.4, "top_p": 0.9, "seed": 3, "max_tokens": 33}
    samples.write_text(samples.read_text().replace("x + 0", "x + 0 "))  # no longer the generated ones
    code, data, _ = run(capsys, "score", str(samples), "--task", "toy")
    assert (code, data["settings"]["source"]) == (0, str(samples))


def test_unsafe_warns(toys: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    code, data, err = run(capsys, "some-model", "--task", "toy", "--unsafe")
    assert code == 0
    assert "warning: --unsafe" in err
    assert "--unsafe" in data["sandbox"]
