"""GLM-4.5 to 4.7: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>, on several lines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from lakh.server.tools.forms.tool_form import (
    CallSection,
    Schemas,
    ToolForm,
    argument_text,
    lark_plain,
    lark_text,
)
from lakh.server.tools.forms.typed_values import properties_of, required_of, typed_value, value_rule
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
        rules, calls = [], []
        for number, (name, schema) in enumerate(schemas.items()):
            parts = [lark_plain(f"{name}\n")]
            for place, (key, inner) in enumerate(properties_of(schema).items()):
                rule = f"value_{number}_{place}"
                rules.append(value_rule(rule, inner, schema, f"{VALUE_END}\n"))
                before = [lark_text(KEY, special), lark_plain(key), lark_text(f"{KEY_END}\n{VALUE}", special)]
                part = " ".join([*before, rule])
                parts.append(part if key in required_of(schema) else f"({part})?")
            calls.append(" ".join(parts))
        begin, end, function = lark_text(f"\n{BEGIN}", special), lark_text(END, special), "\n    | ".join(calls)
        several = f" ({begin} call)*" if is_parallel else ""
        return [f"calls: call{several}", f"call: function {end}", f"function: {function}", *rules]


def _call(text: str, schemas: Schemas) -> tuple[str, str] | None:
    found = _CALL.fullmatch(text)
    if found is None:
        return None
    name, body = found[1], found[2].rstrip()
    properties = properties_of(schemas.get(name))
    arguments: dict[str, Any] = {}
    at = 0
    while argument := _ARGUMENT.match(body, at):
        arguments[argument[1]] = typed_value(argument[2], properties.get(argument[1]))
        at = argument.end()
    return None if body[at:].strip() else (name, argument_text(arguments))
