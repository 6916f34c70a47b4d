"""Ask a model for programs with tests, run them in the sandbox, and build a corpus of those that pass.

    OUT/attempts.jsonl   every attempt: prompt, answer, and the reason why it was kept or rejected; the journal from
                         which the same command continues
    OUT/programs.jsonl   the programs that pass, with model, prompt and verdict
    OUT/corpus           the corpus of these programs: deduplicated, decontaminated, without secrets; written last

More attempts may be asked for later: attempt number i has the same prompt and seed in every request.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lakh import storage
from lakh.corpus import CorpusReport, Settings, build
from lakh.errors import PeerLost, UserError
from lakh.evals.generation.chat import program_of_answer
from lakh.evals.generation.generate import load_engine
from lakh.evals.journal import Journal
from lakh.evals.sandbox import Sandbox
from lakh.synthesis.programs import SynthesizedProgram, UnusableAnswer, program_from
from lakh.synthesis.prompts import TOPICS, prompt_of, prompts_fingerprint

__all__ = ["SynthesisRequest", "SynthesisResult", "synthesize"]

CALL_ATTEMPTS = 64  # attempts between two entries of the journal
STOPS = ("\nif __name__",)
MODELS_TIMEOUT_S = 30.0
PASSED = "passed"
ATTEMPTS, PROGRAMS, CORPUS = "attempts.jsonl", "programs.jsonl", "corpus"
SynthesisProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class SynthesisRequest:
    """What determines the attempts, except their number."""

    model: str
    """A URL of an OpenAI-compatible server, or what lakh serve takes."""
    chat: bool = False
    served_name: str | None = None
    temperature: float = 0.8
    top_p: float = 0.95
    max_tokens: int = 1024
    seed: int = 0
    topics: tuple[str, ...] = TOPICS


@dataclass(frozen=True)
class SynthesisResult:
    model: str
    attempts: int
    verdicts: dict[str, int]
    """Reason -> attempts; `passed` are those whose tests pass, and fail in the control."""
    report: CorpusReport
    sandbox: str

    def as_dict(self) -> dict[str, Any]:
        """What --json prints."""
        return {
            "model": self.model,
            "attempts": self.attempts,
            "verdicts": self.verdicts,
            "kept": self.report.kept,
            "dropped": dict(self.report.dropped),
            "benchmarks": dict(self.report.benchmarks),
            "corpus": self.report.out,
            "output_sha256": self.report.output_sha256,
            "sandbox": self.sandbox,
        }


def synthesize(
    request: SynthesisRequest, out: str, attempts: int, sandbox: Sandbox, *,
    workers: int | None = None, settings: Settings | None = None, progress: SynthesisProgress | None = None,
) -> SynthesisResult:  # fmt: skip
    """Make `attempts` attempts in all, and build the corpus of the programs that pass."""
    if not storage.is_local(out):
        raise UserError(f"--out {out}", "is not a local folder", "synthesize locally, then copy the corpus")
    name = request.served_name or _served_model(request.model)
    key = {**asdict(request), "served_name": name, "topics": prompts_fingerprint(request.topics)}
    with contextlib.closing(Journal(storage.join(out, ATTEMPTS), key)) as journal:
        rows: list[dict[str, Any]] = journal.done[:attempts]
        if len(rows) < attempts:
            engine = load_engine(request.model, chat=request.chat, served_name=request.served_name)
        while len(rows) < attempts:
            numbers = range(len(rows), min(attempts, len(rows) + CALL_ATTEMPTS))
            answers = _ask(engine, request, numbers, attempts, progress)
            made = _judge(request, numbers, answers, sandbox, workers)
            for row in made:
                journal.add(row)
            rows += made
            if progress:
                progress("asking and testing", len(rows), attempts)
    _write_programs(storage.join(out, PROGRAMS), rows, name, sandbox.description)
    source = f"synthetic:{storage.join(out, PROGRAMS)}"
    report = build([source], storage.join(out, CORPUS), settings, force=True)
    return SynthesisResult(name, len(rows), dict(Counter(row["reason"] for row in rows)), report, sandbox.description)


def _ask(
    engine: Any, request: SynthesisRequest, numbers: Sequence[int], total: int, progress: SynthesisProgress | None
) -> list[str]:
    from lakh.server.engine import SamplingParams

    samplings = [
        SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed + number,
            stop=() if request.chat else STOPS,
        )
        for number in numbers
    ]
    prompts = [prompt_of(number, request.topics) for number in numbers]

    def report(done: int) -> None:
        if progress:
            progress("asking and testing", numbers[0] + done, total)

    return [completion.text for completion in engine.generate(prompts, samplings, progress=report)]


def _judge(
    request: SynthesisRequest, numbers: Sequence[int], answers: Sequence[str], sandbox: Sandbox, workers: int | None
) -> list[dict[str, Any]]:
    """A row of the journal for each answer."""

    def judge(at: int) -> dict[str, Any]:
        prompt, answer = prompt_of(numbers[at], request.topics), answers[at]
        text = program_of_answer(answer, prompt, "") if request.chat else prompt + answer
        program = program_from(text)
        row = {"number": numbers[at], "prompt": prompt, "answer": answer, "tests": 0, "program": ""}
        if isinstance(program, UnusableAnswer):
            return row | {"reason": program.reason, "detail": program.detail}
        reason, detail = _verdict(program, sandbox)
        if reason == PASSED:  # the document is what the model has written
            row["program"] = program.text.removeprefix(prompt).lstrip("\n")
        return row | {"reason": reason, "detail": detail, "tests": len(program.tests)}

    return sandbox.map(judge, range(len(answers)), workers)


def _verdict(program: SynthesizedProgram, sandbox: Sandbox) -> tuple[str, str]:
    verdict = sandbox.run(program.to_run())
    if not verdict.passed:
        return verdict.kind, verdict.detail
    if sandbox.run(program.control()).passed:
        return "vacuous-tests", "the tests also pass if every function returns None"
    return PASSED, ""


def _write_programs(url: str, rows: Sequence[dict[str, Any]], model: str, sandbox: str) -> None:
    lines = []
    for row in rows:
        if row["reason"] == PASSED:
            digest = hashlib.sha256(row["program"].encode()).hexdigest()[:16]
            verdict = {"verdict": PASSED, "tests": row["tests"], "control": "failed", "sandbox": sandbox}
            record = {"text": row["program"], "path": f"{row['number']:06d}-{digest}.py", "model": model}
            record |= {"prompt": row["prompt"], "provenance": verdict}
            lines.append(json.dumps(record, sort_keys=True) + "\n")
    storage.write_bytes(url, "".join(lines).encode())


def _served_model(model: str) -> str:
    """The name of the first model of an endpoint, which answers if none is named; a path is its own name."""
    if not model.startswith(("http://", "https://")):
        return model
    base = model.rstrip("/")
    url = f"{base if base.endswith('/v1') else base + '/v1'}/models"
    key = os.environ.get("OPENAI_API_KEY")
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=MODELS_TIMEOUT_S) as response:
            return str(json.load(response)["data"][0]["id"])
    except (OSError, urllib.error.URLError) as error:
        raise PeerLost(url, f"does not answer ({error})", "check that the server runs, and try again") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise UserError(url, "lists no model", "name one with --served-name") from None
