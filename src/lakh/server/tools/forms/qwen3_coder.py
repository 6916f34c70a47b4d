"""Qwen3-Coder: <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>, on several lines;
Seed-OSS calls the outer tag seed:tool_call.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lakh.server.tools.forms.tool_form import CallSection, ReadCall, Schemas, ToolForm, lark_plain, lark_text
from lakh.server.tools.forms.typed_values import argument_rules, read_arguments
from lakh.server.tools.json_scanner import JsonScanner

if TYPE_CHECKING:
    from lakh.server.prompts.special_tokens import SpecialTokens

__all__ = ["Qwen3CoderForm"]

FUNCTION, FUNCTION_END = "<function=", "</function>"
VALUE_END = "\n</parameter>\n"
_CALL = re.compile(r"(?:<[a-z_:]+>\s*)?<function=([^\s>]+)>(.*)</function>", re.DOTALL)
# A value may have the closing tag as text: it ends where another parameter or the function's end follows.
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=[^>\n]+>|\Z))", re.DOTALL)


class Qwen3CoderForm(ToolForm):
    name = "qwen3_coder"

    def __init__(self, tag: str = "tool_call") -> None:
        self._begin, self._end = f"<{tag}>", f"</{tag}>"
        self.markers, self.other_tokens = (self._begin, FUNCTION), (self._end,)

    def read(self, text: str, scanner: JsonScanner, schemas: Schemas, *, is_final: bool) -> CallSection | None:
        start = len(self._begin) if text.startswith(self._begin) else 0
        head = text[start:].lstrip()
        if not head.startswith(FUNCTION) and not (FUNCTION.startswith(head) and not is_final):
            return CallSection((), max(start, 1))
        while (at := text.find(FUNCTION_END, scanner.searched)) >= 0:
            end = at + len(FUNCTION_END)
            call = _call(text[:end], schemas)
            if call is not None:
                return _with_end(call, text, end, self._end, is_final=is_final)
            scanner.searched = end  # it is part of a value
        scanner.searched = max(scanner.searched, len(text) - len(FUNCTION_END))
        return CallSection((), len(text)) if is_final else None

    def call_rules(self, schemas: Schemas, special: SpecialTokens, *, is_parallel: bool) -> list[str]:
        def before(key: str) -> str:
            return lark_plain(f"<parameter={key}>\n")

        rules: list[str] = []
        calls: list[str] = []
        for number, (name, schema) in enumerate(schemas.items()):
            arguments, of_values = argument_rules(f"value_{number}", schema, before, VALUE_END, special=special)
            begin_function, end_function = lark_plain(f"{FUNCTION}{name}>\n"), lark_plain(f"{FUNCTION_END}\n")
            calls.append(" ".join([begin_function, *arguments, end_function]))
            rules += of_values
        begin, end = lark_text(f"\n{self._begin}", special), lark_text(self._end, special)
        several = f" ({begin} call)*" if is_parallel else ""
        function = "\n    | ".join(calls)
        return [f"calls: call{several}", f'call: "\\n" function {end}', f"function: {function}", *rules]


def _with_end(call: ReadCall, text: str, end: int, tag: str, *, is_final: bool) -> CallSection | None:
    """The call and the closing tag after it, if there is one."""
    rest = text[end:].lstrip()
    if rest.startswith(tag):
        return CallSection((call,), len(text) - len(rest) + len(tag))
    if tag.startswith(rest):
        return CallSection((call,), len(text)) if is_final else None
    return CallSection((call,), end)


def _call(text: str, schemas: Schemas) -> ReadCall | None:
    found = _CALL.fullmatch(text)
    if found is None:
        return None
    arguments = read_arguments(_PARAMETER, found[2].rstrip(), schemas.get(found[1]))
    return None if arguments is None else ReadCall(found[1], arguments)
