"""Reads an answer in channels (forms/harmony.py) as it arrives: reasoning, texts and calls of tools.

What is emitted does not depend on how the answer was cut into pieces. A call is held back until it is complete and
valid; else it is text as the model wrote it. Where a grammar makes sure of a call, its arguments are emitted as they
arrive. The header of a message that has not begun is no text.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

from lakh.server.tools.forms.harmony import ENDS, HEADS, MAX_HEADER_CHARS, MESSAGE, begins_header, read_header
from lakh.server.tools.forms.tool_form import ToolForm, argument_text
from lakh.server.tools.json_scanner import json_of
from lakh.server.tools.parser import ParsedText
from lakh.server.tools.tool_call import ToolCallDelta, merge_calls
from lakh.server.tools.tool_use import ToolUse

__all__ = ["ChannelParser"]

BETWEEN = "\n\n"  # messages of one kind
BROKEN = -1
_MARKS = (*ENDS, *HEADS)

Kind = Literal["text", "reasoning", "call", "streamed call"]


class ChannelParser:
    """Of one answer."""

    def __init__(self, form: ToolForm, use: ToolUse | None, *, goes_on: bool = False) -> None:
        """`use`: None if the request has no tools, and calls are text. `goes_on`: with a text that the prompt has."""
        self._form, self._schemas = form, {} if use is None else use.schemas
        self._is_parallel, self._has_grammar = use is None or use.is_parallel, use is not None and use.has_grammar
        self._held = ""
        self._is_in_header = not goes_on
        self._kind: Kind = "text"
        """Of the message that is being read."""
        self._header, self._name, self._arguments = "", "", ""
        """Of a call."""
        self._separator = ""
        """Before the next text of this message."""
        self._seen: set[Kind] = set()
        self._new: defaultdict[Kind, str] = defaultdict(str)
        self._new_calls: list[ToolCallDelta] = []
        self._is_open = False
        """A call has begun whose arguments are not complete."""
        self.num_calls = 0

    @property
    def has_calls(self) -> bool:
        """All that begun are complete."""
        return self.num_calls > 0 and not self._is_open

    @property
    def is_over(self) -> bool:
        """The answer may have one call and has it: nothing of what follows is emitted."""
        return not self._is_parallel and self.has_calls

    def push(self, text: str, *, is_final: bool = False) -> ParsedText:
        """What is certain now; with `is_final` everything."""
        self._held += text
        while self._held and (self._read_header if self._is_in_header else self._read_content)(is_final=is_final):
            pass
        if is_final and not self._is_in_header:
            self._end_message("")
        found = ParsedText(self._new["text"], merge_calls(self._new_calls), self._new["reasoning"])
        self._new.clear()
        self._new_calls = []
        return found

    def _read_header(self, *, is_final: bool) -> bool:
        """Whether there may be more to do."""
        end = self._find_message()
        if end is None and not is_final:
            return False
        begun = self._held.lstrip()
        head = next((head for head in HEADS if begun.startswith(head)), "")
        if end is None:
            self._emit("text", "" if head else self._held)
            self._held = ""
            return False
        self._is_in_header = False
        if end == BROKEN:
            self._emit("text", self._held[: self._held.find(head) + len(head)])
            self._held = self._held[self._held.find(head) + len(head) :]
        else:
            self._begin_message(self._held[:end])
            self._held = self._held[end + len(MESSAGE) :]
        return True

    def _find_message(self) -> int | None:
        """Where a header ends; None if that is not certain yet."""
        if not begins_header(self._held):
            return BROKEN
        end = self._held.find(MESSAGE, 0, MAX_HEADER_CHARS)
        head = self._held[: end if end >= 0 else MAX_HEADER_CHARS]
        if any(mark in head for mark in ENDS):
            return BROKEN
        return end if end >= 0 else (BROKEN if len(self._held) >= MAX_HEADER_CHARS else None)

    def _begin_message(self, text: str) -> None:
        header = read_header(text)
        if self._schemas and (header.is_function or header.recipient in self._schemas):
            self._kind = "streamed call" if self._has_grammar else "call"
            self._header, self._name, self._arguments = text + MESSAGE, header.recipient, ""
            if self._has_grammar:
                self._is_open = self._begin_call("")
            return
        self._kind = "reasoning" if header.channel == "analysis" else "text"
        self._separator = BETWEEN if self._kind in self._seen else ""
        if header.is_function:  # without tools
            self._emit("text", text + MESSAGE)

    def _read_content(self, *, is_final: bool) -> bool:
        found = [(at, mark) for mark in _MARKS if (at := self._held.find(mark)) >= 0]
        end, mark = min(found, default=(len(self._held) - (0 if is_final else self._num_kept()), ""))
        self._take(self._held[:end])
        self._held = self._held[end:]
        if not mark:
            return False
        closing = mark if mark in ENDS else ""
        self._end_message(closing)
        self._held = self._held[len(closing) :]
        self._is_in_header = True
        return True

    def _num_kept(self) -> int:
        """Characters at the end of the held text that may begin a mark."""
        longest = min(len(self._held), max(map(len, _MARKS)) - 1)
        sizes = (size for size in range(longest, 0, -1) if any(mark.startswith(self._held[-size:]) for mark in _MARKS))
        return next(sizes, 0)

    def _take(self, text: str) -> None:
        if self._kind in ("text", "reasoning"):
            self._emit(self._kind, text)
            return
        self._arguments += text
        if text and self._is_open:
            self._new_calls.append(ToolCallDelta(self.num_calls - 1, "", "", text))

    def _end_message(self, mark: str) -> None:
        if self._kind in ("call", "streamed call"):
            value = json_of(self._arguments.strip() or "{}")
            if self._kind == "streamed call":
                self._is_open = self._is_open and not isinstance(value, dict)
            elif isinstance(value, dict):
                self._begin_call(argument_text(value))
            else:
                self._emit("text", self._header + self._arguments + mark)
        self._kind = "text"
        self._separator = ""

    def _begin_call(self, arguments: str) -> bool:
        if self.is_over:
            return False
        self.num_calls += 1
        self._new_calls.append(ToolCallDelta(self.num_calls - 1, self._form.new_id(), self._name, arguments))
        return True

    def _emit(self, kind: Kind, text: str) -> None:
        if text and not self.is_over:
            self._new[kind] += self._separator + text
            self._seen.add(kind)
            self._separator = ""
