"""The one line that says how a score was made. Two scores are comparable when their lines are equal.

`key=value | key=value`, each value as JSON: people can read it, and `parse` gives back what `line` was made from, so
that a result can be reproduced from its line.
"""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lakh import __version__
from lakh.errors import UserError
from lakh.evals.task import Task
from lakh.evals.sandbox.verdict import SandboxLimits

__all__ = ["Origin", "Protocol", "parse"]

BETWEEN = " | "


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the completions came from. None stands for what a samples file does not tell."""

    source: str
    """The model, the samples file, or "canonical solutions"."""
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    form: str | None = None
    """How an endpoint was asked: "completions" or "chat"."""
    served_name: str | None = None
    """Of the model at an endpoint, where it was named."""
    stripped: bool | None = None
    """Prompts were given without the white space at their end."""
    fill_order: str | None = None
    """In which order lakh's engine was given what stands around a hole: "psm" or "spm"."""


@dataclass(frozen=True, slots=True)
class Protocol:
    task: Task
    origin: Origin
    limits: SandboxLimits
    sandbox: str
    num_problems: int
    samples_per_problem: str
    """A number, or a range such as "5-10"."""
    samples_sha256: str = ""
    cpu_s: Mapping[str, int] = field(default_factory=dict)
    """Problem id -> its CPU limit."""
    calibration: str = "given"
    """What those limits rest on: a measurement of the references by name and date, or "given"."""

    def parts(self) -> dict[str, Any]:
        known = {key: value for key, value in asdict(self.origin).items() if value is not None}
        usual, others = _usual(self.cpu_s, self.limits.cpu_s)
        return {
            "task": self.task.name,
            "data_sha256": self.task.data_sha256,
            "problems": self.num_problems,
            "prompt": self.task.prompt_form,
            "stop": list(self.task.stops),
            "extraction": self.task.extraction,
            "n": self.samples_per_problem,
            **known,
            "samples_sha256": self.samples_sha256,
            "limits": asdict(self.limits) | {"cpu_s": usual},
            "cpu_s_of": others,
            "calibration": self.calibration,
            "sandbox": self.sandbox,
            "versions": {"lakh": __version__, "python": platform.python_version(), "machine": platform.machine()},
        }

    def line(self) -> str:
        return BETWEEN.join(f"{key}={json.dumps(value)}" for key, value in self.parts().items())


def _usual(cpu_s: Mapping[str, int], default_s: int) -> tuple[int, dict[str, int]]:
    """The limit of most problems, and the problems that have another."""
    if not cpu_s:
        return default_s, {}
    usual = Counter(cpu_s.values()).most_common(1)[0][0]
    return usual, {key: value for key, value in cpu_s.items() if value != usual}


def parse(line: str) -> dict[str, Any]:
    """The parts of a protocol line."""
    reader, parts, at = json.JSONDecoder(), {}, 0
    line = line.strip()
    while at < len(line):
        key, sign, _ = line[at:].partition("=")
        try:
            if not sign or not key:
                raise ValueError
            parts[key], at = reader.raw_decode(line, at + len(key) + 1)
        except ValueError:
            todo = "give the line as `lakh eval` printed it"
            raise UserError("protocol line", f"cannot be read from {line[at : at + 30]!r} on", todo) from None
        at += len(BETWEEN) if line.startswith(BETWEEN, at) else len(line)
    return parts
