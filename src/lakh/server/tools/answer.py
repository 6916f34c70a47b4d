"""Chooses how the answer of a chat is read, and ends one that may have only one call after it."""

from __future__ import annotations

from lakh.server.tools.channels import ChannelParser
from lakh.server.tools.forms.tool_form import ToolForm
from lakh.server.tools.parser import ToolCallParser
from lakh.server.tools.tool_use import ToolUse

__all__ = ["AnswerParser", "FirstCallEnd", "make_parser"]

AnswerParser = ToolCallParser | ChannelParser


def make_parser(form: ToolForm, use: ToolUse | None, *, goes_on: bool = False) -> AnswerParser:
    """`use` is needed unless the form has channels. `goes_on`: the answer goes on with a text of the prompt."""
    if form.has_channels:
        return ChannelParser(form, use, goes_on=goes_on)
    assert use is not None
    return ToolCallParser(form, use)


class FirstCallEnd:
    """Ends an answer after its first call, as a stop rule of the engine: no token is generated for what would be
    dropped.
    """

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser

    @property
    def found(self) -> bool:
        return self._parser.is_over

    def push(self, text: str) -> str:
        self._parser.push(text)
        return text
