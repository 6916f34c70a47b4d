"""A call of a tool, as OpenAI's API writes it."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["ToolCall"]


class ToolCall(NamedTuple):
    id: str
    name: str
    arguments: str
    """A JSON object, as text."""

    def as_openai(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}
