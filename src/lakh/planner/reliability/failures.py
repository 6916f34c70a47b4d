"""Failure statistics of published runs, as rates per GPU-hour, with sources."""

from __future__ import annotations

import difflib
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

from lakh import config
from lakh.errors import ConfigError, UserError

__all__ = ["FailureClass", "FailureStatistics", "load_failures"]

DATA = Path(__file__).parents[1] / "data" / "failures.toml"


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureClass:
    name: str
    count: int
    replaces: bool
    """Hardware must be replaced: a spare node is used until the old one is repaired."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureStatistics:
    gpus: int
    days: float
    source: str
    classes: tuple[FailureClass, ...]

    def __post_init__(self) -> None:
        config.require_positive(self, "gpus")
        if self.days <= 0 or not self.classes or min(c.count for c in self.classes) < 0:
            raise ConfigError("days", "must be above 0, and classes need counts of 0 or more", "correct the file")

    @property
    def count(self) -> int:
        return sum(item.count for item in self.classes)

    @property
    def per_gpu_hour(self) -> float:
        return self.count / (self.gpus * self.days * 24)

    @property
    def replacing_share(self) -> float:
        return sum(item.count for item in self.classes if item.replaces) / max(self.count, 1)

    def mtbf_s(self, gpus: int) -> float:
        """Mean seconds between interruptions of a job on `gpus` GPUs."""
        return 3600 / (self.per_gpu_hour * gpus) if self.count else math.inf


def load_failures(name: str) -> FailureStatistics:
    """A preset, or a TOML file with the same keys."""
    if name.endswith(".toml"):
        return config.load(FailureStatistics, name)
    book = tomllib.loads(DATA.read_text(encoding="utf-8"))
    if name not in book:
        near = difflib.get_close_matches(name, book, n=1)
        todo = f"did you mean {near[0]}?" if near else f"give a .toml file, or one of: {', '.join(book)}"
        raise UserError(f"--failures {name}", "no such preset", todo)
    return config.from_dict(FailureStatistics, book[name], origin=f"failures.toml [{name}]")
