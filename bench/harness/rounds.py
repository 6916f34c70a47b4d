"""Alternating rounds: every system is measured once per round, so a busy moment of the machine hits all of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

__all__ = ["Attempts", "SystemFailed", "alternate", "best", "medians"]

T = TypeVar("T")


class SystemFailed(Exception):
    """A system cannot be measured; the message becomes the `failed` column of its row."""


@dataclass
class Attempts(Generic[T]):
    """The measurements of one system, or the reason why it has none."""

    measured: list[T] = field(default_factory=list)
    failed: str = ""


def alternate(
    systems: Mapping[str, Callable[[], T]],
    repeats: int,
    *,
    warmup: int = 0,
    progress: Callable[[str], object] = lambda text: None,
) -> dict[str, Attempts[T]]:
    """Measure each system `repeats` times in turn. A system that raises SystemFailed is not measured again."""
    found: dict[str, Attempts[T]] = {name: Attempts() for name in systems}
    for number in range(1 - warmup, repeats + 1):
        for name, measure in systems.items():
            if not found[name].failed:
                progress(f"{name}: round {number} of {repeats}" if number > 0 else f"{name}: warm-up")
                try:
                    value = measure()
                except SystemFailed as error:
                    found[name] = Attempts(failed=str(error))
                    continue
                if number > 0:
                    found[name].measured.append(value)
    return found


def best(measured: Sequence[Sequence[float]]) -> list[float]:
    """The minimum of each figure over the rounds."""
    return [min(values) for values in zip(*measured, strict=True)]


def medians(measured: Sequence[Sequence[float]]) -> list[Any]:
    """The median of each figure over the rounds."""
    return [statistics.median(values) for values in zip(*measured, strict=True)]
