"""MiniMax-M2: <minimax:tool_call> with an <invoke name="NAME"> for each call, and in it a <parameter name="KEY"> for
each argument.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lakh.server.tools.forms.tool_form import CallSection, ReadCall, Schemas, ToolForm, lark_plain, lark_text
from lakh.server.tools.forms.typed_values import argument_rules, read_arguments
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

    def read_first(self, text: str, scanner: JsonScanner, schemas: Schemas) -> CallSection | None:
        while (at := text.find(INVOKE_END, scanner.searched)) >= 0:
            end = at + len(INVOKE_END)
            rest = text[end:].lstrip()
            if INVOKE.startswith(rest) or END.startswith(rest):  # what follows shows whether it is part of a value
                return None
            calls = _calls(text[len(BEGIN) : end], schemas) if rest.startswith((INVOKE, END)) else ()
            if calls:
                return CallSection(calls[:1], end)
            scanner.searched = end
        scanner.searched = max(scanner.searched, len(text) - len(INVOKE_END))
        return None

    def call_rules(self, schemas: Schemas, special: SpecialTokens, *, is_parallel: bool) -> list[str]:
        def before(key: str) -> str:
            return lark_plain(f'<parameter name="{key}">')

        rules: list[str] = []
        calls: list[str] = []
        for number, (name, schema) in enumerate(schemas.items()):
            arguments, of_values = argument_rules(f"value_{number}", schema, before, f"{VALUE_END}\n")
            begin_invoke, end_invoke = lark_plain(f'{INVOKE}"{name}">\n'), lark_plain(f"{INVOKE_END}\n")
            calls.append(" ".join([begin_invoke, *arguments, end_invoke]))
            rules += of_values
        call, several = "\n    | ".join(calls), "+" if is_parallel else ""
        return [f'calls: "\\n" call{several} {lark_text(END, special)}', f"call: {call}", *rules]


def _calls(body: str, schemas: Schemas) -> tuple[ReadCall, ...]:
    """Empty if there is anything else."""
    calls = []
    body, at = body.rstrip(), 0
    while found := _CALL.match(body, at):
        arguments = read_arguments(_PARAMETER, found[2].rstrip(), schemas.get(found[1]))
        if arguments is None:
            return ()
        calls.append(ReadCall(found[1], arguments))
        at = found.end()
    return () if body[at:].strip() else tuple(calls)
