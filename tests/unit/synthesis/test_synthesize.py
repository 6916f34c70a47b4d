from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lakh.corpus import Settings, read_documents
from lakh.corpus.filters.decontaminate import DecontaminationSettings
from lakh.errors import PeerLost
from lakh.evals.sandbox import Sandbox
from lakh.synthesis import SynthesisRequest, synthesize

CODE = "def {name}(a, b):\n    return a + b * {number}\n\n\n"
TESTS = "def test_zero():\n    assert {name}(0, 0) == 0\n\n\ndef test_one():\n    assert {name}(1, 1) == {number} + 1\n"
SOLUTION = """    total = start
    for index, word in enumerate(sorted(words, key=len)):
        total = total * 3 + len(word) - index if word.islower() else total - 7
    return total
"""
PROMPT = "def fold_words(words, start):\n"
BENCHMARK = f"""{PROMPT}{SOLUTION}

def test_none():
    assert fold_words([], 5) == 5


def test_upper():
    assert fold_words(["A"], 7) == 0
"""
"""The solution of a task, with tests of its own."""


def answer_of(seed: int) -> str:
    """The answer of the endpoint to attempt `seed`: every third is wrong, every fourth a copy of the first."""
    if seed == 8:
        return BENCHMARK
    number = 0 if seed % 4 == 3 else seed
    text = (CODE + TESTS).format(name=f"combine_{number}_numbers", number=number + 2)
    return text.replace("+ 1\n", "+ 2\n") if seed % 3 == 1 else text


class Endpoint(http.server.BaseHTTPRequestHandler):
    asked: list[int] = []  # noqa: RUF012 - shared with the test
    refused: int | None = None
    """The attempt that gets an error, after all before it were answered: no request is on its way then."""
    answered = threading.Condition()

    def do_GET(self) -> None:
        self._send({"data": [{"id": "small-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        seed = body["seed"]
        if seed == type(self).refused:
            with self.answered:
                self.answered.wait_for(lambda: len(type(self).asked) == seed, timeout=30)
            self.send_error(401, "no")
            return
        with self.answered:
            type(self).asked.append(seed)
            self.answered.notify_all()
        self._send({"choices": [{"text": answer_of(seed), "finish_reason": "stop"}]})

    def _send(self, document: Any) -> None:
        content = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    Endpoint.asked, Endpoint.refused = [], None
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(10)
    server.server_close()


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox.choose(unsafe=True) as made:  # isolation has tests of its own
        yield made


def documents(out: Path) -> list[dict[str, Any]]:
    rows = [row for batch in read_documents(str(out / "corpus")) for row in batch.to_pylist()]
    return sorted(rows, key=lambda row: str(row["path"]))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_programs_that_pass_become_documents_with_model_prompt_and_verdict(
    endpoint: str, sandbox: Sandbox, tmp_path: Path
) -> None:
    seen: list[tuple[str, int, int]] = []
    row = {"task_id": "X/0", "prompt": PROMPT, "canonical_solution": SOLUTION, "test": "", "entry_point": "fold_words"}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    settings = Settings(decontaminate=DecontaminationSettings(benchmarks=(str(tmp_path / "tasks.jsonl"),)))
    result = synthesize(
        SynthesisRequest(model=endpoint), str(tmp_path), 9, sandbox, settings=settings,
        progress=lambda *report: seen.append(report),
    )  # fmt: skip
    # 1, 4 and 7 are wrong; 3 is a copy of 0; 8 solves a task of a benchmark
    assert result.verdicts == {"passed": 6, "failed": 3}
    assert (result.report.kept, result.report.dropped) == (4, {"exact-duplicate": 1, "benchmark": 1})
    assert result.model == "small-model"
    assert seen[-1] == ("asking and testing", 9, 9)
    for row in documents(tmp_path):
        provenance = json.loads(row["provenance"])
        assert provenance["model"] == "small-model"
        assert provenance["prompt"].startswith('"""Example module: ')
        assert row["text"].startswith("def combine_")
        assert provenance["provenance"]["verdict"] == "passed"
        assert provenance["provenance"]["sandbox"] == sandbox.description
    assert set(result.as_dict()) >= {"attempts", "verdicts", "kept", "dropped", "corpus", "model"}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_same_command_continues_after_a_stop_and_extends_a_finished_result(
    endpoint: str, sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakh.synthesis.run.CALL_ATTEMPTS", 4)
    request = SynthesisRequest(model=endpoint)
    Endpoint.refused = 7
    with pytest.raises(Exception, match="401"):
        synthesize(request, str(tmp_path), 8, sandbox)
    assert not (tmp_path / "corpus").exists()
    Endpoint.refused, Endpoint.asked = None, []
    first = synthesize(request, str(tmp_path), 8, sandbox)
    assert sorted(Endpoint.asked) == [4, 5, 6, 7]
    Endpoint.asked = []
    longer = synthesize(request, str(tmp_path), 9, sandbox)
    assert Endpoint.asked == [8]
    assert (first.attempts, longer.attempts) == (8, 9)
    assert longer.report.kept == first.report.kept + 1


@pytest.mark.timeout(60)
def test_endpoint_that_does_not_answer_is_named(sandbox: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match="does not answer"):
        synthesize(SynthesisRequest(model="http://127.0.0.1:9"), str(tmp_path), 1, sandbox)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_command_prints_one_json_document(
    endpoint: str, lakh: Callable[..., Any], last_line: Callable[..., Any], tmp_path: Path
) -> None:
    topics = tmp_path / "topics.txt"
    topics.write_text("sums of two numbers  # a comment\n")
    command = ("corpus", "synthesize", endpoint, "--out", str(tmp_path / "out"), "--attempts", "2", "--unsafe")
    code, stdout, _ = lakh(*command, "--topics", str(topics), "--json")
    data = last_line(stdout)
    assert (code, data["attempts"], data["verdicts"]) == (0, 2, {"passed": 1, "failed": 1})
    assert "sums of two numbers" in documents(tmp_path / "out")[0]["provenance"]
