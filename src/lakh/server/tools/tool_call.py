"""A call of a tool, as OpenAI's API writes it, and a part of one in a stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

__all__ = ["ToolCall", "ToolCallDelta", "merge_calls"]


class ToolCall(NamedTuple):
    id: str
    name: str
    arguments: str
    """A JSON object, as text."""

    def as_openai(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolCallDelta(NamedTuple):
    """The beginning of a call, with its id and name, or more of its arguments."""

    number: int
    """Of the call in its answer, from 0."""
    id: str
    name: str
    """Empty, as the id, where more arguments follow."""
    arguments: str

    def as_openai(self) -> dict[str, Any]:
        if not self.id:
            return {"index": self.number, "function": {"arguments": self.arguments}}
        return {"index": self.number, **ToolCall(self.id, self.name, self.arguments).as_openai()}


def merge_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """One delta for each call, in their order."""
    merged: dict[int, ToolCallDelta] = {}
    for new in deltas:
        old = merged.get(new.number)
        merged[new.number] = new if old is None else old._replace(arguments=old.arguments + new.arguments)
    return tuple(merged.values())
