"""Finds the end of a JSON object or list in text that still grows, without reading any character twice."""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["JsonScanner", "json_of"]

_STRUCTURE, _IN_STRING = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')


class JsonScanner:
    def __init__(self) -> None:
        self._at: int | None = None
        self._depth, self._is_in_string = 0, False
        self._end: int | None = None
        self.begin: int | None = None
        """Where the value begins, for who asks for its end several times."""
        self.searched = 0
        """Characters in which a form has searched for something else."""

    def end(self, text: str, start: int) -> int | None:
        """Where the value that begins at `start` with { or [ ends; None if it is not complete. Later calls have the
        same text and more of it.
        """
        at = start if self._at is None else self._at
        while self._end is None:
            found = (_IN_STRING if self._is_in_string else _STRUCTURE).search(text, at)
            if found is None:
                self._at = max(at, len(text))
                return None
            at = found.end()
            if found[0] == "\\":
                if at == len(text):
                    self._at = at - 1
                    return None
                at += 1
            elif found[0] == '"':
                self._is_in_string = not self._is_in_string
            else:
                self._depth += 1 if found[0] in "{[" else -1
                if self._depth == 0:
                    self._end = at
        return self._end


def json_of(text: str) -> Any:
    """The value of a JSON text; None if it is none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
