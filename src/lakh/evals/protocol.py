"""The one line that says how a score was made. Two scores are comparable when their lines are equal."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any

from lakh import __version__
from lakh.evals.sandbox import Limits, Sandbox
from lakh.evals.task import Task

__all__ = ["Origin", "Protocol"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the completions came from. None stands for what a samples file does not tell."""

    source: str
    """The model, the samples file, or "canonical solutions"."""
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Protocol:
    task: Task
    origin: Origin
    limits: Limits
    sandbox: str
    num_problems: int
    samples_per_problem: str
    """A number, or a range such as "5-10"."""

    @staticmethod
    def of(task: Task, origin: Origin, limits: Limits, sandbox: Sandbox, counts: dict[str, int]) -> Protocol:
        """`counts` is task id -> number of samples."""
        low, high = min(counts.values()), max(counts.values())
        per_problem = str(low) if low == high else f"{low}-{high}"
        return Protocol(task, origin, limits, sandbox.description, len(counts), per_problem)

    def parts(self) -> dict[str, Any]:
        known = {key: value for key, value in asdict(self.origin).items() if value is not None}
        return {
            "task": self.task.name,
            "data_sha256": self.task.data_sha256,
            "problems": self.num_problems,
            "prompt": self.task.prompt_form,
            "stop": list(self.task.stops),
            "extraction": self.task.extraction,
            "n": self.samples_per_problem,
            **known,
            "limits": asdict(self.limits),
            "sandbox": self.sandbox,
            "versions": {"lakh": __version__, "python": platform.python_version()},
        }

    def line(self) -> str:
        parts = self.parts()
        parts["limits"] = ",".join(f"{key}={value:g}" for key, value in parts["limits"].items())
        parts["versions"] = ",".join(f"{key} {value}" for key, value in parts["versions"].items())
        parts["data_sha256"] = parts["data_sha256"][:12]
        return " | ".join(f"{key}: {value}" for key, value in parts.items())
