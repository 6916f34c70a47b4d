"""Reproduces a result from its own protocol and lists what came out differently.

Takes the folder of a result, or a file with its protocol line. Completions come from where the protocol says: the
samples kept with the result, the samples file, the reference solutions, or the model, which generates them again.
Limits are those of the protocol: nothing is calibrated again.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from lakh import config, storage
from lakh.errors import DataError, UserError
from lakh.evals.generation.samples import CANONICAL, Sample, canonical_samples, fingerprint, read_samples
from lakh.evals.run import EvalResult, score_samples
from lakh.evals.sandbox import Sandbox, SandboxLimits
from lakh.evals.scoring.compare import read_result
from lakh.evals.scoring.protocol import Origin, parse
from lakh.evals.task import Task
from lakh.evals.tasks import load_task

__all__ = ["read_request", "reproduce"]


@dataclass(frozen=True)
class ReproductionRequest:
    task: Task
    origin: Origin
    n: int
    cpu_s: dict[str, int]
    samples: list[Sample] | None
    """None if the model has to generate them again."""
    kinds: list[str] | None
    """Kind of each sample's first verdict; None if only the protocol line is known."""
    settings: dict[str, Any]


def read_request(
    path: str, data: str | None, *, samples: str | None = None, task_file: str | None = None
) -> ReproductionRequest:
    """What the protocol of a result asks for. `samples` replaces the path of a samples file that has moved, `task_file`
    is the file of a task that is not lakh's own."""
    folder = None
    if storage.is_local(path) and storage.local_path(path).is_file() and not path.endswith(".json"):
        settings = parse(storage.read_bytes(path).decode("utf-8", "replace"))
    else:
        settings = read_result(path)["settings"]
        folder = path.rpartition("/")[0] or "." if path.endswith(".json") else path
    try:
        task = load_task(task_file or settings["task"], data)
        if task.name != settings["task"]:
            raise UserError(path, f"is of task {settings['task']}, and {task_file} of {task.name}", "give its own file")
        if task.data_sha256 != settings["data_sha256"]:
            raise UserError(path, "was made with other data", f"give --data with sha256 {settings['data_sha256']}")
        names = {field.name for field in fields(Origin)}
        origin = Origin(**{key: settings[key] for key in names if key in settings})
        read_limits = functools.partial(config.from_dict, SandboxLimits, origin=path)
        limits = read_limits(settings["limits"])
        others = {name: read_limits({"cpu_s": cpu_s}).cpu_s for name, cpu_s in settings["cpu_s_of"].items()}
        cpu_s = {problem.id: others.get(problem.id, limits.cpu_s) for problem in task.problems}
        task = replace(task, limits=replace(limits, cpu_s=task.limits.cpu_s))
        n, num_problems = int(str(settings["n"]).partition("-")[0]), int(settings["problems"])
        sha256 = str(settings["samples_sha256"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(path, f"is not a protocol of this version ({error})", "score the samples again") from None
    given = _samples(task, origin, folder, samples, num_problems, sha256)
    if given is None:
        task = task.first(num_problems)  # as --limit had it
    kinds = _kinds(storage.join(folder, "verdicts.jsonl"), len(given)) if folder and given is not None else None
    return ReproductionRequest(task, origin, n, cpu_s, given, kinds, settings)


def _kinds(path: str, samples: int) -> list[str]:
    try:
        kinds = [str(json.loads(line)["kind"]) for line in storage.read_bytes(path).splitlines()]
    except (ValueError, TypeError, KeyError, RecursionError):
        kinds = []
    if len(kinds) != samples:
        raise DataError(path, f"is damaged: it has no verdict for each of {samples} samples", "score them again")
    return kinds


def _samples(
    task: Task, origin: Origin, folder: str | None, samples: str | None, num_problems: int, sha256: str
) -> list[Sample] | None:
    if samples is None and folder is not None:
        samples = storage.join(folder, "samples.jsonl")
    if samples is None and origin.source == CANONICAL:
        return canonical_samples(task)[:num_problems]
    if samples is None and origin.temperature is not None:
        return None
    path = samples or origin.source
    found = read_samples(path, task, partial=True)
    if fingerprint(found) != sha256:
        raise UserError(path, "holds other samples than the result was made from", "give the original file")
    return found


@dataclass(frozen=True)
class Reproduction:
    result: EvalResult
    changed: list[dict[str, str]]
    """Samples with another kind of verdict than the first time: task_id, before, now."""
    settings: dict[str, list[Any]]
    """Parts of the protocol that differ: key -> [before, now]."""

    @property
    def new_completions(self) -> bool:
        """Whether the model generated other completions than the first time."""
        return "samples_sha256" in self.settings

    @property
    def is_identical(self) -> bool:
        return not self.changed and not self.new_completions


def reproduce(
    request: ReproductionRequest, samples: list[Sample], sandbox: Sandbox, *,
    workers: int | None = None, progress: Callable[[int], None] | None = None, out: str | None = None,
) -> Reproduction:  # fmt: skip
    """Score `samples`, the request's own or newly generated ones, with the limits of the first time."""
    result = score_samples(
        request.task, samples, sandbox, request.origin, cpu_s=request.cpu_s, workers=workers, progress=progress,
        calibration=request.settings.get("calibration", "given"), out=out,
    )  # fmt: skip
    parts = result.protocol.parts()
    settings = {key: [value, parts.get(key)] for key, value in request.settings.items() if value != parts.get(key)}
    before = request.kinds or [verdict.kind for verdict in result.verdicts]
    changed = [
        {"task_id": sample.task_id, "before": kind, "now": verdict.kind}
        for sample, kind, verdict in zip(samples, before, result.verdicts, strict=True)
        if kind != verdict.kind
    ]
    return Reproduction(result, changed, settings)
