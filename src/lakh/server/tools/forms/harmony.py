"""GPT-OSS's harmony: an answer is a list of messages, each with a channel and perhaps a recipient.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>text
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

The recipient may stand before the channel, too. Every answer in a chat has channels, with tools or without, so it is
read by tools/channels.py.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NamedTuple

from lakh.server.structured.constraint import OutputConstraint
from lakh.server.tools.forms.tool_form import Schemas, ToolForm, lark_json, lark_plain, lark_text

if TYPE_CHECKING:
    from lakh.server.prompts.special_tokens import SpecialTokens

__all__ = ["ENDS", "HEADS", "MESSAGE", "HarmonyForm", "Header", "begins_header", "read_header"]

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN, CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
HEADS, ENDS = (START, CHANNEL), (END, CALL, RETURN)
# At the beginning of an answer, whose prompt has the start and the role, or without a start.
OTHER_HEADS = ("to=", f"assistant{CHANNEL}")
FUNCTIONS = "functions."
MAX_HEADER_CHARS = 512
MAX_MESSAGES = 3  # before one that a grammar makes sure of: reasoning, and what the model is about to do
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")


class Header(NamedTuple):
    channel: str
    """Empty if it has none."""
    recipient: str
    """Without the name space of functions."""
    is_function: bool


class HarmonyForm(ToolForm):
    name = "harmony"
    markers = (CHANNEL,)
    other_tokens = (START, MESSAGE, END, CALL, RETURN, CONSTRAIN)
    has_channels = True

    def grammar(self, schemas: Schemas, special: SpecialTokens, *, is_parallel: bool, may_be_text: bool = False) -> str:
        """An answer has one call, after which such models end. Before it they reason, and may say what they do."""
        last = f"call | {_head('final', special)} TEXT?" if may_be_text else "call"
        calls = [
            " ".join([lark_plain(name), lark_text(f" {CONSTRAIN}json{MESSAGE}", special), lark_json(schema)])
            for name, schema in schemas.items()
        ]
        call = f"call: {lark_text(f'{CHANNEL}commentary to={FUNCTIONS}', special)} function"
        return _after_others([f"last: {last}", call, "function: " + "\n    | ".join(calls)], special)

    def around(self, constraint: OutputConstraint, special: SpecialTokens) -> OutputConstraint:
        """The same for the text of the final message, before which the model may reason. A grammar of the request is
        that of the whole answer, which then has no channels.
        """
        if constraint.kind == "grammar":
            return constraint
        if constraint.kind == "json":
            text = lark_json(json.loads(constraint.text))
        elif constraint.kind == "choice":
            text = "(" + " | ".join(map(lark_plain, json.loads(constraint.text))) + ")"
        else:
            text = "FORM"
        rules = [f"last: {_head('final', special)} {text}"]
        if constraint.kind == "regex":
            rules.append("FORM: /" + constraint.text.replace("/", "\\/").replace("\n", "\\n") + "/")
        return OutputConstraint("grammar", _after_others(rules, special), constraint.field)


def _head(channel: str, special: SpecialTokens) -> str:
    return lark_text(f"{CHANNEL}{channel}{MESSAGE}", special)


def _after_others(rules: list[str], special: SpecialTokens) -> str:
    """A grammar of answers whose last message is the rule `last`."""
    others = ""
    for _ in range(MAX_MESSAGES):
        others = f"(other {others})?"
    end, begin = lark_text(END, special), lark_text(f"{START}assistant", special)
    other = f"other: ({_head('analysis', special)} | {_head('commentary', special)}) TEXT? {end} {begin}"
    return "\n".join([f"start: {others} last", other, "TEXT: /(.|\\n)+/", *rules, ""])


def begins_header(text: str) -> bool:
    """Whether text at the beginning of a message is a header, or may become one."""
    begun = text.lstrip()
    return any(begun.startswith(mark) or mark.startswith(begun) for mark in (*HEADS, *OTHER_HEADS))


def read_header(text: str) -> Header:
    channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
    name = "" if recipient is None else recipient[1]
    is_function = name.startswith(FUNCTIONS)
    return Header("" if channel is None else channel[1], name.removeprefix(FUNCTIONS), is_function)
