"""DeepSeek: calls between special tokens, with a block of JSON in V3 and R1, and with JSON alone in V3.1."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lakh.server.tools.forms.tool_form import (
    CallSection,
    Schemas,
    ToolForm,
    argument_text,
    lark_json,
    lark_plain,
    lark_text,
)
from lakh.server.tools.json_scanner import JsonScanner, json_of

if TYPE_CHECKING:
    from lakh.server.prompts.special_tokens import SpecialTokens

__all__ = ["DeepSeekForm"]

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_CALL = re.compile(
    rf"\s*{CALL}(?:function{SEPARATOR}([^\n{{]+)\n```json\n(.*?)\n```|([^\n{{]+?){SEPARATOR}(.*?)){CALL_END}", re.DOTALL
)


class DeepSeekForm(ToolForm):
    name = "deepseek"
    markers = (BEGIN,)
    other_tokens = (END, CALL, SEPARATOR, CALL_END)

    def __init__(self, *, has_block: bool) -> None:
        """`has_block`: the arguments are in a block of Markdown."""
        self._has_block = has_block

    def read(self, text: str, scanner: JsonScanner, schemas: Schemas, *, is_final: bool) -> CallSection | None:
        head = text[len(BEGIN) :].lstrip()
        if not head.startswith(CALL) and not (CALL.startswith(head) and not is_final):
            return CallSection((), len(BEGIN))
        end = text.find(END, scanner.searched)
        scanner.searched = max(len(text) - len(END), 0)
        if end < 0 and not is_final:
            return None
        body = text[len(BEGIN) : end if end >= 0 else len(text)]
        end = end + len(END) if end >= 0 else len(text)
        calls = []
        at = 0
        while found := _CALL.match(body, at):
            call = _call(found)
            if call is None:
                return CallSection((), end)
            calls.append(call)
            at = found.end()
        return CallSection(() if body[at:].strip() else tuple(calls), end)

    def read_first(self, text: str, scanner: JsonScanner, schemas: Schemas) -> CallSection | None:
        is_complete = text.find(CALL_END, scanner.searched) >= 0
        scanner.searched = max(len(text) - len(CALL_END), 0)
        found = _CALL.match(text, len(BEGIN)) if is_complete else None
        call = None if found is None else _call(found)
        return None if found is None or call is None else CallSection((call,), found.end())

    def call_rules(self, schemas: Schemas, special: SpecialTokens, *, is_parallel: bool) -> list[str]:
        calls = []
        for name, schema in schemas.items():
            before, between, after = f"{CALL}function{SEPARATOR}", "\n```json\n", f"\n```{CALL_END}"
            if not self._has_block:
                before, between, after = CALL, SEPARATOR, CALL_END
            parts = [lark_text(before, special), lark_plain(name), lark_text(between, special), lark_json(schema)]
            calls.append(" ".join([*parts, lark_text(after, special)]))
        call, several = "\n    | ".join(calls), ""
        if is_parallel:
            several = ' ("\\n" call)*' if self._has_block else " call*"
        return [f"calls: call{several} {lark_text(END, special)}", f"call: {call}"]


def _call(found: re.Match[str]) -> tuple[str, str] | None:
    arguments = json_of(found[2] if found[1] else found[4])
    return ((found[1] or found[3]).strip(), argument_text(arguments)) if isinstance(arguments, dict) else None
