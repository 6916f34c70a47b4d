"""Calls as <invoke name="NAME"> with a <parameter name="KEY"> for each argument, all of them inside of one tag.

MiniMax-M2      <minimax:tool_call>
DeepSeek-V3.2   <｜DSML｜function_calls>, V4 <｜DSML｜tool_calls>
                The inner tags have the mark too, and a parameter says whether its value is text: string="true".
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lakh.server.tools.forms.tool_form import CallSection, ReadCall, Schemas, ToolForm, lark_plain, lark_text
from lakh.server.tools.forms.typed_values import argument_rules, is_text, properties_of, read_arguments
from lakh.server.tools.json_scanner import JsonScanner

if TYPE_CHECKING:
    from lakh.server.prompts.special_tokens import SpecialTokens

__all__ = ["InvokeForm", "find_invoke_form"]

MINIMAX, DSML = "minimax:tool_call", "｜DSML｜"


def find_invoke_form(template: str) -> InvokeForm | None:
    """The form of a chat template; None if it is neither."""
    if DSML in template:
        tag = "function_calls" if "function_calls>" in template else "tool_calls"
        return InvokeForm("dsml", f"{DSML}{tag}", DSML)
    return InvokeForm("minimax", MINIMAX) if "<invoke name=" in template and f"<{MINIMAX}>" in template else None


class InvokeForm(ToolForm):
    def __init__(self, name: str, tag: str, mark: str = "") -> None:
        """`mark` is a part of the inner tags, whose parameters then say whether they are text."""
        self.name = name
        self._begin, self._end, self._mark = f"<{tag}>", f"</{tag}>", mark
        self._invoke, self._invoke_end = f"<{mark}invoke name=", f"</{mark}invoke>"
        self._value_end = f"</{mark}parameter>"
        self.markers, self.other_tokens = (self._begin,), (self._end, *((mark,) if mark else ()))
        # A value may have a closing tag as text: it ends where another one, or the end, follows.
        self._call = re.compile(
            rf'\s*{self._invoke}"([^"\n]+)">(.*?){self._invoke_end}(?=\s*(?:{self._invoke}"|\Z))', re.DOTALL
        )
        kind = ' string="(?P<is_text>true|false)"' if mark else ""
        begin = f'<{mark}parameter name="'
        self._parameter = re.compile(
            rf'\s*{begin}(?P<key>[^"\n]+)"{kind}>(?P<value>.*?){self._value_end}(?=\s*(?:{begin}|\Z))', re.DOTALL
        )

    def read(self, text: str, scanner: JsonScanner, schemas: Schemas, *, is_final: bool) -> CallSection | None:
        head = text[len(self._begin) :].lstrip()
        if not head.startswith(self._invoke) and not (self._invoke.startswith(head) and not is_final):
            return CallSection((), len(self._begin))
        while (at := text.find(self._end, scanner.searched)) >= 0:
            end = at + len(self._end)
            calls = self._calls(text[len(self._begin) : at], schemas)
            if calls:
                return CallSection(calls, end)
            scanner.searched = end  # it is part of a value
        scanner.searched = max(scanner.searched, len(text) - len(self._end))
        return CallSection((), len(text)) if is_final else None

    def read_first(self, text: str, scanner: JsonScanner, schemas: Schemas) -> CallSection | None:
        while (at := text.find(self._invoke_end, scanner.searched)) >= 0:
            end = at + len(self._invoke_end)
            rest, marks = text[end:].lstrip(), (self._invoke, self._end)
            if any(mark.startswith(rest) for mark in marks):  # what follows shows whether it is part of a value
                return None
            calls = self._calls(text[len(self._begin) : end], schemas) if rest.startswith(marks) else ()
            if calls:
                return CallSection(calls[:1], end)
            scanner.searched = end
        scanner.searched = max(scanner.searched, len(text) - len(self._invoke_end))
        return None

    def call_rules(self, schemas: Schemas, special: SpecialTokens, *, is_parallel: bool) -> list[str]:
        rules: list[str] = []
        calls: list[str] = []
        for number, (name, schema) in enumerate(schemas.items()):
            inner = properties_of(schema)

            def before(key: str, inner: Schemas = inner) -> str:
                kind = f' string="{str(is_text(inner[key])).lower()}"' if self._mark else ""
                return " ".join([lark_text(f"<{self._mark}parameter name=", special), lark_plain(f'"{key}"{kind}>')])

            arguments, of_values = argument_rules(
                f"value_{number}", schema, before, f"{self._value_end}\n", special=special
            )
            begin_invoke = " ".join([lark_text(self._invoke, special), lark_plain(f'"{name}">\n')])
            calls.append(" ".join([begin_invoke, *arguments, lark_text(f"{self._invoke_end}\n", special)]))
            rules += of_values
        call, several = "\n    | ".join(calls), "+" if is_parallel else ""
        return [f'calls: "\\n" call{several} {lark_text(self._end, special)}', f"call: {call}", *rules]

    def _calls(self, body: str, schemas: Schemas) -> tuple[ReadCall, ...]:
        """Empty if there is anything else."""
        calls = []
        body, at = body.rstrip(), 0
        while found := self._call.match(body, at):
            arguments = read_arguments(self._parameter, found[2].rstrip(), schemas.get(found[1]))
            if arguments is None:
                return ()
            calls.append(ReadCall(found[1], arguments))
            at = found.end()
        return () if body[at:].strip() else tuple(calls)
