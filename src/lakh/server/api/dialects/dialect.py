"""What a dialect is: a path, two translations and the JSON schemas of its bodies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lakh.server.api.schema import Schema
from lakh.server.backend import PhaseTimes

__all__ = ["Dialect", "DialectResponse"]


@dataclass(frozen=True)
class DialectResponse:
    """A completion, or a delta of one, before it takes a dialect's form."""

    envelope: dict[str, Any]
    """id, object, created, model"""
    choices: list[dict[str, Any]]
    """index, text, logprobs, finish_reason, stop_reason; empty in the usage event of a stream"""
    usage: dict[str, Any] | None
    is_delta: bool
    finish_reason: str | None = None
    """Of the last choice that has finished."""
    phases: PhaseTimes | None = None
    """Beside `usage`: the time in the engine, where it is known."""
    is_first: bool = False
    """The first delta of its choice."""
    token_ids: tuple[int, ...] = ()
    """Beside `usage`: those of the prompt and the completion of the first choice, if requested."""


@dataclass(frozen=True)
class Dialect:
    path: str
    summary: str
    to_openai: Callable[[Mapping[str, Any]], dict[str, Any]]
    """From a request body to OpenAI's fields (server/request.py). Unknown fields are ignored."""
    render: Callable[[DialectResponse], dict[str, Any]]
    request_schema: Schema
    response_schema: Schema
    last_line: str | None = "[DONE]"
    """The last event of a stream."""
    framing: Literal["sse", "ndjson"] = "sse"
    """How a stream is sent: server-sent events, or one JSON object per line."""
    needs_whole_calls: bool = False
    """A stream has calls of tools as a whole, at the end of the answer."""
    is_meant: Callable[[Mapping[str, Any]], bool] = lambda body: True
    """Whether a body is in this form, where several dialects share a path."""
    only_loads: Callable[[Mapping[str, Any]], bool] = lambda body: False
    """Whether a body asks for no text, but only that the model is there."""
