"""Runs many samples on a pool of workers, scores them, and writes result files.

With an output folder, verdicts go to a journal as they come: after Ctrl-C the same command continues from there.

    OUT/samples.jsonl    the samples, in the form that other harnesses read
    OUT/verdicts.jsonl   one line per sample, same order
    OUT/result.json      the score and its protocol; written last, so its presence means complete
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lakh import storage
from lakh.evals.calibrate import calibrate, with_cpu
from lakh.evals.generation.samples import Sample, fingerprint, program_of, write_samples
from lakh.evals.journal import Journal
from lakh.evals.sandbox import Sandbox, SandboxVerdict
from lakh.evals.scoring.protocol import EvalProtocol, Origin
from lakh.evals.scoring.score import ScoreSummary, summarise
from lakh.evals.task import Task

__all__ = ["JOURNAL", "EvalResult", "run_samples", "score_samples", "write_result"]

JOURNAL = "verdicts.journal.jsonl"
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class EvalResult:
    protocol: EvalProtocol
    samples: tuple[Sample, ...]
    verdicts: tuple[SandboxVerdict, ...]
    """One for each sample, in the same order."""
    summary: ScoreSummary
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """What --json prints and result.json holds."""
        interval = self.summary.interval
        return {
            "task": self.protocol.task.name,
            "passed": self.summary.passed,
            "total": self.summary.total,
            "problems": len(self.summary.problems),
            "pass_at_k": {str(k): value for k, value in self.summary.pass_at_k.items()},
            "interval": list(interval) if interval else None,
            "intervals": {str(k): list(pair) for k, pair in self.summary.intervals.items()},
            "timeouts": self.summary.kinds["timeout"],
            "sandbox_errors": self.summary.kinds["sandbox_error"],
            "not_run": self.summary.kinds["not_run"],
            "kinds": self.summary.kinds,
            "sandbox": self.protocol.sandbox,
            "protocol": self.protocol.line(),
            "settings": self.protocol.parts(),
            "seconds": round(self.seconds, 3),
        }


def run_samples(
    task: Task, samples: Sequence[Sample], sandbox: Sandbox, *, cpu_s: Mapping[str, int] | None = None,
    workers: int | None = None, progress: Progress | None = None, journal: Journal | None = None,
) -> list[SandboxVerdict]:  # fmt: skip
    """One verdict for each sample, in the same order. `progress` gets the number done so far."""
    problems = {problem.id: problem for problem in task.problems}
    known = {row["index"]: SandboxVerdict(**row["verdict"]) for row in (journal.done if journal else ())}

    def run(index: int) -> SandboxVerdict:
        sample = samples[index]
        built = program_of(task, problems[sample.task_id], sample)
        if isinstance(built, SandboxVerdict):
            return built
        limits = task.limits if cpu_s is None else with_cpu(task.limits, cpu_s[sample.task_id])
        verdict = sandbox.run(built, limits)
        if journal is not None and verdict.kind != "sandbox_error":
            journal.add({"index": index, "verdict": asdict(verdict)})
        return verdict

    todo = [index for index in range(len(samples)) if index not in known]
    verdicts = sandbox.map(run, todo, workers, progress=progress, already_done=len(known))
    known |= dict(zip(todo, verdicts, strict=True))
    return [known[index] for index in range(len(samples))]


def score_samples(
    task: Task, samples: Sequence[Sample], sandbox: Sandbox, origin: Origin, *,
    cpu_s: Mapping[str, int] | int | None = None, calibration: str = "given", recalibrate: bool = False,
    workers: int | None = None, progress: Progress | None = None, calibrating: Progress | None = None,
    out: str | None = None,
) -> EvalResult:  # fmt: skip
    """Run and summarise. CPU limits are calibrated on the references unless given: one for all, or one per problem.

    `calibration` describes the source of given limits; `recalibrate` measures references again and ignores the cache.
    """
    started_s = time.monotonic()
    counts = Counter(sample.task_id for sample in samples)
    sha256 = fingerprint(samples)
    key = {"samples": sha256, "task": task.name, "data": task.data_sha256, "sandbox": sandbox.description}
    if cpu_s is None:
        problems = [problem for problem in task.problems if problem.id in counts]
        measured = calibrate(task, problems, sandbox, workers=workers, progress=calibrating, ignore_cache=recalibrate)
        cpu_s, calibration = measured.limits(task.limits.cpu_s), str(measured)
    elif isinstance(cpu_s, int):
        key["cpu_limit"] = str(cpu_s)  # verdicts under another limit do not count
        cpu_s = dict.fromkeys(counts, cpu_s)
    journal = Journal(storage.join(out, JOURNAL) if out else None, key)
    try:
        verdicts = run_samples(task, samples, sandbox, cpu_s=cpu_s, workers=workers, progress=progress, journal=journal)
    finally:
        journal.close()
    summary = summarise(zip((sample.task_id for sample in samples), verdicts, strict=True))
    low, high = min(counts.values()), max(counts.values())
    protocol = EvalProtocol(
        task, origin, sandbox.description, len(counts), str(low) if low == high else f"{low}-{high}",
        samples_sha256=sha256, cpu_s=cpu_s, calibration=calibration,
    )  # fmt: skip
    result = EvalResult(protocol, tuple(samples), tuple(verdicts), summary, time.monotonic() - started_s)
    if out:
        write_result(out, result)
    journal.finish()
    return result


def write_result(out: str, result: EvalResult) -> None:
    """Write the three files into the folder `out`."""
    rows = zip(result.samples, result.verdicts, strict=True)
    lines = [json.dumps({"task_id": sample.task_id, **asdict(verdict)}) + "\n" for sample, verdict in rows]
    storage.remove_tree(storage.join(out, "result.json"))  # an older one must not vouch for the new files
    write_samples(storage.join(out, "samples.jsonl"), result.samples)
    storage.write_bytes(storage.join(out, "verdicts.jsonl"), "".join(lines).encode())
    table = [asdict(problem) for problem in result.summary.problems]
    document = json.dumps(result.as_dict() | {"problem_scores": table}, indent=1)
    storage.write_bytes(storage.join(out, "result.json"), f"{document}\n".encode())
