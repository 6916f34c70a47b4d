"""A file of what was found per serial number, one JSON line each, across jobs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lakh.errors import DataError
from lakh.health.decisions import HealthFinding
from lakh.storage import explain

__all__ = ["HealthLedger"]


class HealthLedger:
    def __init__(self, path: str | Path) -> None:
        self._path = Path(path).expanduser()

    def drains(self) -> dict[str, int]:
        """How often each serial number was found at the level `drain` or `rma`."""
        counts: Counter[str] = Counter()
        for entry in self._read():
            if entry.get("level") in ("drain", "rma"):
                counts[str(entry.get("serial"))] += 1
        return dict(counts)

    def append(self, findings: Sequence[HealthFinding], *, time_s: float, node: str) -> None:
        """Add the findings that are not ok."""
        entries = [
            {"time_s": time_s, "node": node, "serial": f.serial, "check": f.check, "level": f.level, "reason": f.reason}
            for f in findings
            if not f.ok
        ]
        if not entries:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(entry) + "\n" for entry in entries))
        except OSError as error:
            raise explain(error, self._path) or error from None

    def _read(self) -> list[dict[str, object]]:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise explain(error, self._path) or error from None
        try:
            entries = [json.loads(line) for line in content.decode().splitlines() if line]
        except (ValueError, RecursionError):
            raise DataError(str(self._path), "is not a ledger (one JSON object per line)", "move it away") from None
        return [entry for entry in entries if isinstance(entry, dict)]
