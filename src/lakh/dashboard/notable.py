"""One sentence for each notable event.

`describe` turns a record into (severity, text), or None for a routine event. An event of an unknown kind is described
by its fields, so nothing disappears silently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["NOTE", "WARNING", "describe"]

NOTE, WARNING, SERIOUS = "note", "warning", "serious"
Record = dict[str, Any]

STEP_KINDS = {"step_done", "evaluated", "initialised", "resources", "expert_load", "network_traffic", "hook_metrics"}
ROUTINE_KINDS = STEP_KINDS | {"scored", "checkpoint_saved", "memory_copied", "input_distributed", "step_predicted"}
MAX_CHARS = 400


def _ranks_lost(r: Record) -> str:
    lost = ", ".join(str(rank) for rank in r["lost"])
    return f"lost rank {lost}; {r['left']} continued without a restart after {r['seconds']:.1f} s: {r['reason']}"


def _ranks_joined(r: Record) -> str:
    joined = ", ".join(str(rank) for rank in r["joined"])
    return f"rank {joined} joined after {r['seconds']:.1f} s: {r['ranks']} ranks"


def _rewound(r: Record) -> str:
    skipped = sum(end - first for first, end in r["skipped"])
    return f"went back to step {r['to_step']} and skips {skipped} sequences: {r['reason']}"


def _started(r: Record) -> str:
    attempt = f"attempt {r['attempt'] + 1}, " if r["attempt"] else ""
    place = f"{r['world']} rank{'s' if r['world'] != 1 else ''} on {r['device']}"
    return f"started at step {r['step']}: {attempt}{place}, {r['parameters'] / 1e6:,.4g}M parameters"


DESCRIPTIONS: dict[str, tuple[str, Callable[[Record], str]]] = {
    # Notes are the ordinary history of a run; the others are unusual.
    "run_started": (NOTE, _started),
    "run_ended": (NOTE, lambda r: f"ended after {r['seconds']:,.0f} s: {r['reason']}"),
    "setting_changed": (NOTE, lambda r: f"{r['path']} changed from {r['before']!r} to {r['after']!r}"),
    "step_skipped": (WARNING, lambda r: f"update skipped: {r['reason']}"),
    "rewound": (WARNING, _rewound),
    "checkpoint_skipped": (WARNING, lambda r: f"checkpoint {r['path']} skipped: {r['reason']}"),
    "events_dropped": (WARNING, lambda r: f"{r['count']} events were not written: the disk was too slow"),
    "rewind_refused": (SERIOUS, lambda r: f"could not go back ({r['why']}): {r['reason']}"),
    "restarted": (SERIOUS, lambda r: f"restarted, attempt {r['attempt'] + 1}: {r['reason']}"),
    "ranks_lost": (SERIOUS, _ranks_lost),
    "memory_restored": (NOTE, lambda r: f"restored from memory in {r['seconds']:.1f} s"),
    "straggler_found": (
        WARNING,
        lambda r: f"rank {r['slow_rank']} computes {r['ratio']:.2f} times as long as others",
    ),
    "ranks_joined": (NOTE, _ranks_joined),
    "fault_injected": (SERIOUS, lambda r: f"injected fault {r['fault']}"),
}


def describe(record: Record) -> tuple[str, str] | None:
    """The severity of a record and its text; None for a routine event."""
    kind = record["kind"]
    if kind in ROUTINE_KINDS:
        return None
    severity, text_of = DESCRIPTIONS.get(kind, (NOTE, _list_fields))
    try:
        text = text_of(record)
    except (KeyError, TypeError, ValueError):  # another version's record: its fields differ
        text = _list_fields(record)
    return severity, text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 1] + "…"


def _list_fields(record: Record) -> str:
    fields = {k: v for k, v in record.items() if k not in ("time_s", "rank", "step", "kind", "reason")}
    details = ", ".join(f"{key} {value}" for key, value in fields.items())
    reason = f": {record['reason']}" if record.get("reason") else ""
    return f"{record['kind'].replace('_', ' ')}{reason}{f' ({details})' if details else ''}"
