"""Decisions about a node: pure functions of readings, earlier readings and the ledger's counts, with their reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lakh.health.checks import CHECKS, HealthCheck, HealthLevel, HealthReading

__all__ = ["REPEAT_OFFENCES", "HealthDecision", "HealthFinding", "Word", "decide_health", "evaluate_checks", "inject"]

Word = Literal["healthy", "watch", "drain", "rma"]
_ORDER: tuple[Word, ...] = ("healthy", "watch", "drain", "rma")
REPEAT_OFFENCES = 3  # drains of one serial number, this one included, before it is sent back


@dataclass(frozen=True)
class HealthFinding:
    """The result of one check on one device."""

    check: str
    device: str
    serial: str
    ok: bool
    value: float
    level: HealthLevel
    reason: str


@dataclass(frozen=True)
class HealthDecision:
    word: Word
    reason: str


def evaluate_checks(
    readings: Sequence[HealthReading],
    before: Iterable[HealthReading] = (),
    checks: Sequence[HealthCheck] = CHECKS,
) -> list[HealthFinding]:
    """One finding per check and device that has its metric. A rise is counted from the reading `before`, if any."""
    earlier = {(reading.device, reading.metric): reading.value for reading in before}
    findings = []
    for check in checks:
        for reading in readings:
            if reading.metric == check.metric:
                start = earlier.get((reading.device, reading.metric), reading.value)
                findings.append(_find(check, reading, start))
    return findings


def _find(check: HealthCheck, reading: HealthReading, start: float) -> HealthFinding:
    value = reading.value - start if check.compare == "rise" else reading.value
    is_bad = value < check.limit if check.compare == "below" else value > check.limit
    unit = {"above": "above", "below": "below", "rise": "a rise of more than"}[check.compare]
    reason = f"{check.reason}: {check.metric} {value:g}, limit: {unit} {check.limit:g}" if is_bad else ""
    return HealthFinding(check.name, reading.device, reading.serial, not is_bad, value, check.level, reason)


def decide_health(findings: Sequence[HealthFinding], drains: Mapping[str, int] | None = None) -> HealthDecision:
    """The worst level of all findings. `drains`: earlier drains by serial number; repeat offenders are sent back."""
    worst = (
        HealthDecision("healthy", "every check passed") if findings else HealthDecision("healthy", "nothing to check")
    )
    for finding in findings:
        if finding.ok:
            continue
        word: Word = finding.level
        reason = f"{finding.device}: {finding.reason}"
        earlier = (drains or {}).get(finding.serial, 0)
        if word == "drain" and earlier + 1 >= REPEAT_OFFENCES:
            word, reason = "rma", f"{reason}; drained {earlier} times before"
        if _ORDER.index(word) > _ORDER.index(worst.word):
            worst = HealthDecision(word, reason)
    return worst


def inject(
    check: HealthCheck, readings: Sequence[HealthReading], before: Sequence[HealthReading], node: str
) -> tuple[list[HealthReading], list[HealthReading]]:
    """(readings, before) with the check's fault in the first device that has its metric, or in one made up for it."""
    target = next((reading for reading in readings if reading.metric == check.metric), None)
    if target is None:
        target = HealthReading("injected", node, check.metric, 0.0)
        before = [*before, target]
    value = target.value + check.fault if check.compare == "rise" else check.fault
    faulty = HealthReading(target.device, target.serial, check.metric, value)
    return [*(reading for reading in readings if reading is not target), faulty], list(before)
