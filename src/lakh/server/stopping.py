"""Where a completion ends: stop strings, and stop rules that follow the structure of code.

Both hold back text that may turn out to be the start of a stop, so text once emitted is never taken back. Independent
of torch and of tokenizers: the gateway applies stop rules to the text of other engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["STOP_RULES", "StopRule", "StopStrings", "TextEnd", "indent_width", "stop_rule_for"]

STOP_RULES = ("line", "block", "dedent")


class TextEnd(Protocol):
    """Decides where a text ends while it arrives."""

    @property
    def found(self) -> bool: ...

    def push(self, text: str) -> str:
        """The text that can be emitted now."""
        ...


class StopStrings:
    """Ends the text before the first stop string, or after it if `is_included`."""

    def __init__(self, stops: Sequence[str], *, is_included: bool = False) -> None:
        self._stops, self._is_included = tuple(stops), is_included
        self._characters = frozenset("".join(self._stops))
        self._held = ""
        self.stop: str | None = None
        """The stop string that was found."""

    @property
    def found(self) -> bool:
        return self.stop is not None

    def push(self, text: str) -> str:
        """The text that can be emitted now; nothing after a stop string was `found`."""
        if self.found:
            return ""
        if not self._held and self._characters.isdisjoint(text):
            return text
        self._held += text
        places = [(start, stop) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if places:
            start, self.stop = min(places)  # of two at one place the shorter one
            emitted, self._held = self._held[: start + len(self.stop) if self._is_included else start], ""
            return emitted
        cut = len(self._held) - max(_overlap(self._held, stop) for stop in self._stops)
        emitted, self._held = self._held[:cut], self._held[cut:]
        return emitted

    def finish(self) -> str:
        """The text that was held back."""
        emitted, self._held = self._held, ""
        return emitted


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class StopRule:
    """Ends a completion by the structure of code.

    - "line": before the first line break.
    - "dedent": before the first line that is indented less than the cursor's line, and the blank lines before it.
    - "block": like "dedent", or before the first blank line.

    `indent` is the indentation of the cursor's line, in columns (a tab counts 4). Lines end with \\n, \\r\\n or \\r.
    """

    def __init__(self, kind: str, indent: int = 0) -> None:
        self._kind, self._indent = kind, indent
        self._held = ""  # line breaks and the indentation after them, until the next line is classified
        self.found = False

    def push(self, text: str) -> str:
        if not (self.found or self._held or "\n" in text or "\r" in text):
            return text
        emitted = []
        for character in text:
            if self.found:
                break
            if self._held:
                emitted.append(self._after_break(character))
            elif character in "\r\n" and self._kind == "line":
                self.found = True
            elif character in "\r\n":
                self._held = character
            else:
                emitted.append(character)
        return "".join(emitted)

    def _after_break(self, character: str) -> str:
        if character in " \t\r\n":
            is_blank_line = character in "\r\n" and self._held + character != "\r\n"
            self.found = is_blank_line and self._kind == "block"
            self._held += character
            return ""
        if indent_width(self._held.replace("\r", "\n").rpartition("\n")[2]) < self._indent:
            self.found = True
            return ""
        emitted, self._held = self._held + character, ""
        return emitted


def stop_rule_for(kind: str | None, prompt: object) -> StopRule | None:
    """The stop rule of a request; a prompt of text gives the indentation of the cursor's line."""
    if kind is None:
        return None
    line = prompt.rpartition("\n")[2] if isinstance(prompt, str) else ""
    return StopRule(kind, indent_width(line[: len(line) - len(line.lstrip(" \t"))]))


def indent_width(whitespace: str) -> int:
    return sum(4 if character == "\t" else 1 for character in whitespace)
