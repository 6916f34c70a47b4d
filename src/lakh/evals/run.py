"""Many programs over a pool of workers, and the files that keep what came out.

A worker is a thread that drives one cell at a time; the work is in the processes of those. Results come in the order of
the samples, whatever order they end in. Ctrl-C ends every program before it leaves; with a folder to keep results in,
the verdicts so far are in its journal, and the same command goes on from there.

    OUT/samples.jsonl    what was judged, in the form that other harnesses read
    OUT/verdicts.jsonl   one line per sample, same order
    OUT/result.json      the score and its protocol; written last, so its presence means complete
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

from lakh import storage
from lakh.evals.calibrate import calibrate, with_cpu
from lakh.evals.journal import Journal
from lakh.evals.scoring.protocol import Origin, Protocol
from lakh.evals.generation.samples import Sample, fingerprint, program_of, write_samples
from lakh.evals.sandbox import Sandbox
from lakh.evals.scoring.score import ScoreSummary, summarise
from lakh.evals.task import Task
from lakh.evals.sandbox.verdict import SandboxVerdict

__all__ = ["JOURNAL", "Result", "judge", "score", "write_result"]

JOURNAL = "verdicts.journal.jsonl"
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class EvalResult:
    protocol: Protocol
    samples: tuple[Sample, ...]
    verdicts: tuple[SandboxVerdict, ...]
    """One for each sample, in their order."""
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
    task: Task,
    samples: Sequence[Sample],
    sandbox: Sandbox,
    *,
    cpu_s: Mapping[str, int] | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    journal: Journal | None = None,
) -> list[SandboxVerdict]:
    """One verdict for each sample, in their order. `progress` hears how many have ended so far."""
    problems = {problem.id: problem for problem in task.problems}
    known = {row["index"]: SandboxVerdict(**row["verdict"]) for row in (journal.done if journal else ())}

    def one(index: int, sample: Sample) -> SandboxVerdict:
        built = program_of(task, problems[sample.task_id], sample)
        if isinstance(built, SandboxVerdict):
            return built
        limits = task.limits if cpu_s is None else with_cpu(task.limits, cpu_s[sample.task_id])
        verdict = sandbox.run(built, limits)
        if journal is not None and verdict.kind != "sandbox_error":
            journal.add({"index": index, "verdict": asdict(verdict)})
        return verdict

    pool = ThreadPoolExecutor(workers or os.cpu_count() or 1, thread_name_prefix="lakh-eval")
    try:
        futures: dict[int, Future[SandboxVerdict]] = {
            index: pool.submit(one, index, sample) for index, sample in enumerate(samples) if index not in known
        }
        for done, future in enumerate(as_completed(futures.values()), start=len(known) + 1):
            future.result()
            if progress:
                progress(done)
        return [known[i] if i in known else futures[i].result() for i in range(len(samples))]
    except BaseException:
        sandbox.stop()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def score(
    task: Task,
    samples: Sequence[Sample],
    sandbox: Sandbox,
    origin: Origin,
    *,
    cpu_s: Mapping[str, int] | int | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    calibrating: Progress | None = None,
    calibration: str = "given",
    recalibrate: bool = False,
    out: str | None = None,
) -> EvalResult:
    """Judge and summarise. CPU limits are calibrated on the reference unless given: one for all, or one per problem.

    `calibration` says where given ones came from; `recalibrate` measures references again, whatever is kept of them.
    """
    workers = workers or os.cpu_count() or 1
    started_s = time.monotonic()
    counts = Counter(sample.task_id for sample in samples)
    asked = [problem for problem in task.problems if problem.id in counts]
    sha256 = fingerprint(samples)
    key = {"samples": sha256, "task": task.name, "data": task.data_sha256, "sandbox": sandbox.description}
    if cpu_s is None:
        measured = calibrate(task, asked, sandbox, workers=workers, progress=calibrating, anew=recalibrate)
        cpu_s, calibration = measured.limits(task.limits.cpu_s), str(measured)
    elif isinstance(cpu_s, int):
        key["cpu_limit"] = str(cpu_s)  # verdicts under another limit are no part of this work
        cpu_s = dict.fromkeys(counts, cpu_s)
    journal = Journal(storage.join(out, JOURNAL) if out else None, key)
    try:
        verdicts = run_samples(task, samples, sandbox, cpu_s=cpu_s, workers=workers, progress=progress, journal=journal)
    finally:
        journal.close()
    summary = summarise(zip((sample.task_id for sample in samples), verdicts, strict=True))
    low, high = min(counts.values()), max(counts.values())
    per_problem = str(low) if low == high else f"{low}-{high}"
    protocol = Protocol(
        task, origin, task.limits, sandbox.description, len(counts), per_problem,
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
