"""Finds calls of tools in the text of an answer as it arrives.

Text that may begin a call is held back until the call is complete and valid, or turns out to be none: then it is text.
Where a grammar makes sure that it is one, its arguments are emitted as they arrive, in forms that write them as JSON.
What is emitted does not depend on how the text was cut into pieces. White space before a call is dropped, and after one
unless it separates two texts.
"""

from __future__ import annotations

from typing import NamedTuple

from lakh.server.tools.forms.tool_form import ToolForm
from lakh.server.tools.json_scanner import JsonScanner
from lakh.server.tools.tool_call import ToolCallDelta, merge_calls
from lakh.server.tools.tool_use import ToolUse

__all__ = ["ParsedText", "ToolCallParser"]


class ParsedText(NamedTuple):
    text: str
    calls: tuple[ToolCallDelta, ...]
    reasoning: str = ""


class ToolCallParser:
    """Of one answer."""

    def __init__(self, form: ToolForm, use: ToolUse) -> None:
        self._form, self._schemas, self._is_parallel = form, use.schemas, use.is_parallel
        self._held, self._space = "", ""
        self._scanner: JsonScanner | None = None
        self._first_scanner = JsonScanner()
        """Inside of what may be a call: the held text begins with a marker."""
        self._is_plain = False
        """No call can begin any more."""
        self.num_calls = 0
        self._ids: set[str] = set()
        self._has_text = False
        self._has_grammar = use.has_grammar
        self._open: tuple[int, JsonScanner] | None = None
        """Of a call whose arguments are being emitted: how much of the held text was, and where it ends."""

    @property
    def has_calls(self) -> bool:
        """All that begun are complete."""
        return self.num_calls > 0 and self._open is None

    @property
    def is_over(self) -> bool:
        """The answer may have one call and has it: nothing of what follows is emitted."""
        return not self._is_parallel and self.has_calls

    def push(self, text: str, *, is_final: bool = False) -> ParsedText:
        """What is certain now; with `is_final` everything."""
        self._held += text
        texts: list[str] = []
        calls: list[ToolCallDelta] = []
        while self._held:
            if self._scanner is None:
                start = None if self._is_plain else self._find()
                end = len(self._held) - self._num_kept(is_final) if start is None else start
                texts.append(self._emit(self._held[:end]))
                self._held = self._held[end:]
                if start is None:
                    break
                self._scanner, self._first_scanner = JsonScanner(), JsonScanner()
            calls += self._new_arguments()
            section = None
            if not self._is_parallel:
                section = self._form.read_first(self._held, self._first_scanner, self._schemas)
            if section is None:
                section = self._form.read(self._held, self._scanner, self._schemas, is_final=is_final)
            if section is None:
                break
            if self._open is not None:  # all of it was emitted
                self._open = None if section.calls else self._open
            elif not section.calls:
                texts.append(self._emit(self._held[: section.end]))
            else:
                calls += [found for call in section.calls for found in self._begin(*call)]
            self._held, self._scanner = self._held[section.end :], None
            self._is_plain |= self._form.begins_answer
        if is_final and not self.num_calls:
            texts.append(self._space)
        return ParsedText("".join(texts), merge_calls(calls))

    def _begin(self, name: str, arguments: str, number: str = "") -> list[ToolCallDelta]:
        self._space = ""
        if self.num_calls and not self._is_parallel:
            return []
        self.num_calls += 1
        number = number if number and number not in self._ids else self._form.new_id()
        self._ids.add(number)
        return [ToolCallDelta(self.num_calls - 1, number, name, arguments)]

    def _new_arguments(self) -> list[ToolCallDelta]:
        """Of a call that a grammar makes sure of: its name, once it is known, and its arguments so far."""
        found: list[ToolCallDelta] = []
        begun = self._form.begun(self._held) if self._has_grammar and self._open is None else None
        if begun is not None and (self._is_parallel or not self.num_calls):
            name, start = begun
            found += self._begin(name, "")
            self._open = start, JsonScanner()
        if self._open is not None:
            start, scanner = self._open
            end = scanner.end(self._held, scanner.begin or start)
            new = self._held[start : len(self._held) if end is None else end]
            scanner.begin = scanner.begin or start
            self._open = start + len(new), scanner
            found += [ToolCallDelta(self.num_calls - 1, "", "", new)] if new else []
        return found

    def _find(self) -> int | None:
        """Where a call may begin in the held text."""
        places = [at for marker in self._form.markers if (at := self._held.find(marker)) >= 0]
        if not self._form.begins_answer:
            return min(places, default=None)
        begin = len(self._held) - len(self._held.lstrip())
        return begin if begin in places else None

    def _num_kept(self, is_final: bool) -> int:
        """Characters at the end of the held text that may begin a marker."""
        if is_final or self._is_plain:
            return 0
        if self._form.begins_answer:
            begun = self._held.lstrip()
            if any(marker.startswith(begun) for marker in self._form.markers):
                return len(begun)
            self._is_plain = True
            return 0
        longest = min(len(self._held), max(map(len, self._form.markers)) - 1)
        sizes = (size for size in range(longest, 0, -1) if self._is_start(self._held[-size:]))
        return next(sizes, 0)

    def _is_start(self, text: str) -> bool:
        return any(marker.startswith(text) for marker in self._form.markers)

    def _emit(self, text: str) -> str:
        """The text without white space at its end, which may stand before a call."""
        if self.num_calls and not self._is_parallel:
            return ""
        text = self._space + text
        if self.num_calls and not self._has_text:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._has_text |= bool(shown)
        return shown
