"""Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], and from Mistral Small 3.2 and Devstral on
[TOOL_CALLS]NAME[ARGS]{...} for each call.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING

from lakh.server.tools.forms.hermes import json_object
from lakh.server.tools.forms.tool_form import (
    CallSection,
    ReadCall,
    Schemas,
    ToolForm,
    argument_text,
    json_call,
    lark_json,
    lark_plain,
    lark_text,
)
from lakh.server.tools.json_scanner import JsonScanner, json_of
from lakh.server.tools.tool_use import MAX_NAME_CHARS

if TYPE_CHECKING:
    from lakh.server.prompts.special_tokens import SpecialTokens

__all__ = ["MistralForm"]

BEGIN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
ID_CHARS = 9  # the templates refuse others
# A name, then the id that some versions write, then the arguments.
_HEAD = re.compile(r"\s*([^\s\[{]+)(?:\[CALL_ID\][^\s\[{]*)?(?:\[ARGS\])?\s*(?=\{)")
_FIRST_OF_LIST = re.compile(r"\[TOOL_CALLS\]\s*\[\s*(?=\{)")
_MAX_HEAD_CHARS = 2 * MAX_NAME_CHARS + len(CALL_ID) + len(ARGUMENTS)


class MistralForm(ToolForm):
    name = "mistral"
    markers = (BEGIN,)
    other_tokens = (ARGUMENTS, CALL_ID)

    def __init__(self, *, has_list: bool) -> None:
        """`has_list`: calls are one JSON list."""
        self._has_list = has_list

    def read(self, text: str, scanner: JsonScanner, schemas: Schemas, *, is_final: bool) -> CallSection | None:
        start = len(text) - len(text[len(BEGIN) :].lstrip())
        if text[start : start + 1] == "[":
            return _read_list(text, start, scanner, is_final=is_final)
        head = _HEAD.match(text, len(BEGIN))
        if head is None:
            is_text = is_final or len(text) > len(BEGIN) + _MAX_HEAD_CHARS or "\n" in text[start:]
            return CallSection((), len(BEGIN)) if is_text else None
        end = scanner.end(text, head.end())
        if end is None:
            return CallSection((), len(text)) if is_final else None
        arguments = json_of(text[head.end() : end])
        calls = (ReadCall(head[1], argument_text(arguments)),) if isinstance(arguments, dict) else ()
        return CallSection(calls, end)

    def read_first(self, text: str, scanner: JsonScanner, schemas: Schemas) -> CallSection | None:
        start = _FIRST_OF_LIST.match(text)
        end = None if start is None else scanner.end(text, start.end())
        call = None if start is None or end is None else json_call(json_of(text[start.end() : end]))
        return None if end is None or call is None else CallSection((call,), end)

    def begun(self, text: str) -> tuple[str, int] | None:
        found = None if self._has_list else _HEAD.match(text, len(BEGIN))
        return None if found is None else (found[1], found.end())

    def call_rules(self, schemas: Schemas, special: SpecialTokens, *, is_parallel: bool) -> list[str]:
        begin = lark_text(BEGIN, special)
        if self._has_list:
            objects = [json_object(name, schema, "arguments") for name, schema in schemas.items()]
            calls = "\n    | ".join(map(lark_json, objects))
            several = ' (", " call)*' if is_parallel else ""
            return [f'calls: "[" call{several} "]"', f"call: {calls}"]
        calls = "\n    | ".join(
            f"{lark_plain(name)} {lark_text(ARGUMENTS, special)} {lark_json(schema)}"
            for name, schema in schemas.items()
        )
        several = f" ({begin} call)*" if is_parallel else ""
        return [f"calls: call{several}", f"call: {calls}"]

    def new_id(self) -> str:
        return secrets.token_hex(ID_CHARS)[:ID_CHARS]


def _read_list(text: str, start: int, scanner: JsonScanner, *, is_final: bool) -> CallSection | None:
    if len(text) == start + 1 and not is_final:
        return None
    if not text[start + 1 :].lstrip().startswith("{"):
        is_open = not text[start + 1 :].strip() and not is_final
        return None if is_open else CallSection((), len(BEGIN))
    end = scanner.end(text, start)
    if end is None:
        return CallSection((), len(text)) if is_final else None
    values = json_of(text[start:end])
    calls = [json_call(value) for value in values] if isinstance(values, list) else [None]
    found = tuple(call for call in calls if call is not None)
    return CallSection(found if len(found) == len(calls) else (), end)
