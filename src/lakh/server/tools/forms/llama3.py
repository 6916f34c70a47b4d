"""Llama 3.1 to 3.3: an answer that is {"name": ..., "parameters": {...}}, also after <|python_tag|>.

Nothing marks such a call, so the object must be at the beginning of the answer and name one of the tools.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from lakh.server.tools.forms.hermes import json_object
from lakh.server.tools.forms.tool_form import CallSection, Schemas, ToolForm, json_call, lark_json
from lakh.server.tools.json_scanner import JsonScanner, json_of

if TYPE_CHECKING:
    from lakh.server.prompts.special_tokens import SpecialTokens

__all__ = ["Llama3Form"]

PYTHON_TAG = "<|python_tag|>"
_HEAD = re.compile(r'\{"name": ("(?:[^"\\]|\\.)*"), "parameters": (?=\{)')


class Llama3Form(ToolForm):
    name = "llama3"
    markers = (PYTHON_TAG, "{")
    begins_answer = True

    def read(self, text: str, scanner: JsonScanner, schemas: Schemas, *, is_final: bool) -> CallSection | None:
        begin = len(PYTHON_TAG) if text.startswith(PYTHON_TAG) else 0
        start = len(text) - len(text[begin:].lstrip())
        if text[start : start + 1] != "{":
            is_open = start == len(text) and not is_final
            return None if is_open else CallSection((), max(begin, 1))
        end = scanner.end(text, start)
        if end is None:
            return CallSection((), len(text)) if is_final else None
        call = json_call(json_of(text[start:end]))
        return CallSection((call,) if call is not None and call[0] in schemas else (), end)

    def begun(self, text: str) -> tuple[str, int] | None:
        found = _HEAD.match(text)
        return None if found is None else (json.loads(found[1]), found.end())

    def grammar(self, schemas: Schemas, special: SpecialTokens, *, is_parallel: bool, may_be_text: bool = False) -> str:
        text = " | TEXT\nTEXT: /\\s*[^{\\s](.|\\n)*/" if may_be_text else ""
        objects = [json_object(name, schema, "parameters") for name, schema in schemas.items()]
        calls = "\n    | ".join(map(lark_json, objects))
        return f"start: calls{text}\ncalls: {calls}\n"
