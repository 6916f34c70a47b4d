"""Hermes, Qwen2.5 and Qwen3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, one after the other."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from lakh.server.tools.forms.tool_form import CallSection, Schemas, ToolForm, json_call, lark_json, lark_text
from lakh.server.tools.json_scanner import JsonScanner, json_of

if TYPE_CHECKING:
    from lakh.server.prompts.special_tokens import SpecialTokens

__all__ = ["HermesForm"]

BEGIN, END = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'<tool_call>\n\{"name": ("(?:[^"\\]|\\.)*"), "arguments": (?=\{)')


class HermesForm(ToolForm):
    name = "hermes"
    markers = (BEGIN,)
    other_tokens = (END,)

    def read(self, text: str, scanner: JsonScanner, schemas: Schemas, *, is_final: bool) -> CallSection | None:
        start = len(text) - len(text[len(BEGIN) :].lstrip())
        if text[start : start + 1] not in ("{", "") or (is_final and start == len(text)):
            return CallSection((), len(BEGIN))
        end = scanner.end(text, start)
        if end is None:
            return CallSection((), len(text)) if is_final else None
        call = json_call(json_of(text[start:end]))
        if call is None:
            return CallSection((), end)
        rest = text[end:].lstrip()
        if rest.startswith(END):
            return CallSection((call,), len(text) - len(rest) + len(END))
        if END.startswith(rest):  # all of it may come, or the answer ended inside
            return CallSection((call,), len(text)) if is_final else None
        return CallSection((call,), end)

    def begun(self, text: str) -> tuple[str, int] | None:
        found = _HEAD.match(text)
        return None if found is None else (json.loads(found[1]), found.end())

    def call_rules(self, schemas: Schemas, special: SpecialTokens, *, is_parallel: bool) -> list[str]:
        end, begin = lark_text(f"\n{END}", special), lark_text(f"\n{BEGIN}", special)
        objects = [json_object(name, schema, "arguments") for name, schema in schemas.items()]
        body = "\n    | ".join(map(lark_json, objects))
        several = f" ({begin} call)*" if is_parallel else ""
        return [f"calls: call{several}", f'call: "\\n" body {end}', f"body: {body}"]


def json_object(name: str, schema: object, key: str) -> dict[str, object]:
    """The schema of a call that is a JSON object."""
    inner = dict(schema) if isinstance(schema, dict) else {}
    shared = {word: inner.pop(word) for word in ("$defs", "definitions") if word in inner}
    properties = {"name": {"const": name}, key: inner}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **shared,
    }
