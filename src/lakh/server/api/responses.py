"""Writes completions as HTTP responses: one JSON body, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from aiohttp import web

from lakh.server.api.dialects import Dialect, DialectResponse
from lakh.server.api.request_handler import to_request_error
from lakh.server.backend import CompletionDelta, Usage
from lakh.server.request import CompletionRequest, RequestError
from lakh.server.tools.tool_call import ToolCallDelta, merge_calls

__all__ = ["OLLAMA_PATHS", "error_body", "respond", "respond_loaded", "stream"]

READER_TIMEOUT_S = 60.0  # for a client to read what was sent
KEEP_ALIVE_S = 2.0  # between events without text, while a call is held back: gateways and proxies wait for some
FRAMING = {"sse": ("text/event-stream", "data: ", "\n\n"), "ndjson": ("application/x-ndjson", "", "\n")}
OLLAMA_PATHS = "/api/"
BUFFERED_BYTES = 1 << 14  # writes below this never wait for the client
# llama.vim searches for "content":" without a space; a NaN is no JSON.
to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

Items = AsyncIterator[CompletionDelta | Usage]


async def respond(
    dialect: Dialect, request: CompletionRequest, envelope: dict[str, Any], items: Items
) -> web.StreamResponse:
    """The whole completion as one JSON body."""
    deltas: list[list[CompletionDelta]] = [[] for _ in range(request.num_choices)]
    usage = None
    async for item in items:
        if isinstance(item, Usage):
            usage = item
        else:
            deltas[item.index].append(item)
    choices = [_choice(_concatenate(of_choice), request) for of_choice in deltas]
    reason = choices[-1]["finish_reason"]
    phases = None if usage is None else usage.phases
    ids = tuple(token for delta in deltas[0] for token in _token_ids(delta, request))
    response = DialectResponse(
        envelope, choices, _usage(usage), is_delta=False, finish_reason=reason, phases=phases, token_ids=ids
    )
    return web.json_response(dialect.render(response), dumps=to_json)


def respond_loaded(dialect: Dialect, envelope: dict[str, Any]) -> web.Response:
    """To a request that only asks whether the model is there: no text."""
    body = dialect.render(DialectResponse(envelope, [], _usage(None), is_delta=False, finish_reason="load"))
    return web.json_response(body, dumps=to_json)


def error_body(http: web.Request, error: RequestError) -> dict[str, Any]:
    """In OpenAI's form; Ollama's clients expect a text."""
    return {"error": error.message} if http.path.startswith(OLLAMA_PATHS) else error.as_dict()


async def stream(
    http: web.Request, dialect: Dialect, request: CompletionRequest, envelope: dict[str, Any], items: Items
) -> web.StreamResponse:
    """Server-sent events (`data: {...}` and an empty line for each delta, `data: [DONE]` at the end), or the dialect's
    own framing.
    """
    content_type, before, after = FRAMING[dialect.framing]
    finish_reason, written_s = None, time.monotonic()
    begun: set[int] = set()
    held = _HeldCalls() if dialect.needs_whole_calls else None
    ids: list[int] = []
    first = await anext(items)  # an error before the first delta is still a plain JSON response
    response = web.StreamResponse(headers={"Content-Type": content_type, "Cache-Control": "no-cache"})
    await response.prepare(http)

    async def send(item: CompletionDelta | Usage) -> None:
        nonlocal finish_reason, written_s
        if isinstance(item, CompletionDelta):
            finish_reason = item.finish_reason or finish_reason
            is_first = item.index not in begun
            begun.add(item.index)
            if item.index == 0:
                ids.extend(_token_ids(item, request))
            item = item if held is None else held.take(item)
            is_silent = not is_first and _is_held_back(item, request)
            if is_silent and time.monotonic() < written_s + KEEP_ALIVE_S:
                return
            choice = _choice(item, request)
            event = DialectResponse(envelope, [choice], None, is_delta=True, is_first=is_first)
        elif request.include_usage:
            usage = _usage(item)
            event = DialectResponse(
                envelope,
                [],
                usage,
                is_delta=True,
                finish_reason=finish_reason,
                phases=item.phases,
                token_ids=tuple(ids),
            )
        else:
            return
        await _write(http, response, f"{before}{to_json(dialect.render(event))}{after}".encode())
        written_s = time.monotonic()

    try:
        await send(first)
        async for item in items:
            await send(item)
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception as error:  # noqa: BLE001 - the status line is sent already: report it in the stream
        await _write(http, response, f"{before}{to_json(error_body(http, to_request_error(error)))}{after}".encode())
        await response.write_eof()
        return response
    if dialect.last_line is not None:
        await _write(http, response, f"{before}{dialect.last_line}{after}".encode())
    await response.write_eof()
    return response


async def _write(http: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """A client that reads nothing for READER_TIMEOUT_S counts as disconnected."""
    transport = http.transport
    if transport is None or transport.get_write_buffer_size() + len(data) < BUFFERED_BYTES:
        await response.write(data)  # does not wait
        return
    try:
        async with asyncio.timeout(READER_TIMEOUT_S):
            await response.write(data)
    except TimeoutError:
        transport.abort()
        raise ConnectionResetError("the client does not read") from None


def _concatenate(deltas: list[CompletionDelta]) -> CompletionDelta:
    """All deltas of one choice as one."""
    logprobs: dict[str, Any] | None = None
    for part in (delta.logprobs for delta in deltas if delta.logprobs is not None):
        logprobs = {name: [*(logprobs or {}).get(name, ()), *values] for name, values in part.items()}
    last = deltas[-1]
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    text, prompt = "".join(delta.text for delta in deltas), deltas[0].prompt_logprobs
    return CompletionDelta(
        last.index,
        text,
        last.finish_reason,
        tokens,
        logprobs,
        prompt_logprobs=prompt,
        prompt_tokens=deltas[0].prompt_tokens,
        tool_calls=merge_calls(call for delta in deltas for call in delta.tool_calls),
        stop_reason=last.stop_reason,
        reasoning="".join(delta.reasoning for delta in deltas),
    )


def _is_held_back(delta: CompletionDelta, request: CompletionRequest) -> bool:
    """Tokens that may be a part of a call, whose text is not known yet, or that have none."""
    has_news = delta.text or delta.reasoning or delta.tool_calls or delta.finish_reason or delta.logprobs is not None
    return not has_news and bool(request.messages or request.as_message) and not request.return_token_ids


def _token_ids(delta: CompletionDelta, request: CompletionRequest) -> tuple[int, ...]:
    return (*(delta.prompt_tokens or ()), *delta.tokens) if request.return_token_ids else ()


class _HeldCalls:
    """Calls of a stream for a dialect that has no parts of them: each choice gets its own with its last delta."""

    def __init__(self) -> None:
        self._held: dict[int, list[ToolCallDelta]] = defaultdict(list)

    def take(self, delta: CompletionDelta) -> CompletionDelta:
        """The delta as it is sent."""
        self._held[delta.index] += delta.tool_calls
        ready = () if delta.finish_reason is None else merge_calls(self._held.pop(delta.index))
        return replace(delta, tool_calls=ready)


def _choice(delta: CompletionDelta, request: CompletionRequest) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": delta.index,
        "text": delta.text,
        "logprobs": delta.logprobs,
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
    }
    if delta.reasoning:
        choice["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        choice["tool_calls"] = [call.as_openai() for call in merge_calls(delta.tool_calls)]
    if request.stream and request.include_usage and delta.num_accepted:
        choice["accepted_prediction_tokens"] = delta.num_accepted
    if delta.prompt_logprobs is not None:
        choice["prompt_logprobs"] = delta.prompt_logprobs
    if request.return_token_ids:
        choice["token_ids"] = list(delta.tokens)
        if delta.prompt_tokens is not None:
            choice["prompt_token_ids"] = list(delta.prompt_tokens)
    return choice


def _usage(usage: Usage | None) -> dict[str, Any]:
    usage = usage or Usage(0, 0)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted_tokens,
            "rejected_prediction_tokens": usage.draft_tokens - usage.accepted_tokens,
        },
    }
