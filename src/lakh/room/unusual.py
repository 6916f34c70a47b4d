"""Events worth a sentence.

`sentence` turns a record into (weight, words) or None for an ordinary one.
A kind that this version does not know is told with its fields: nothing disappears silently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["NOTE", "SERIOUS", "WARNING", "sentence"]

NOTE, WARNING, SERIOUS = "note", "warning", "serious"
Record = dict[str, Any]

ORDINARY = frozenset(
    {"step_done", "evaluated", "initialised", "resources", "traffic", "measured", "scored", "checkpoint_saved"}
)
LONGEST_CHARS = 400


def _ranks_lost(r: Record) -> str:
    lost = ", ".join(str(rank) for rank in r["lost"])
    return f"lost rank {lost}; {r['left']} went on without a restart after {r['seconds']:.1f} s: {r['reason']}"


def _rewound(r: Record) -> str:
    skipped = sum(end - first for first, end in r["skipped"])
    return f"went back to step {r['to_step']} ({skipped} sequences left out for good): {r['reason']}"


def _started(r: Record) -> str:
    again = f"attempt {r['attempt'] + 1}, " if r["attempt"] else ""
    place = f"{r['world']} rank{'s' if r['world'] != 1 else ''} on {r['device']}"
    return f"began at step {r['step']}: {again}{place}, {r['parameters'] / 1e6:,.4g}M parameters"


# kind -> (weight, words). A record of another version may lack a field: it is then told as it is.
WORDS: dict[str, tuple[str, Callable[[Record], str]]] = {
    "run_started": (NOTE, _started),
    "run_ended": (NOTE, lambda r: f"ended after {r['seconds']:,.0f} s: {r['reason']}"),
    "setting_changed": (NOTE, lambda r: f"{r['path']}: {r['before']!r} became {r['after']!r}"),
    "step_skipped": (WARNING, lambda r: f"update skipped: {r['reason']}"),
    "rewound": (WARNING, _rewound),
    "checkpoint_skipped": (WARNING, lambda r: f"checkpoint {r['path']} passed over: {r['reason']}"),
    "events_dropped": (WARNING, lambda r: f"{r['count']} events were not written: the disk was too slow"),
    "rewind_refused": (SERIOUS, lambda r: f"could not go back ({r['why']}): {r['reason']}"),
    "restarted": (SERIOUS, lambda r: f"started again, attempt {r['attempt'] + 1}: {r['reason']}"),
    "ranks_lost": (SERIOUS, _ranks_lost),
    "fault_struck": (SERIOUS, lambda r: f"planned fault {r['fault']}"),
}


def sentence(record: Record) -> tuple[str, str] | None:
    """How much a record weighs, and what it says; None for the ordinary."""
    kind = record["kind"]
    if kind in ORDINARY:
        return None
    weight, words = WORDS.get(kind, (NOTE, _as_it_is))
    try:
        text = words(record)
    except (KeyError, TypeError, ValueError):
        text = _as_it_is(record)
    return weight, text if len(text) <= LONGEST_CHARS else text[: LONGEST_CHARS - 1] + "…"


def _as_it_is(record: Record) -> str:
    fields = {k: v for k, v in record.items() if k not in ("time_s", "rank", "step", "kind", "reason")}
    said = ", ".join(f"{key} {value}" for key, value in fields.items())
    reason = record.get("reason")
    return (
        f"{record['kind'].replace('_', ' ')}{': ' + str(reason) if reason else ''}{' (' + said + ')' if said else ''}"
    )
