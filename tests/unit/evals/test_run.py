"""Scoring many samples: order, result files, interruption."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from lakh.errors import UserError
from lakh.evals.generation.samples import Sample, canonical_samples, fingerprint, read_samples
from lakh.evals.journal import Journal
from lakh.evals.run import JOURNAL, run_samples, score_samples
from lakh.evals.sandbox import Sandbox
from lakh.evals.scoring.protocol import EvalProtocol, Origin, parse
from lakh.evals.task import Task

RIGHT, WRONG, SLOW = "    return x + 0\n", "    return x - 1\n", "    import time; time.sleep(0.3); return x\n"


def test_verdicts_are_in_the_order_of_the_samples(sandbox: Sandbox, toy_task: Task) -> None:
    samples = [Sample("Toy/0", text) for text in (SLOW, WRONG, RIGHT, SLOW, WRONG)]
    heard: list[int] = []
    verdicts = run_samples(toy_task, samples, sandbox, workers=3, progress=heard.append)
    assert [verdict.kind for verdict in verdicts] == ["passed", "failed", "passed", "passed", "failed"]
    assert heard == [1, 2, 3, 4, 5]


def test_the_result_files_have_the_samples_and_the_protocol(sandbox: Sandbox, toy_task: Task, tmp_path: Path) -> None:
    samples = [*canonical_samples(toy_task)[:2], Sample("Toy/2", WRONG)]
    score_samples(
        toy_task, samples, sandbox, Origin("some model", temperature=0.5, seed=7), cpu_s=2, out=str(tmp_path / "out")
    )
    document = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (document["passed"], document["total"]) == (2, 3)
    assert document["pass_at_k"] == {"1": pytest.approx(2 / 3)}
    assert document["interval"][0] <= 2 / 3 <= document["interval"][1]
    assert document["sandbox"] == sandbox.description
    assert [row["num_passed"] for row in document["problem_scores"]] == [1, 1, 0]
    assert read_samples(str(tmp_path / "out" / "samples.jsonl"), toy_task) == samples
    lines = (tmp_path / "out" / "verdicts.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["passed", "passed", "failed"]


def test_the_protocol_line_has_everything_that_changes_a_score(toy_task: Task) -> None:
    origin = Origin("some model", temperature=0.5, top_p=0.9, seed=7, max_tokens=99)
    cpu_s = {"Toy/0": 3, "Toy/1": 3, "Toy/2": 96}
    protocol = EvalProtocol(toy_task, origin, "some isolation | of = kinds", 3, "5", "ab" * 32, cpu_s)
    line = protocol.line()
    for part in ("some model", "temperature=0.5", "top_p=0.9", "seed=7", "max_tokens=99", '"cpu_s": 3', 'n="5"'):
        assert part in line
    for part in ("problems=3", "raw prompt", r"\ndef", "first stop string", "0" * 64, "isolation", '{"Toy/2": 96}'):
        assert part in line
    assert "\n" not in line
    assert parse(line) == protocol.parts()
    assert parse(f"{line}\n") == protocol.parts()


@pytest.mark.parametrize("line", ["hello", "task=", "task=humaneval | n=1", "=1"])
def test_an_invalid_protocol_line_is_an_error(line: str) -> None:
    with pytest.raises(UserError, match="protocol line"):
        parse(line)


def test_verdicts_in_the_journal_are_not_computed_again(sandbox: Sandbox, toy_task: Task, tmp_path: Path) -> None:
    samples = canonical_samples(toy_task)
    key = {"samples": fingerprint(samples), "task": "toy", "data": "0" * 64, "sandbox": sandbox.description}
    journal = Journal(str(tmp_path / JOURNAL), key)
    journal.add({"index": 1, "verdict": {"kind": "failed", "detail": "from the journal", "cpu_s": 1.0, "wall_s": 1.0}})
    journal.close()
    with (tmp_path / JOURNAL).open("ab") as file:
        file.write(b'{"index": 2, "verd')  # cut off by a crash
    result = score_samples(toy_task, samples, sandbox, Origin("x"), out=str(tmp_path))
    assert [verdict.detail for verdict in result.verdicts] == ["", "from the journal", ""]
    assert not (tmp_path / JOURNAL).exists()
    assert (tmp_path / "result.json").exists()


DRIVER = """
import sys
from lakh.cli import main
from lakh.evals.sandbox import isolation
name, value = sys.argv[1].split("=")
isolation.ENVIRONMENT[name] = value
main(["eval", "score", sys.argv[2], "--task", "humaneval", "--partial", "--workers", "2", "--cpu-limit", "9", "--json"])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_an_interrupted_evaluation_leaves_no_process(
    sandbox: Sandbox,
    tmp_path: Path,
    number: signal.Signals,
    wait_for_count: Callable[[str, Callable[[int], bool]], None],
) -> None:
    token = f"LAKH_TEST_TOKEN={uuid.uuid4().hex}"
    path = tmp_path / "samples.jsonl"
    sleeper = "    import time\n    time.sleep(600)\n"
    path.write_text("".join(json.dumps({"task_id": f"HumanEval/{i}", "completion": sleeper}) + "\n" for i in range(6)))
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, token, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for_count(
            token, lambda count: count >= 10
        )  # two workers of five processes: bubblewrap, first, examiner, zygote, candidate
        process.send_signal(number)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait(30)
    wait_for_count(token, lambda count: count == 0)
    if number == signal.SIGINT:
        assert process.returncode == 75
        assert json.loads(output.splitlines()[-1])["error"]["kind"] == "Interrupted"
