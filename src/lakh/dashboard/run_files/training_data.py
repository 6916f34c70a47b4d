"""Where the training data of a run came from: its token set, and the corpus that the token set was packed from.

A token set names its corpus by hash. The corpus is looked for beside it: `lakh corpus build --out corpus` and
`lakh tokens pack corpus --out tokens` in one folder are found, others are not. Local folders only.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from lakh import storage
from lakh.dashboard.numbers import counts, finite
from lakh.errors import LakhError

__all__ = ["training_data"]

MAX_MANIFEST_BYTES = 64 << 20
MAX_NEIGHBOURS = 200
MAX_ROWS = 12
SPLITS = ("train", "heldout")
MAX_LINE_CHARS = 400


def training_data(tokens_url: Any) -> dict[str, Any] | None:
    """Counts of the token set at `tokens_url` and of its corpus; None if there is none that can be read."""
    if not isinstance(tokens_url, str) or not storage.is_local(tokens_url):
        return None
    folder = storage.local_path(tokens_url)
    tokens = _manifest(folder)
    splits = tokens.get("splits")
    if not isinstance(splits, dict):
        return None
    sizes = {
        name: {key: finite(splits[name].get(key)) for key in ("documents", "tokens")}
        for name in SPLITS
        if isinstance(splits.get(name), dict)
    }
    return {
        "tokens": {"path": str(folder), "vocab": finite(tokens.get("vocab")), "splits": sizes},
        "corpus": _corpus(folder.parent, tokens.get("corpus_sha256")),
    }


def _corpus(folder: Path, sha256: Any) -> dict[str, Any] | None:
    try:
        neighbours = sorted(itertools.islice(folder.iterdir(), MAX_NEIGHBOURS))
    except OSError:
        return None
    for path in neighbours:
        found = _manifest(path)
        if sha256 and found.get("output_sha256") == sha256 and isinstance(found.get("dropped"), dict):
            numbers = {name: finite(found.get(name)) for name in ("read", "kept", "bytes_in", "bytes_out")}
            tables = ("dropped", "dropped_bytes", "languages", "language_bytes", "licences", "secrets")
            largest = {name: _largest(found.get(name)) for name in tables}
            return {"path": str(path), **numbers, **largest, "redactions": _redactions(found.get("samples"))}
    return None


def _largest(table: Any) -> dict[str, float]:
    """The largest counts of a table, the rest as one."""
    rows = sorted(counts(table).items(), key=lambda row: (-row[1], row))
    rest = sum(count for _, count in rows[MAX_ROWS:])
    return dict(rows[:MAX_ROWS]) | ({"other": rest} if rest else {})


def _redactions(samples: Any) -> list[dict[str, str]]:
    """Lines before and after redaction, as the corpus stores them: secrets are masked in both."""
    rows = [row for row in samples if isinstance(row, dict)] if isinstance(samples, list) else []
    keys = ("place", "before", "after")
    return [{key: str(row.get(key, ""))[:MAX_LINE_CHARS] for key in keys} for row in rows[:MAX_ROWS]]


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / storage.MANIFEST
    try:
        if not path.is_file() or path.stat().st_size > MAX_MANIFEST_BYTES:
            return {}
        found = json.loads(storage.read_bytes(path))
    except (OSError, ValueError, LakhError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
