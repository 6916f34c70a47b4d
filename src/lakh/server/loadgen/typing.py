"""Developers who type: what an editor sends while real files are written.

A `TypingUser` has one file open, with a stretch of it taken out: the text before is the prefix, the text after is the
suffix, and the stretch is typed back in, a few characters per keystroke burst. Every burst asks for a completion of
what is there now. At the end of a stretch another place is chosen. Random numbers come in, so a seed gives the same
load again.

Knows text; knows nothing of servers or clocks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lakh.errors import UserError

__all__ = ["EditorRequest", "TypingUser", "arrivals_s", "read_source_files"]

MIN_FILE_CHARS, MAX_FILE_CHARS = 2_000, 60_000
STRETCH_CHARS = (40, 400)
BURST_CHARS = (1, 6)
SPELL_S = 1.0


@dataclass(frozen=True)
class EditorRequest:
    user: int
    file: str
    prefix: str
    suffix: str


class TypingUser:
    def __init__(self, user: int, files: Sequence[tuple[str, str]], rng: random.Random) -> None:
        self._user, self._files, self._rng = user, files, rng
        self._typing = self._type()

    def ask(self) -> EditorRequest:
        """What the editor sends after the next keystrokes."""
        return next(self._typing)

    def _type(self) -> Iterator[EditorRequest]:
        rng = self._rng
        while True:
            name, text = rng.choice(self._files)
            for _ in range(rng.randint(2, 5)):  # places in one file, before the next file
                start = rng.randrange(len(text) // 4, len(text) * 3 // 4)
                end = min(start + rng.randint(*STRETCH_CHARS), len(text))
                cursor = start
                while cursor < end:
                    cursor = min(cursor + rng.randint(*BURST_CHARS), end)
                    yield EditorRequest(self._user, name, text[:cursor], text[end:])


def arrivals_s(rate: float, seconds: float, rng: random.Random, burst: float = 1.0) -> Iterator[float]:
    """Poisson arrivals: times from 0 to `seconds`, whether or not anyone has answered.

    With `burst` above 1, spells of `burst` times the rate change with quiet ones, about a second each, as when a
    team comes back from lunch; the mean stays `rate`.
    """
    at_s, is_busy = 0.0, True
    ends_s = rng.expovariate(1 / SPELL_S)
    quiet = 2 / (1 + burst) if burst > 1 else 1.0
    while True:
        wait_s = rng.expovariate(rate * quiet * (burst if is_busy and burst > 1 else 1.0))
        if burst > 1 and at_s + wait_s > ends_s:  # an exponential wait begins afresh at any time
            at_s, is_busy = ends_s, not is_busy
            ends_s += rng.expovariate(1 / SPELL_S)
        else:
            at_s += wait_s
            if at_s >= seconds:
                return
            yield at_s
        if at_s >= seconds:
            return


def read_source_files(folder: Path, most: int = 400) -> list[tuple[str, str]]:
    """Python files of a middling size, by name. A UserError where there is none."""
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
