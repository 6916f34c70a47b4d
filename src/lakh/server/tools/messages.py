"""The messages of a request, in OpenAI's form: texts, calls of tools and their results."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any

from lakh.errors import ConfigError
from lakh.server.prompts.chat_template import ChatMessage
from lakh.server.tools.tool_call import ToolCall

__all__ = ["MAX_MESSAGES", "read_messages"]

MAX_MESSAGES = 1024
FORM = 'give a list of {"role": "user", "content": "..."}'
CALL_FORM = 'give {"id": "...", "type": "function", "function": {"name": "...", "arguments": "{...}"}}'


def read_messages(value: object) -> tuple[ChatMessage, ...]:
    """Raises a ConfigError. The parts of a content are joined; images are refused."""
    if value is None:
        return ()
    if not isinstance(value, list) or not value or len(value) > MAX_MESSAGES:
        raise ConfigError("messages", "is not a list of messages", FORM)
    return tuple(map(_message, value))


def _message(message: Any) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise ConfigError("messages", f"{reprlib.repr(message)} is not an object", FORM)
    for field in ("images", "function_call"):
        if message.get(field):
            raise ConfigError("messages", f"{field} is not supported", "remove it")
    role, calls = message.get("role"), _calls(message.get("tool_calls"))
    if calls and role != "assistant":
        raise ConfigError("messages", "tool_calls belong to the assistant", "remove them from other messages")
    content = _content(message.get("content"))
    if content is None and role == "assistant" and not calls and "content" in message:
        content = ""  # as OpenAI's clients send back an answer without text
    if not isinstance(role, str) or (content is None and not (calls and message.get("content") is None)):
        raise ConfigError("messages", f"{reprlib.repr(dict(message))} is not a message", FORM)
    number, name = message.get("tool_call_id"), message.get("name")
    if not isinstance(number, str | None) or not isinstance(name, str | None):
        raise ConfigError("messages", "tool_call_id or name is not a string", "correct it")
    reasoning = _reasoning(message) if role == "assistant" else None
    return ChatMessage(role, content, calls, number, name, reasoning)


def _reasoning(message: Mapping[str, Any]) -> str | None:
    """Under the names of vLLM's older and newer API, and Ollama's."""
    for name in ("reasoning_content", "reasoning", "thinking"):
        text = message.get(name)
        if not isinstance(text, str | None):
            raise ConfigError("messages", f"{name} is not a string", "correct it")
        if text:
            return text
    return None


def _content(content: Any) -> str | None:
    """None if it is not a text."""
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        texts = [part.get("text") for part in content]
        return "".join(texts) if all(isinstance(text, str) for text in texts) else None
    return content if isinstance(content, str) else None


def _calls(value: Any) -> tuple[ToolCall, ...]:
    if not value:
        return ()
    if not isinstance(value, list) or len(value) > MAX_MESSAGES:
        raise ConfigError("messages", "tool_calls is not a list of calls", CALL_FORM)
    return tuple(map(_call, value))


def _call(call: Any) -> ToolCall:
    form = call if isinstance(call, Mapping) else {}
    function, number = form.get("function"), form.get("id")
    name, text = (function.get(key) if isinstance(function, Mapping) else None for key in ("name", "arguments"))
    is_function = form.get("type", "function") == "function" and isinstance(number, str | None)
    if not is_function or not isinstance(name, str):
        raise ConfigError("messages", f"{reprlib.repr(call)} in tool_calls is not a call", CALL_FORM)
    try:
        is_object = text in (None, "") or isinstance(json.loads(text), dict)
    except (TypeError, ValueError, RecursionError):
        is_object = False
    if not is_object:
        found = f"arguments of the call of {name[:80]!r} are not a JSON object as text"
        raise ConfigError("messages", found, CALL_FORM)
    return ToolCall(number or "", name, text or "{}")
