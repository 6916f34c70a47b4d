"""Labelled secrets of CredData (Samsung, Apache-2.0): meta/*.csv and the data/ folder that its download_data.py makes.

Rows labelled T with a position on one line count, of the categories that are credentials (not nonces, salts, UUIDs,
buckets, domains and application names). `strong` values are those that no dictionary has: STRONG_CHARS and more, of at
least two kinds of characters, STRONG_BITS of entropy per character, without a placeholder word. Each value counts once
per category and file.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lakh.corpus.parsing.languages import identify
from lakh.corpus.secrets.false_positives import PLACEHOLDER
from lakh.corpus.secrets.randomness import entropy_bits

__all__ = ["CredDataFile", "CredDataLabel", "creddata_labels", "is_strong"]

NO_CREDENTIAL = re.compile(
    r"^(?:UUID|Nonce|Salt|AWS S3 Bucket|Firebase Domain|Tencent WeChat API App ID|AWS Client ID)$"
)
STRONG_CHARS = 12
STRONG_BITS = 3.0


@dataclass(frozen=True)
class CredDataLabel:
    category: str
    begin: int
    """Byte offset in the file."""
    value: str


@dataclass(frozen=True)
class CredDataFile:
    data: bytes
    language: str
    labels: tuple[CredDataLabel, ...]


def creddata_labels(folder: Path) -> Iterator[CredDataFile]:
    """Every file with its labels; files that are missing or are not UTF-8 are left out."""
    rows: dict[str, list[dict[str, str]]] = {}
    for table in sorted((folder / "meta").glob("*.csv")):
        with table.open(newline="", encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                if row["GroundTruth"] == "T" and row["LineStart"] == row["LineEnd"] and row["ValueStart"]:
                    rows.setdefault(row["FilePath"], []).append(row)
    for name, labelled in sorted(rows.items()):
        path = folder / name
        if not path.is_file():
            continue
        data = path.read_bytes()
        try:
            lines_of_text = data.decode("utf-8").split("\n")
        except UnicodeDecodeError:
            continue
        labels = [label for row in labelled if (label := _label(row, lines_of_text)) is not None]
        yield CredDataFile(data, identify(path.name, data).language, tuple(dict.fromkeys(labels)))


def is_strong(value: str) -> bool:
    kinds = sum(bool(re.search(kind, value)) for kind in ("[a-z]", "[A-Z]", "[0-9]", r"[^\w]"))
    enough = len(value) >= STRONG_CHARS and kinds >= 2 and entropy_bits(value) >= STRONG_BITS
    return enough and PLACEHOLDER.search(value) is None


def _label(row: dict[str, str], lines: list[str]) -> CredDataLabel | None:
    number, begin, end = int(row["LineStart"]) - 1, int(row["ValueStart"]), int(row["ValueEnd"] or -1)
    if NO_CREDENTIAL.match(row["Category"]) or number >= len(lines):
        return None
    value = lines[number][begin:end] if end > begin else ""
    if not value:
        return None
    before = sum(len(line.encode()) + 1 for line in lines[:number])
    return CredDataLabel(row["Category"], before + len(lines[number][:begin].encode()), value)
