"""Simulated typing: what an editor requests while a user writes real files. A seed reproduces the same load.

A user opens a file and removes a passage: the text before it is the prefix, the text after it the suffix. The
user types the passage again, a few characters per request, then moves on to another place.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lakh.errors import UserError

__all__ = ["EditorRequest", "arrivals_s", "read_source_files", "typing_requests"]

MIN_FILE_CHARS, MAX_FILE_CHARS = 2_000, 60_000
PASSAGE_CHARS = (40, 400)
KEYSTROKES = (1, 6)  # characters between two requests
PHASE_S = 1.0


@dataclass(frozen=True)
class EditorRequest:
    user: int
    file: str
    prefix: str
    suffix: str


def typing_requests(user: int, files: Sequence[tuple[str, str]], rng: random.Random) -> Iterator[EditorRequest]:
    """What the user's editor sends after every few keystrokes, without end."""
    while True:
        name, text = rng.choice(files)
        for _ in range(rng.randint(2, 5)):  # places in one file
            start = rng.randrange(len(text) // 4, len(text) * 3 // 4)
            end = min(start + rng.randint(*PASSAGE_CHARS), len(text))
            cursor = start
            while cursor < end:
                cursor = min(cursor + rng.randint(*KEYSTROKES), end)
                yield EditorRequest(user, name, text[:cursor], text[end:])


def arrivals_s(rate: float, seconds: float, rng: random.Random, burst: float = 1.0) -> Iterator[float]:
    """Poisson arrival times from 0 to `seconds`, independent of the responses.

    With `burst` above 1, busy phases of `burst` times the quiet rate alternate with quiet phases, about a second each;
    the mean stays `rate`.
    """
    at_s, is_busy = 0.0, True
    phase_end_s = rng.expovariate(1 / PHASE_S)
    quiet = 2 / (1 + burst) if burst > 1 else 1.0
    while at_s < seconds:
        wait_s = rng.expovariate(rate * quiet * (burst if is_busy and burst > 1 else 1.0))
        if burst > 1 and at_s + wait_s > phase_end_s:  # exponential waits are memoryless: restart at the phase change
            at_s, is_busy = phase_end_s, not is_busy
            phase_end_s += rng.expovariate(1 / PHASE_S)
        else:
            at_s += wait_s
            if at_s < seconds:
                yield at_s


def read_source_files(folder: Path, most: int = 400) -> list[tuple[str, str]]:
    """Python files of medium size, sorted by name. Raises a UserError if there are none."""
    files: list[tuple[str, str]] = []
    for path in sorted(folder.rglob("*.py")):
        if len(files) >= most:
            break
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if MIN_FILE_CHARS <= len(text) <= MAX_FILE_CHARS:
            files.append((str(path.relative_to(folder)), text))
    if not files:
        found = f"has no Python file of {MIN_FILE_CHARS:,} to {MAX_FILE_CHARS:,} characters"
        raise UserError(str(folder), found, "give another folder: --files DIR")
    return files
