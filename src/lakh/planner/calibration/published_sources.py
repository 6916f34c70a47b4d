"""What published measurements leave unsaid: data/published_sources.toml applied to a row of the CSV.

The `note` column has the form "model=NAME; fact; fact, ...". `NoteFacts` reads its numbers by the patterns below; other
facts are phrases that the rules of the data file name literally. Unseen rows with the same syntax work as well.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lakh.errors import ConfigError

__all__ = [
    "NoteFacts",
    "RowSettings",
    "exclusion",
    "gpu_data",
    "low_precision",
    "program_names",
    "program_plan",
    "row_settings",
]

DATA = Path(__file__).parents[1] / "data" / "published_sources.toml"

# Numbers that a note may state.
PATTERNS = {
    "model": r"model=([^;]+)",
    "head_dim": r"head dim (\d+)",
    "experts": r"MoE (\d+) (?:experts|routed) top-\d+",
    "top_k": r"MoE \d+ (?:experts|routed) top-(\d+)",
    "expert_ffn": r"expert ffn (\d+)",
    "peak_GiB": r"peak ([\d.]+) ?GiB",
    "peak_GB": r"peak ([\d.]+) ?GB",
    "gflop_per_token": r"([\d.]+) GFLOP/token",
    "container": r"container (\d\d\.\d\d(?:\.\d\d)?)",
}
UNITS = {"peak_GiB": ("peak_bytes", 2**30), "peak_GB": ("peak_bytes", 1e9), "gflop_per_token": ("flops_per_token", 1e9)}
CONTAINS = ("note", "interconnect", "model_contains")


@dataclass(frozen=True)
class NoteFacts:
    model: str = ""
    head_dim: int | None = None
    experts: int | None = None
    top_k: int | None = None
    expert_ffn: int | None = None
    peak_bytes: float | None = None
    """Measured peak memory of a GPU."""
    flops_per_token: float | None = None
    container: str = ""
    """NVIDIA container release, e.g. "26.04" or "26.04.01"."""

    @classmethod
    def read(cls, note: str) -> NoteFacts:
        found = {name: match[1].strip() for name, pattern in PATTERNS.items() if (match := re.search(pattern, note))}
        facts: dict[str, Any] = {name: found[name] for name in ("model", "container") if name in found}
        facts |= {name: int(found[name]) for name in ("head_dim", "experts", "top_k", "expert_ffn") if name in found}
        facts |= {fact: float(found[name]) * unit for name, (fact, unit) in UNITS.items() if name in found}
        return cls(**facts)


@dataclass
class RowSettings:
    """What programs and rules say about one row."""

    program: str
    gated: bool = True
    """Feed-forward of the program's models, unless the row shows otherwise."""
    interleaves: bool = False
    shards_context: bool = False
    node_GBps: float | None = None
    plan: dict[str, Any] = field(default_factory=dict)
    """Settings of the execution plan; `recompute` by name."""
    model: dict[str, Any] = field(default_factory=dict)
    """Settings of the model; `experts` only adds to a mixture that the note states."""


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(DATA.read_text(encoding="utf-8"))


def gpu_data(name: str) -> dict[str, float] | None:
    return _data()["gpus"].get(name)  # type: ignore[no-any-return]


def program_names() -> tuple[str, ...]:
    """Programs whose measurements were published."""
    return tuple(name for name in _data()["programs"] if name not in ("unknown", "lakh"))


def program_plan(name: str) -> dict[str, Any]:
    """Settings of the execution plan that a program has by default; `recompute` by name."""
    return _of_program(name, {"recompute": ""}).plan


def low_precision(precision: str) -> float | None:
    return _data()["low_precision"].get(precision)  # type: ignore[no-any-return]


def exclusion(row: Mapping[str, str], facts: NoteFacts) -> str | None:
    """Why a row cannot be planned, or None."""
    values = {**row, "model": facts.model}
    return next((str(rule["reason"]) for rule in _data()["exclude"] if _applies(rule["when"], values)), None)


def row_settings(row: Mapping[str, str], facts: NoteFacts) -> RowSettings:
    def values_of(settings: RowSettings) -> dict[str, Any]:
        values = {**row, **settings.plan, "model": facts.model, "container": facts.container}
        return values | {"model_contains": facts.model, "program": settings.program}

    settings = _of_program(_program_of(row["source"]), row)
    values = values_of(settings)
    for rule in _data()["rules"]:
        if not _applies(rule["when"], values):
            continue
        if "program" in rule:
            settings = _of_program(rule["program"], row)
        settings.node_GBps = rule.get("node_GBps", settings.node_GBps)
        settings.plan |= rule.get("plan", {})
        for name, value in rule.get("model", {}).items():
            old = settings.model.get(name)
            settings.model[name] = {**(old or {}), **value} if isinstance(value, dict) else value
        values = values_of(settings)
    return settings


def _program_of(source: str) -> str:
    sources: dict[str, str] = _data()["sources"]
    return next((sources[p] for p in sorted(sources, key=len, reverse=True) if source.startswith(p)), "unknown")


def _of_program(name: str, row: Mapping[str, str]) -> RowSettings:
    table: dict[str, Any] = _data()["programs"][name]
    table = _data()["programs"][table["like"]] if "like" in table else table
    defaults = {"native_attention": 0, "whole_experts": 0, "node_dispatch": 0, "recompute": "none"}
    plan = defaults | table.get("plan", {})
    if row["recompute"]:
        plan["recompute"] = row["recompute"]
    flags = {flag: table[flag] for flag in ("gated", "interleaves", "shards_context") if flag in table}
    return RowSettings(name, plan=plan, **flags)


def _applies(conditions: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    return all(_holds(name, expected, values) for name, expected in conditions.items())


def _holds(name: str, expected: Any, values: Mapping[str, Any]) -> bool:
    if name.endswith("_not"):
        return not _holds(name.removesuffix("_not"), expected, values)
    if name == "container_from":
        return bool(values["container"] >= expected)
    if name not in values and not isinstance(expected, int):
        raise ConfigError(f"{DATA.name}, condition {name}", "is not a column or setting", "correct the rule")
    value = values.get(name, 0)
    if not isinstance(value, str):
        return bool(value == expected)
    choices = [expected] if isinstance(expected, str) else expected
    if name in CONTAINS:
        return any(choice in value for choice in choices)
    return any(value.startswith(choice) if choice else not value for choice in choices)
