"""Records from event files that anybody may have written: wrong types are removed, long texts and tables are cut.

A field that does not have the type of its event is dropped, as if another version had written the record. A record
without a usable time, rank, step and kind is refused.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

from lakh.dashboard.numbers import MOST
from lakh.events import Event, Record, current_kind

__all__ = ["clean_record"]

MAX_RANK = 1 << 20
MAX_STEP = 1 << 50
MAX_TIME_S = 1e11
MAX_DURATION_S = 1e9
"""Thirty years."""
MAX_TEXT_CHARS = 2_000
MAX_KIND_CHARS = 60
MAX_ITEMS = 1_024
BASE = ("time_s", "rank", "step", "kind")
PLAIN = {int, float, str, type(None)}


def clean_record(record: Record) -> Record | None:
    """The record with today's kind and usable fields only; None if it has no place in a run."""
    step, rank, time_s = record.get("step", 0), record.get("rank", 0), record["time_s"]
    if type(step) is not int or type(rank) is not int or not -1 <= step <= MAX_STEP or not 0 <= rank <= MAX_RANK:
        return None
    if type(time_s) not in (int, float) or not 0 <= time_s <= MAX_TIME_S:
        return None
    kind = current_kind(record["kind"])
    if kind == "step_done" and _is_plain(record):  # nearly all records of a run
        record["step"], record["rank"], record["kind"] = step, rank, kind
        return record
    base = {"time_s": time_s, "rank": rank, "step": step, "kind": kind[:MAX_KIND_CHARS]}
    kinds = _field_kinds(kind)
    fields = {str(name)[:MAX_KIND_CHARS]: value for name, value in list(record.items())[:MAX_ITEMS] if name not in BASE}
    cleaned = {name: _clean(value, kinds.get(name, "text")) for name, value in fields.items()}
    usable = {name: value for name, value in cleaned.items() if value is not _UNUSABLE}
    for name in [name for name in usable if name.endswith("_s") or name == "seconds"]:
        most_s = MAX_TIME_S if name == "detected_s" else MAX_DURATION_S
        if not (usable[name] is None or (type(usable[name]) in (int, float) and 0 <= usable[name] <= most_s)):
            del usable[name]
    return base | usable


_UNUSABLE = object()


def _is_plain(record: Record) -> bool:
    """Numbers only, but for the kind, and a possible step time."""
    types = list(map(type, record.values()))
    return set(types) <= PLAIN and types.count(str) == 1 and 0 <= (record.get("step_s") or 0) <= MAX_DURATION_S


@cache
def _field_kinds(kind: str) -> dict[str, str]:
    """Field -> number, text, table or list, from the annotations of the event's class; empty for an unknown kind."""
    if kind not in Event.kinds:
        return {}
    found = {}
    for one in dataclasses.fields(Event.kinds[kind]):
        word = str(one.type)
        for start, meaning in (("str", "text"), ("Mapping", "table"), ("Sequence", "list"), ("tuple", "list")):
            if word.startswith(start):
                found[one.name] = meaning
        if word.startswith(("int", "float")):
            found[one.name] = "number"
    return found


def _clean(value: Any, kind: str) -> Any:
    if kind == "number":
        if value is None or (type(value) in (int, float) and not abs(value) >= MOST):  # NaN stays: a loss may be
            return value
        return _UNUSABLE
    if kind == "table":
        if not isinstance(value, dict):
            return _UNUSABLE
        rows = list(value.items())[:MAX_ITEMS]
        return {str(name)[:MAX_KIND_CHARS]: n for name, n in rows if type(n) in (int, float) and abs(n) < MOST}
    if kind == "list":
        return _numbers(value) if isinstance(value, list) else _UNUSABLE
    if isinstance(value, str):
        return value[:MAX_TEXT_CHARS]
    return value if value is None or type(value) in (bool, int, float) else repr(value)[:MAX_TEXT_CHARS]


def _numbers(values: list[Any]) -> Any:
    """Numbers, or pairs of them; unusable if there is anything else."""
    kept = values[:MAX_ITEMS]
    flat = [number for value in kept for number in (value if isinstance(value, list) and len(value) == 2 else [value])]
    return kept if all(type(number) in (int, float) and abs(number) < MOST for number in flat) else _UNUSABLE
