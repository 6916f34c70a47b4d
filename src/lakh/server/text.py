"""Tokens to text, piece by piece, so that what was once shown is never taken back.

Two things hold text back: bytes that are not yet a whole character (a token may end inside one), and an end
that may be the beginning of a stop text. Both are released when the doubt is over. The pieces put together
are the same as if all tokens had come at once.

Knows how tokens are spelt (spelling.py); knows nothing of models or requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from lakh.server.spelling import UNFINISHED, Spelling

__all__ = ["STOP_RULES", "StopRule", "StopText", "TextStream", "columns"]

STOP_RULES = ("line", "block", "dedent")


class TextStream:
    """Incremental decoding: `push` a token, get the text that is now certain."""

    def __init__(self, spelling: Spelling, skip: str = "") -> None:
        """`skip` is left out where the text begins with it: what a prompt said already."""
        self._decode, self._alone = spelling.decode, spelling.alone
        self._skip = skip
        # Decoders may treat the first token specially (a leading space), so the last settled tokens stay as
        # context.
        self._settled: list[int] = []
        self._pending: list[int] = []
        self._before = ""  # the text of the settled tokens

    def push(self, token: int) -> str:
        if not self._pending:
            alone = self._alone(token)
            if alone is not None:
                self._settled, self._before = [], ""
                return self._shown(alone)
        self._pending.append(token)
        text = self._decode([*self._settled, *self._pending])
        if text.endswith(UNFINISHED):
            return ""
        return self._settle(text)

    def finish(self) -> str:
        """What is left, incomplete characters included."""
        return self._settle(self._decode([*self._settled, *self._pending])) if self._pending else ""

    def _settle(self, text: str) -> str:
        new = text[len(self._before) :]
        self._settled, self._pending = self._pending, []
        self._before = self._decode(self._settled)
        return self._shown(new)

    def _shown(self, new: str) -> str:
        if self._skip:
            size = min(len(self._skip), len(new))
            skipped, self._skip = self._skip[:size] == new[:size], self._skip[size:]
            new = new[size:] if skipped else new
        return new


class StopText:
    """Cuts text before the first stop text; holds back an end that could become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that may be shown now. Once a stop text was `found`, nothing follows."""
        if self.found:
            return ""
        if not self._stops:
            return text
        self._held += text
        starts = [start for start in (self._held.find(stop) for stop in self._stops) if start >= 0]
        if starts:
            self.found = True
            shown, self._held = self._held[: min(starts)], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def finish(self) -> str:
        """No more text comes: what was held back is text after all."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class StopRule:
    """Ends a completion where the structure of code says so.

    - "line": before the first line break.
    - "dedent": before the first line that is indented less than the line of the cursor, and the blank lines before it.
    - "block": the same, or before the first blank line.

    `indent` is the indentation of the cursor's line, in columns (a tab counts 4). Lines end with \\n, \\r\\n or \\r.
    """

    def __init__(self, kind: str, indent: int = 0) -> None:
        self._kind, self._indent = kind, indent
        self._held = ""  # line breaks, and the beginning of the line after them, until it is clear what that line is
        self.found = False

    def push(self, text: str) -> str:
        shown = []
        for character in text:
            if self.found:
                break
            if self._held:
                shown.append(self._after_break(character))
            elif character in "\r\n" and self._kind == "line":
                self.found = True
            elif character in "\r\n":
                self._held = character
            else:
                shown.append(character)
        return "".join(shown)

    def _after_break(self, character: str) -> str:
        if character in " \t\r\n":
            is_blank_line = character in "\r\n" and self._held + character != "\r\n"
            self.found = is_blank_line and self._kind == "block"
            self._held += character
            return ""
        if columns(self._held.replace("\r", "\n").rpartition("\n")[2]) < self._indent:
            self.found = True
            return ""
        shown, self._held = self._held + character, ""
        return shown


def columns(space: str) -> int:
    """The width of an indentation."""
    return sum(4 if character == "\t" else 1 for character in space)
