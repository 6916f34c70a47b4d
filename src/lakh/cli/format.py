"""Amounts in a form that people read: counts, bytes and durations."""

from __future__ import annotations

__all__ = ["bytes_text", "count_text", "seconds_text"]

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400


def count_text(count: float) -> str:
    """A large count in three digits: 2.36 million."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{count / size:.3g} {word}"
    return f"{count:,.0f}"


def bytes_text(size_bytes: float) -> str:
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= size:
            return f"{size_bytes / size:.3g} {unit}"
    return f"{size_bytes:.0f} bytes"


def seconds_text(seconds: float) -> str:
    """A duration in its two largest units: 0.19 s, 3 min 20 s, 2 h 5 min, 4 days 3 h."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 2 * MINUTE_S:
        return f"{seconds:.0f} s"
    for size, unit, small, small_unit in (
        (2 * DAY_S, "days", HOUR_S, "h"), (HOUR_S, "h", MINUTE_S, "min"), (0, "min", 1, "s"),
    ):  # fmt: skip
        if seconds >= size:
            whole, rest = divmod(round(seconds / small), 24 if unit == "days" else 60)
            return f"{whole:,} {unit} {rest} {small_unit}" if rest else f"{whole:,} {unit}"
    raise ValueError(f"{seconds} is not a duration")
