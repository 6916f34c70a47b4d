"""A result made again from its own protocol, and what came out differently.

Takes the folder of a result, or a file with its protocol line. Completions come from where the protocol says: the
samples kept beside the result, the samples file, the reference solutions, or the model, asked again. SandboxLimits are those
of the protocol: nothing is calibrated anew.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from typing import Any

from lakh import storage
from lakh.errors import DataError, UserError
from lakh.evals.scoring.compare import read_result
from lakh.evals.scoring.protocol import Origin, parse
from lakh.evals.generation.samples import CANONICAL, Sample, canonical_samples, fingerprint, read_samples
from lakh.evals.task import Task
from lakh.evals.tasks import load_task
from lakh.evals.sandbox.verdict import SandboxLimits, SandboxVerdict

__all__ = ["Request", "differences", "read_request"]


@dataclass(frozen=True)
class ReproductionRequest:
    task: Task
    origin: Origin
    n: int
    cpu_s: dict[str, int]
    samples: list[Sample] | None
    """None where the model has to be asked again."""
    kinds: list[str] | None
    """How each sample ended the first time; None where only the line is known."""
    settings: dict[str, Any]


def read_request(path: str, data: str | None, *, samples: str | None = None) -> ReproductionRequest:
    """What the protocol of a result asks for. `samples` stands in for a samples file that has moved."""
    folder = None
    if storage.is_local(path) and storage.local_path(path).is_file() and not path.endswith(".json"):
        settings = parse(storage.read_bytes(path).decode("utf-8", "replace"))
    else:
        settings = read_result(path)["settings"]
        folder = path.rpartition("/")[0] or "." if path.endswith(".json") else path
    try:
        task = load_task(settings["task"], data)
        if task.data_sha256 != settings["data_sha256"]:
            raise UserError(path, "was made with other data", f"give --data with sha256 {settings['data_sha256']}")
        names = {field.name for field in fields(Origin)}
        origin = Origin(**{key: settings[key] for key in names if key in settings})
        limits = _limits(settings["limits"])
        others = {name: _limits(settings["limits"] | {"cpu_s": s}).cpu_s for name, s in settings["cpu_s_of"].items()}
        cpu_s = {problem.id: others.get(problem.id, limits.cpu_s) for problem in task.problems}
        task = replace(task, limits=replace(limits, cpu_s=task.limits.cpu_s))
        n, num_problems = int(str(settings["n"]).partition("-")[0]), int(settings["problems"])
        sha256 = str(settings["samples_sha256"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(path, f"is no protocol of this version ({error})", "score the samples again") from None
    given = _samples(task, origin, folder, samples, num_problems, sha256)
    if given is None:
        task = task.first(num_problems)  # as --limit had it
    kinds = _kinds(storage.join(folder, "verdicts.jsonl"), len(given)) if folder and given is not None else None
    return ReproductionRequest(task, origin, n, cpu_s, given, kinds, settings)


def _limits(told: dict[str, Any]) -> SandboxLimits:
    """ValueError or TypeError for what are none."""
    odd = [name for name, value in told.items() if type(value) is not int and (name, type(value)) != ("wall_s", float)]
    if odd:
        raise ValueError(f"{odd[0]} is no number")
    return SandboxLimits(**told)


def _kinds(path: str, samples: int) -> list[str]:
    """How each sample ended the first time."""
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


def differences(request: ReproductionRequest, verdicts: list[SandboxVerdict]) -> list[dict[str, str]]:
    """Samples that ended in another class than the first time."""
    if request.kinds is None or request.samples is None:
        return []
    rows = zip(request.samples, request.kinds, verdicts, strict=True)
    return [
        {"task_id": sample.task_id, "before": before, "now": verdict.kind}
        for sample, before, verdict in rows
        if before != verdict.kind
    ]
