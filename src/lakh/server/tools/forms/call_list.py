"""What forms share that write all calls of an answer between two marks, each with marks of its own."""

from __future__ import annotations

import re

from lakh.server.tools.forms.tool_form import CallSection, ReadCall, Schemas, ToolForm
from lakh.server.tools.json_scanner import JsonScanner

__all__ = ["CallListForm"]


class CallListForm(ToolForm):
    end: str
    """After all calls; `markers` has what is before them."""
    call: str
    """Before each call."""
    call_end: str
    pattern: re.Pattern[str]
    """One call, from white space before it to the mark after it."""

    def read_call(self, found: re.Match[str]) -> ReadCall | None:
        """None if it is none."""
        raise NotImplementedError

    def read(self, text: str, scanner: JsonScanner, schemas: Schemas, *, is_final: bool) -> CallSection | None:
        begin = len(self.markers[0])
        head = text[begin:].lstrip()
        if not head.startswith(self.call) and not (self.call.startswith(head) and not is_final):
            return CallSection((), begin)
        end = text.find(self.end, scanner.searched)
        scanner.searched = max(len(text) - len(self.end), 0)
        if end < 0 and not is_final:
            return None
        body = text[begin : end if end >= 0 else len(text)]
        end = end + len(self.end) if end >= 0 else len(text)
        calls: list[ReadCall] = []
        at = 0
        while found := self.pattern.match(body, at):
            call = self.read_call(found)
            if call is None:
                return CallSection((), end)
            calls.append(call)
            at = found.end()
        return CallSection(() if body[at:].strip() else tuple(calls), end)

    def read_first(self, text: str, scanner: JsonScanner, schemas: Schemas) -> CallSection | None:
        is_complete = text.find(self.call_end, scanner.searched) >= 0
        scanner.searched = max(len(text) - len(self.call_end), 0)
        found = self.pattern.match(text, len(self.markers[0])) if is_complete else None
        call = None if found is None else self.read_call(found)
        return None if found is None or call is None else CallSection((call,), found.end())
