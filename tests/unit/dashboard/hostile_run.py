"""A run folder that means harm: every field of every event with every kind of wrong value, and damaged lines."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

from lakh.events import Event

__all__ = ["MARKUP", "write_hostile_run"]

MARKUP = "<img src=x onerror=document.title='harmed'>"
VALUES = (
    *(None, True, -1, 0, 10**30, 10**400, 1e308, float("inf"), float("-inf"), float("nan")),
    *(MARKUP, "x" * 200_000, "</script><script>document.title='harmed'</script>", "\u2028\u202e\x00"),
    *([], [1, "a", None], {"a": {"b": [1]}}, {MARKUP: 1e300}),
)
SETTINGS = f"""name = "{MARKUP}"
[train]
steps = "many"
[mesh]
tp = [1]
[cluster]
tiers = [{{name = 3, size = "x"}}]
huge = "{"y" * 100_000}"
"""


def write_hostile_run(run_dir: Path, seed: int, events: int = 300) -> None:
    rng, lines = random.Random(seed), []
    kinds = [*filter(None, Event.kinds), MARKUP, ""]
    for number in range(events):
        kind = rng.choice(kinds)
        record = {"time_s": 1.8e9 + number, "rank": 0, "step": number, "kind": kind}
        if kind in Event.kinds:
            names = {one.name for one in dataclasses.fields(Event.kinds[kind])} - record.keys()
            record |= {name: rng.choice(VALUES) for name in sorted(names)}
        if rng.random() < 0.2:
            record[rng.choice(["time_s", "rank", "step", "kind"])] = rng.choice(VALUES)
        if rng.random() < 0.1:
            record.pop(rng.choice(sorted(record)))
        line = json.dumps(record)
        lines.append(line[: rng.randrange(len(line))] if rng.random() < 0.05 else line)
    (run_dir / "events").mkdir(parents=True)
    (run_dir / "events" / "rank-00000.jsonl").write_text("\n".join(lines))
    (run_dir / "run.toml").write_text(SETTINGS)
