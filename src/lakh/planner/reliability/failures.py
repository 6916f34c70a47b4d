"""Failure statistics of published runs, as rates per GPU-hour, with sources."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lakh import config
from lakh.errors import ConfigError
from lakh.planner.catalogue import named_table

__all__ = ["FailureClass", "FailureStatistics", "load_failures"]


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
    table = named_table("failures.toml", name, "--failures")
    return config.from_dict(FailureStatistics, table, origin=f"failures.toml [{name}]")
