"""GLM-4.5 to 4.7: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>, on several lines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lakh.server.tools.forms.tool_form import CallSection, ReadCall, Schemas, ToolForm, lark_plain, lark_text
from lakh.server.tools.forms.typed_values import argument_rules, read_arguments
from lakh.server.tools.json_scanner import JsonScanner

if TYPE_CHECKING:
    from lakh.server.prompts.special_tokens import SpecialTokens

__all__ = ["GlmForm"]

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_HEAD = re.compile(r"<tool_call>\s*[^\s<{]*(?:[\n<]|\Z)")
_CALL = re.compile(r"<tool_call>\s*([^\s<{]+)(.*)</tool_call>", re.DOTALL)
# A value may have the closing tag as text: it ends where another key or the call's end follows.
_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))", re.DOTALL)


class GlmForm(ToolForm):
    name = "glm"
    markers = (BEGIN,)
    other_tokens = (END, KEY, KEY_END, VALUE, VALUE_END)

    def read(self, text: str, scanner: JsonScanner, schemas: Schemas, *, is_final: bool) -> CallSection | None:
        if not _HEAD.match(text):
            return CallSection((), len(BEGIN))
        while (at := text.find(END, scanner.searched)) >= 0:
            end = at + len(END)
            call = _call(text[:end], schemas)
            if call is not None:
                return CallSection((call,), end)
            scanner.searched = end  # it is part of a value
        scanner.searched = max(scanner.searched, len(text) - len(END))
        return CallSection((), len(text)) if is_final else None

    def call_rules(self, schemas: Schemas, special: SpecialTokens, *, is_parallel: bool) -> list[str]:
        def before(key: str) -> str:
            return " ".join([lark_text(KEY, special), lark_plain(key), lark_text(f"{KEY_END}\n{VALUE}", special)])

        rules: list[str] = []
        calls: list[str] = []
        for number, (name, schema) in enumerate(schemas.items()):
            arguments, of_values = argument_rules(f"value_{number}", schema, before, f"{VALUE_END}\n", special=special)
            calls.append(" ".join([lark_plain(f"{name}\n"), *arguments]))
            rules += of_values
        begin, end, function = lark_text(f"\n{BEGIN}", special), lark_text(END, special), "\n    | ".join(calls)
        several = f" ({begin} call)*" if is_parallel else ""
        return [f"calls: call{several}", f"call: function {end}", f"function: {function}", *rules]


def _call(text: str, schemas: Schemas) -> ReadCall | None:
    found = _CALL.fullmatch(text)
    if found is None:
        return None
    arguments = read_arguments(_ARGUMENT, found[2].rstrip(), schemas.get(found[1]))
    return None if arguments is None else ReadCall(found[1], arguments)
