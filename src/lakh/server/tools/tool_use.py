"""The tools of a chat request and how the answer may use them, read from OpenAI's fields.

tools                 [{"type": "function", "function": {"name": ..., "description": ..., "parameters": SCHEMA}}];
                      `"strict": true` beside them: arguments follow their schema
tool_choice           "auto" (default), "none", "required", or {"type": "function", "function": {"name": ...}}
parallel_tool_calls   false: at most one call
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lakh.errors import ConfigError

__all__ = ["MAX_NAME_CHARS", "MAX_TOOLS", "ToolUse", "read_tool_use"]

MAX_TOOLS = 512
MAX_NAME_CHARS = 128
FORM = 'give {"type": "function", "function": {"name": "read_file", "parameters": {"type": "object", ...}}}'
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolUse:
    definitions: str
    """The tools as a JSON list, as the request has them."""
    is_required: bool = False
    """The answer is a call."""
    function: str | None = None
    """The tool that is called, if the request names one."""
    is_parallel: bool = True
    """The answer may have several calls."""

    @property
    def tools(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.definitions)
        return found

    @cached_property  # each choice asks for them
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The schema of the arguments of each tool."""
        functions = [tool["function"] for tool in self.tools]
        return {one["name"]: one.get("parameters") or NO_PARAMETERS for one in functions}

    @cached_property
    def is_strict(self) -> bool:
        """A tool says `strict`: arguments follow their schema wherever the model calls one."""
        return any(tool["function"].get("strict") for tool in self.tools)

    @property
    def has_grammar(self) -> bool:
        return self.is_required or self.is_strict

    @property
    def callable_schemas(self) -> dict[str, dict[str, Any]]:
        """Those that the request allows to call."""
        return {name: schema for name, schema in self.schemas.items() if self.function in (None, name)}

    def as_openai(self) -> dict[str, Any]:
        """OpenAI's fields, for another engine."""
        choice: Any = "required" if self.is_required else "auto"
        if self.function is not None:
            choice = {"type": "function", "function": {"name": self.function}}
        return {"tools": self.tools, "tool_choice": choice, "parallel_tool_calls": self.is_parallel}


def read_tool_use(data: Mapping[str, Any]) -> ToolUse | None:
    """The tools of a request; None if the answer cannot use any. Raises a ConfigError that names the field."""
    tools, choice = data.get("tools") or None, data.get("tool_choice")
    is_parallel = data.get("parallel_tool_calls")
    if not isinstance(is_parallel, bool | None):
        raise ConfigError("parallel_tool_calls", f"{reprlib.repr(is_parallel)} is not true or false", "choose one")
    if tools is None:
        if choice not in (None, "none", "auto"):
            raise ConfigError("tool_choice", "there are no tools", "give the field tools")
        return None
    definitions = _definitions(tools)
    names = [tool["function"]["name"] for tool in tools]
    if choice in (None, "auto", "none", "required"):
        use = ToolUse(definitions, is_required=choice == "required", is_parallel=is_parallel is not False)
        return None if choice == "none" else use
    named = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = named.get("name") if isinstance(named, Mapping) else None
    if not isinstance(name, str):
        todo = 'give "auto", "none", "required" or {"type": "function", "function": {"name": ...}}'
        raise ConfigError("tool_choice", f"{reprlib.repr(choice)} is not supported", todo)
    if name not in names:
        raise ConfigError("tool_choice", f"{name[:80]!r} is none of the tools", "name one of them")
    return ToolUse(definitions, is_required=True, function=name, is_parallel=False)


def _definitions(tools: Any) -> str:
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise ConfigError("tools", f"is not a list of at most {MAX_TOOLS} tools", FORM)
    names: set[str] = set()
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            raise ConfigError("tools", f"{reprlib.repr(tool)} is not a function", FORM)
        name = function.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or not _is_word(name):
            todo = f"give 1 to {MAX_NAME_CHARS} characters without spaces"
            raise ConfigError("tools", f"{reprlib.repr(name)} is not a name", todo)
        if name in names:
            raise ConfigError("tools", f"{name!r} is given twice", "give each tool a name of its own")
        names.add(name)
        for field, kind in (("description", str), ("parameters", Mapping), ("strict", bool)):
            if not isinstance(function.get(field), kind | None):
                raise ConfigError("tools", f"{field} of {name!r} has the wrong type", FORM)
    try:
        return json.dumps(tools, allow_nan=False)
    except (ValueError, RecursionError):
        raise ConfigError("tools", "is not JSON", "leave out NaN, infinity and deep nesting") from None


def _is_word(name: str) -> bool:
    return name.isprintable() and not any(character.isspace() for character in name)
