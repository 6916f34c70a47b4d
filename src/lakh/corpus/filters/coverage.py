"""Line coverage per file, from a coverage report: Cobertura XML or lcov.

Fails with DataError on a file that is neither, or that declares entities (an XML bomb).
"""

from __future__ import annotations

import xml.etree.ElementTree as ET

from lakh import storage
from lakh.errors import DataError

__all__ = ["read_coverage"]


def read_coverage(url: str) -> dict[str, float]:
    """Path -> share of covered lines."""
    raw = storage.read_bytes(url)
    if raw.lstrip()[:1] == b"<":
        if b"<!ENTITY" in raw or (b"<!DOCTYPE" in raw and b"[" in raw.split(b"<!DOCTYPE", 1)[1].split(b">", 1)[0]):
            raise DataError(url, "declares XML entities", "give a report as coverage tools write it")
        try:
            root = ET.fromstring(raw)
        except ET.ParseError as error:
            raise DataError(url, f"is not XML ({error})", "give a Cobertura report or an lcov file") from None
        classes = [item for item in root.iter("class") if item.get("filename")]
        if classes:
            return {str(item.get("filename")): _number(item.get("line-rate")) for item in classes}
    elif b"SF:" in raw:
        return _lcov(raw.decode("utf-8", "replace"))
    raise DataError(url, "is not a known coverage report", "give a Cobertura report or an lcov file")


def _number(text: str | None) -> float:
    try:
        return min(max(float(text or 0), 0.0), 1.0)
    except ValueError:
        return 0.0


def _lcov(text: str) -> dict[str, float]:
    shares: dict[str, float] = {}
    path, lines, reached = "", 0, 0
    for line in text.splitlines():
        if line.startswith("SF:"):
            path, lines, reached = line[3:].strip(), 0, 0
        elif line.startswith("DA:"):
            lines += 1
            reached += line[3:].partition(",")[2].partition(",")[0] not in ("", "0")
        elif line == "end_of_record" and path:
            shares[path] = reached / lines if lines else 0.0
    return shares
