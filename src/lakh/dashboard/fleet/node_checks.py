"""What node checks have found: the file that `lakh health check --ledger` writes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from lakh import storage
from lakh.dashboard.numbers import finite
from lakh.errors import LakhError

__all__ = ["health_findings"]

MAX_FINDINGS = 200
MAX_LEDGER_BYTES = 16 << 20
LEDGER = "health.jsonl"


def health_findings(run_dir: Path) -> list[dict[str, Any]]:
    """Findings of `lakh health check --ledger`, newest first: RUN/health.jsonl, or the file beside the runs."""
    rows: list[dict[str, Any]] = []
    for path in (run_dir / LEDGER, run_dir.parent / LEDGER):
        try:
            if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_LEDGER_BYTES:
                continue
            lines = storage.read_bytes(path).decode(errors="replace").splitlines()
        except (OSError, LakhError):
            continue
        rows += itertools.chain.from_iterable(map(_finding, lines))
    rows.sort(key=lambda row: -(row["time_s"] or 0.0))
    return rows[:MAX_FINDINGS]


def _finding(line: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return []
    if not isinstance(found, dict):
        return []
    words = {key: str(found.get(key, ""))[:200] for key in ("node", "serial", "check", "level", "reason")}
    return [{"time_s": finite(found.get("time_s")), **words}]
