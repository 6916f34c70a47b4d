"""Many programs over a pool of workers, and the files that keep what came out.

A worker is a thread that drives one sandbox process at a time; the work is in those processes. Results come in the
order of the samples, whatever order they end in. Ctrl-C ends every program before it leaves.

    OUT/samples.jsonl    what was judged, in the form that other harnesses read
    OUT/verdicts.jsonl   one line per sample, same order
    OUT/result.json      the score and its protocol; written last, so its presence means complete
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

from lakh import storage
from lakh.evals.protocol import Origin, Protocol
from lakh.evals.samples import Sample, write_samples
from lakh.evals.sandbox import Limits, Sandbox, Verdict
from lakh.evals.score import Summary, summarise
from lakh.evals.task import Task

__all__ = ["Result", "judge", "score", "write_result"]


@dataclass(frozen=True, slots=True)
class Result:
    protocol: Protocol
    samples: tuple[Sample, ...]
    verdicts: tuple[Verdict, ...]
    """One for each sample, in their order."""
    summary: Summary
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """What --json prints and result.json holds."""
        return {
            "task": self.protocol.task.name,
            "passed": self.summary.passed,
            "total": self.summary.total,
            "problems": len(self.summary.problems),
            "pass_at_k": {str(k): value for k, value in self.summary.pass_at_k.items()},
            "interval": list(self.summary.interval),
            "timeouts": self.summary.kinds["timeout"],
            "sandbox_errors": self.summary.kinds["sandbox_error"],
            "kinds": self.summary.kinds,
            "sandbox": self.protocol.sandbox,
            "protocol": self.protocol.line(),
            "settings": self.protocol.parts(),
            "seconds": round(self.seconds, 3),
        }


def judge(
    task: Task,
    samples: Sequence[Sample],
    sandbox: Sandbox,
    *,
    limits: Limits | None = None,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Verdict]:
    """One verdict for each sample, in their order. `progress` hears how many have ended so far."""
    problems = {problem.id: problem for problem in task.problems}
    limits = limits or Limits()

    def one(sample: Sample) -> Verdict:
        return sandbox.run(task.program(problems[sample.task_id], sample.completion), limits)

    pool = ThreadPoolExecutor(workers or os.cpu_count() or 1, thread_name_prefix="lakh-eval")
    try:
        futures = [pool.submit(one, sample) for sample in samples]
        for done, future in enumerate(as_completed(futures), start=1):
            future.result()
            if progress:
                progress(done)
        return [future.result() for future in futures]
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
    limits: Limits | None = None,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Result:
    limits = limits or Limits()
    started_s = time.monotonic()
    verdicts = judge(task, samples, sandbox, limits=limits, workers=workers, progress=progress)
    summary = summarise(zip((sample.task_id for sample in samples), verdicts, strict=True))
    protocol = Protocol.of(task, origin, limits, sandbox, Counter(sample.task_id for sample in samples))
    return Result(protocol, tuple(samples), tuple(verdicts), summary, time.monotonic() - started_s)


def write_result(out: str, result: Result) -> None:
    """Write the three files into the folder `out`."""
    rows = zip(result.samples, result.verdicts, strict=True)
    lines = [json.dumps({"task_id": sample.task_id, **asdict(verdict)}) + "\n" for sample, verdict in rows]
    storage.remove_tree(storage.join(out, "result.json"))  # an older one must not vouch for the new files
    write_samples(storage.join(out, "samples.jsonl"), result.samples)
    storage.write_bytes(storage.join(out, "verdicts.jsonl"), "".join(lines).encode())
    table = [asdict(problem) for problem in result.summary.problems]
    document = json.dumps(result.as_dict() | {"problem_scores": table}, indent=1)
    storage.write_bytes(storage.join(out, "result.json"), f"{document}\n".encode())
