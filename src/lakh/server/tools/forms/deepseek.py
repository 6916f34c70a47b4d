"""DeepSeek: calls between special tokens, with a block of JSON in V3 and R1, and with JSON alone in V3.1."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lakh.server.tools.forms.call_list import CallListForm
from lakh.server.tools.forms.tool_form import ReadCall, Schemas, argument_text, lark_json, lark_plain, lark_text
from lakh.server.tools.json_scanner import json_of

if TYPE_CHECKING:
    from lakh.server.prompts.special_tokens import SpecialTokens

__all__ = ["DeepSeekForm"]

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeekForm(CallListForm):
    name = "deepseek"
    markers = (BEGIN,)
    other_tokens = (END, CALL, SEPARATOR, CALL_END)
    end, call, call_end = END, CALL, CALL_END
    pattern = re.compile(
        rf"\s*{CALL}(?:function{SEPARATOR}([^\n{{]+)\n```json\n(.*?)\n```|([^\n{{]+?){SEPARATOR}(.*?)){CALL_END}",
        re.DOTALL,
    )

    def __init__(self, *, has_block: bool) -> None:
        """`has_block`: the arguments are in a block of Markdown."""
        self._has_block = has_block

    def read_call(self, found: re.Match[str]) -> ReadCall | None:
        arguments = json_of(found[2] if found[1] else found[4])
        if not isinstance(arguments, dict):
            return None
        return ReadCall((found[1] or found[3]).strip(), argument_text(arguments))

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
