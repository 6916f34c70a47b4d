"""The protocol line: how a score was made. Two scores are comparable if their lines are equal.

`key=value | key=value`, each value as JSON: people can read it, and `parse` gives back what `line` was made from, so a
result can be reproduced from its line.
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

__all__ = ["EvalProtocol", "Origin", "parse"]

SEPARATOR = " | "


@dataclass(frozen=True, slots=True)
class Origin:
    """How the completions were made. None for what is not known, as with a bare samples file."""

    source: str
    """The model, the samples file, or "canonical solutions"."""
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    form: str | None = None
    """API of the endpoint: "completions" or "chat"."""
    served_name: str | None = None
    """Name of the model at the endpoint, if one was given."""
    stripped: bool | None = None
    """Whether trailing white space was removed from prompts."""
    fill_order: str | None = None
    """Order of prefix and suffix in an infilling prompt for lakh's engine: "psm" or "spm"."""


@dataclass(frozen=True, slots=True)
class EvalProtocol:
    task: Task
    origin: Origin
    sandbox: str
    num_problems: int
    samples_per_problem: str
    """A number, or a range such as "5-10"."""
    samples_sha256: str = ""
    cpu_s: Mapping[str, int] = field(default_factory=dict)
    """Problem id -> its CPU limit."""
    calibration: str = "given"
    """Source of those limits: the hash and date of a measurement of the references, or "given"."""

    def parts(self) -> dict[str, Any]:
        known = {key: value for key, value in asdict(self.origin).items() if value is not None}
        usual = Counter(self.cpu_s.values() or [self.task.limits.cpu_s]).most_common(1)[0][0]
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
            "limits": asdict(self.task.limits) | {"cpu_s": usual},
            "cpu_s_of": {key: value for key, value in self.cpu_s.items() if value != usual},
            "calibration": self.calibration,
            "sandbox": self.sandbox,
            "versions": {"lakh": __version__, "python": platform.python_version(), "machine": platform.machine()},
        }

    def line(self) -> str:
        return SEPARATOR.join(f"{key}={json.dumps(value)}" for key, value in self.parts().items())


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
        at += len(SEPARATOR) if line.startswith(SEPARATOR, at) else len(line)
    return parts
