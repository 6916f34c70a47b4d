"""MiniMax-M2: <minimax:tool_call> with an <invoke name="NAME"> for each call, and in it a <parameter name="KEY"> for
each argument.
"""

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

__all__ = ["MiniMaxForm"]

BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, INVOKE_END, VALUE_END = "<invoke name=", "</invoke>", "</parameter>"
_CALL = re.compile(r'\s*<invoke name="([^"\n]+)">(.*?)</invoke>(?=\s*(?:<invoke name="|\Z))', re.DOTALL)
_PARAMETER = re.compile(r'\s*<parameter name="([^"\n]+)">(.*?)</parameter>(?=\s*(?:<parameter name="|\Z))', re.DOTALL)


class MiniMaxForm(ToolForm):
    name = "minimax"
    markers = (BEGIN,)
    other_tokens = (END,)

    def read(self, text: str, scanner: JsonScanner, schemas: Schemas, *, is_final: bool) -> CallSection | None:
        head = text[len(BEGIN) :].lstrip()
        if not head.startswith(INVOKE) and not (INVOKE.startswith(head) and not is_final):
            return CallSection((), len(BEGIN))
        while (at := text.find(END, scanner.searched)) >= 0:
            end = at + len(END)
            calls = _calls(text[len(BEGIN) : at], schemas)
            if calls:
                return CallSection(calls, end)
            scanner.searched = end  # it is part of a value
        scanner.searched = max(scanner.searched, len(text) - len(END))
        return CallSection((), len(text)) if is_final else None

    def call_rules(self, schemas: Schemas, special: SpecialTokens, *, is_parallel: bool) -> list[str]:
        rules, calls = [], []
        for number, (name, schema) in enumerate(schemas.items()):
            parts = [lark_plain(f'{INVOKE}"{name}">\n')]
            for place, (key, inner) in enumerate(properties_of(schema).items()):
                rule = f"value_{number}_{place}"
                rules.append(value_rule(rule, inner, schema, f"{VALUE_END}\n"))
                part = lark_plain(f'<parameter name="{key}">') + f" {rule}"
                parts.append(part if key in required_of(schema) else f"({part})?")
            calls.append(" ".join([*parts, lark_plain(f"{INVOKE_END}\n")]))
        call, several = "\n    | ".join(calls), "+" if is_parallel else ""
        return [f'calls: "\\n" call{several} {lark_text(END, special)}', f"call: {call}", *rules]


def _calls(body: str, schemas: Schemas) -> tuple[tuple[str, str], ...]:
    """Empty if there is anything else."""
    calls = []
    body, at = body.rstrip(), 0
    while found := _CALL.match(body, at):
        properties = properties_of(schemas.get(found[1]))
        inner, place = found[2].rstrip(), 0
        arguments: dict[str, Any] = {}
        while parameter := _PARAMETER.match(inner, place):
            arguments[parameter[1]] = typed_value(parameter[2], properties.get(parameter[1]))
            place = parameter.end()
        if inner[place:].strip():
            return ()
        calls.append((found[1], argument_text(arguments)))
        at = found.end()
    return () if body[at:].strip() else tuple(calls)
