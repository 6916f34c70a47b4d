"""Kimi K2: a section of calls, each with its id, `functions.NAME:NUMBER`, and its arguments as JSON. The number counts
the calls of the conversation, and templates repeat the id beside the result.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lakh.server.tools.forms.call_list import CallListForm
from lakh.server.tools.forms.tool_form import ReadCall, Schemas, argument_text, lark_json, lark_plain, lark_text
from lakh.server.tools.json_scanner import json_of

if TYPE_CHECKING:
    from lakh.server.prompts.special_tokens import SpecialTokens

__all__ = ["KimiForm"]

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
FUNCTIONS = "functions."
_ID = re.compile(r"(?:functions\.)?(.+):[0-9]+")


class KimiForm(CallListForm):
    name = "kimi"
    markers = (BEGIN,)
    other_tokens = (END, CALL, ARGUMENTS, CALL_END)
    end, call, call_end = END, CALL, CALL_END
    pattern = re.compile(
        r"\s*<\|tool_call_begin\|>\s*([^\s<]+)\s*<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>", re.DOTALL
    )

    def read_call(self, found: re.Match[str]) -> ReadCall | None:
        number, arguments = _ID.fullmatch(found[1]), json_of(found[2])
        if not isinstance(arguments, dict):
            return None
        if number is None:
            return ReadCall(found[1].removeprefix(FUNCTIONS), argument_text(arguments))
        return ReadCall(number[1], argument_text(arguments), found[1])

    def call_rules(self, schemas: Schemas, special: SpecialTokens, *, is_parallel: bool) -> list[str]:
        calls = [
            " ".join([lark_plain(f"{FUNCTIONS}{name}:"), "NUMBER", lark_text(ARGUMENTS, special), lark_json(schema)])
            for name, schema in schemas.items()
        ]
        begin, end = lark_text(CALL, special), lark_text(CALL_END, special)
        return [
            f"calls: call{'+' if is_parallel else ''} {lark_text(END, special)}",
            f"call: {begin} function {end}",
            "function: " + "\n    | ".join(calls),
            "NUMBER: /0|[1-9][0-9]{0,3}/",
        ]
