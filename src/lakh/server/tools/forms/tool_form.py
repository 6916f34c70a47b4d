"""What a form of calls is: how a model writes them, how they are read, and the grammar of an answer that is a call."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from lakh.server.tools.json_scanner import JsonScanner, json_of

if TYPE_CHECKING:
    from lakh.server.prompts.special_tokens import SpecialTokens
    from lakh.server.structured.constraint import OutputConstraint

__all__ = ["CallSection", "ReadCall", "ToolForm", "argument_text", "json_call", "lark_json", "lark_plain", "lark_text"]

Schemas = Mapping[str, Mapping[str, Any]]
"""The schemas of the arguments, by the name of the tool."""

# On one line, as models are trained to write it and as json.dumps does: no endless white space.
JSON_STYLE = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}


class ReadCall(NamedTuple):
    name: str
    arguments: str
    id: str = ""
    """As the model wrote it; empty in forms without one."""


class CallSection(NamedTuple):
    """What the beginning of a text turned out to be."""

    calls: tuple[ReadCall, ...]
    """None if it is text."""
    end: int
    """Its number of characters."""


class ToolForm:
    name: str
    markers: tuple[str, ...]
    """Texts that begin a call."""
    other_tokens: tuple[str, ...] = ()
    """Further special tokens inside of calls."""
    begins_answer: ClassVar[bool] = False
    """A call is only found at the beginning of an answer."""
    has_channels: ClassVar[bool] = False
    """Every answer of a chat is in channels, which also tell reasoning from text."""

    def read(self, text: str, scanner: JsonScanner, schemas: Schemas, *, is_final: bool) -> CallSection | None:
        """Read text that begins with a marker; None if more of it is needed, which comes unless `is_final`."""
        raise NotImplementedError

    def read_first(self, text: str, scanner: JsonScanner, schemas: Schemas) -> CallSection | None:
        """The first call of such a text, where `read` needs all of them, for an answer with one call. None if it is
        not complete. Its scanner is not that of `read`.
        """
        return None

    def begun(self, text: str) -> tuple[str, int] | None:
        """The name of the call that a text begins with, and where its arguments begin, as the grammar writes it. None
        while they have not begun, and where they are no JSON object in one piece.
        """
        return None

    def grammar(self, schemas: Schemas, special: SpecialTokens, *, is_parallel: bool, may_be_text: bool = False) -> str:
        """A grammar in Lark's form, of answers that are one call or, if `is_parallel`, several. `may_be_text`: or a
        text, also before the calls.
        """
        marker = self.markers[0]
        first, *others = special.split(marker)
        if not may_be_text:
            starts = [f"start: {lark_text(marker, special)} calls"]
        elif isinstance(first, str) and others:  # text and special tokens
            rest = " ".join(f"<[{one}]>" if isinstance(one, int) else lark_plain(one) for one in others)
            begin = re.escape(first).replace("/", "\\/")
            starts = [f"start: TEXT | BEFORE {rest} calls", f"BEFORE: /(.|\\n)*{begin}/", "TEXT: /(.|\\n)+/"]
        elif first == marker:
            without = re.escape(marker).replace("/", "\\/")
            starts = [
                "start: TEXT | text_and_marker calls",
                f"text_and_marker[suffix={lark_plain(marker)}]: /(.|\\n)*/",
                f"TEXT: /(.|\\n)+/ & ~/(.|\\n)*{without}(.|\\n)*/",
            ]
        else:
            starts = [f"start: TEXT | TEXT? {lark_text(marker, special)} calls", "TEXT: /(.|\\n)+/"]
        return "\n".join([*starts, *self.call_rules(schemas, special, is_parallel=is_parallel), ""])

    def around(self, constraint: OutputConstraint, special: SpecialTokens) -> OutputConstraint:
        """The form of an answer whose text has a form."""
        return constraint

    def call_rules(self, schemas: Schemas, special: SpecialTokens, *, is_parallel: bool) -> list[str]:
        """The rules of such a grammar; `calls` is what follows the first marker."""
        raise NotImplementedError

    def new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"


def json_call(value: object) -> ReadCall | None:
    """The name and arguments of a call that is a JSON object."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write them as text inside of JSON
        arguments = json_of(arguments)
    return ReadCall(value["name"], argument_text(arguments)) if isinstance(arguments, dict) else None


def argument_text(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def lark_text(text: str, special: SpecialTokens) -> str:
    """A text in a grammar; special tokens in it are tokens."""
    return " ".join(f"<[{piece}]>" if isinstance(piece, int) else lark_plain(piece) for piece in special.split(text))


def lark_plain(text: str) -> str:
    """A text of a request in a grammar: nothing in it is a special token."""
    return json.dumps(text, ensure_ascii=False)


def lark_json(schema: Mapping[str, Any]) -> str:
    """JSON of a schema in a grammar."""
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_STYLE})}"
