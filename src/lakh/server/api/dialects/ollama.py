"""Ollama's POST /api/generate (a prompt and a suffix) and POST /api/chat (messages, and tools), with sampling
`options`; both stream lines of JSON by default.

A prompt without a suffix is a message, after the `system` message and the `context` of an earlier answer, if the model
has a chat template; a `raw` prompt is a text that may contain special tokens, for clients that write a template
themselves. Templates of requests (Go's language) are refused. Defaults are Ollama's (temperature 0.8, top_k 40,
top_p 0.9), except that a text without `num_predict` is completed with at most 128 tokens.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Mapping
from typing import Any

from lakh.server.api import schema
from lakh.server.api.dialects.dialect import Dialect, DialectResponse
from lakh.server.backend import PhaseTimes
from lakh.server.request import RequestError
from lakh.server.sampling.params import MAX_SEED, NO_LIMIT
from lakh.server.tools.json_scanner import json_of

__all__ = ["OLLAMA_CHAT", "OLLAMA_GENERATE", "model_name"]

MAX_TOKENS = 128
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
_SAME_NAME = ("min_p", "presence_penalty", "frequency_penalty", "stop", "mirostat", "typical_p")
_REFUSED = ("images", "think")
ID_FORM = "call{:05}"  # nine letters and digits, as Mistral's templates demand them


def model_name(name: object) -> object:
    """Ollama appends a tag to every name."""
    return name.removesuffix(":latest") if isinstance(name, str) else name


def _common(body: Mapping[str, Any], most_tokens: int) -> dict[str, Any]:
    options = body.get("options") or {}
    if not isinstance(options, Mapping):
        raise RequestError("options", "options: is not an object")
    for name in _REFUSED:
        if body.get(name):
            raise RequestError(name, f"{name} is not supported; remove it")
    form = body.get("format") or None
    if form is not None and form != "json" and not isinstance(form, Mapping):
        raise RequestError("format", 'format: is neither "json" nor a JSON schema')
    max_tokens, seed = options.get("num_predict"), options.get("seed")
    if max_tokens is None or (type(max_tokens) is int and max_tokens <= 0):  # no limit
        max_tokens = most_tokens
    return {
        "model": model_name(body.get("model")),
        "max_tokens": max_tokens,
        **{name: default if options.get(name) is None else options[name] for name, default in DEFAULTS.items()},
        "repetition_penalty": options.get("repeat_penalty"),
        "seed": None if type(seed) is int and seed < 0 else seed,  # negative: a random one
        "guided_json": {"type": "object"} if form == "json" else form,
        **{name: options[name] for name in _SAME_NAME if options.get(name) is not None},
        "stream": True if body.get("stream") is None else body["stream"],
        "stream_options": {"include_usage": True},
    }


def _generate_to_openai(body: Mapping[str, Any]) -> dict[str, Any]:
    raw, suffix = body.get("raw"), body.get("suffix")
    if raw is not None and not isinstance(raw, bool):
        raise RequestError("raw", "raw: is not true or false")
    if not isinstance(body.get("prompt"), str | None):
        raise RequestError("prompt", "prompt: is not a string")
    if body.get("template"):
        found = "templates in a request are not supported; fill it in yourself and send the prompt with raw: true"
        raise RequestError("template", f"template: {found}")
    if body.get("tools"):
        raise RequestError("tools", "tools: are for messages; ask /api/chat")
    for name in ("system", "context"):
        if body.get(name) and (raw or suffix):
            raise RequestError(name, f"{name}: cannot be combined with {'raw' if raw else 'suffix'}")
    prompt = {"prompt": "" if body.get("prompt") is None else body["prompt"]}
    if suffix or (_ends_file(body) and not raw):
        return _common(body, MAX_TOKENS) | prompt | {"suffix": suffix}
    if raw:
        return _common(body, MAX_TOKENS) | prompt | {"parse_special": True}
    before = {"system": body.get("system"), "context": body.get("context")}
    return _common(body, NO_LIMIT) | prompt | before | {"as_message": True, "return_token_ids": True}


def _ends_file(body: Mapping[str, Any]) -> bool:
    """An empty suffix is the end of a file, from an editor. Ollama's own client sends all fields, also empty ones."""
    return body.get("suffix") == "" and "system" not in body


def _has_no_prompt(body: Mapping[str, Any]) -> bool:
    return body.get("prompt") in (None, "") and not body.get("suffix")


def _chat_to_openai(body: Mapping[str, Any]) -> dict[str, Any]:
    if _has_no_messages(body):
        return _common(body, NO_LIMIT) | {"prompt": ""}
    effort = body.get("think") or None
    if isinstance(effort, str):  # of GPT-OSS
        body = {name: value for name, value in body.items() if name != "think"}
    common = _common(body, NO_LIMIT) | {"reasoning_effort": effort}
    return common | {"messages": _messages(body["messages"]), "tools": body.get("tools")}


def _messages(messages: Any) -> Any:
    """In OpenAI's form. Ollama's calls have no ids: results answer them in their order."""
    if not isinstance(messages, list):
        return messages
    found: list[Any] = []
    num_calls, unanswered = 0, list[str]()
    for message in messages:
        new = dict(message) if isinstance(message, Mapping) else message
        if isinstance(new, dict) and isinstance(new.get("tool_calls"), list):
            calls = [_openai_call(call, ID_FORM.format(num_calls + at)) for at, call in enumerate(new["tool_calls"])]
            new["tool_calls"] = calls
            unanswered += [call["id"] for call in calls if isinstance(call, dict) and isinstance(call.get("id"), str)]
            num_calls += len(calls)
        elif isinstance(new, dict) and new.get("role") == "tool":
            if new.get("tool_call_id") is None and unanswered:
                new["tool_call_id"] = unanswered.pop(0)
            if new.get("name") is None:
                new["name"] = new.get("tool_name")
        found.append(new)
    return found


def _openai_call(call: Any, number: str) -> Any:
    """A call with its arguments as text. What is wrong in it stays and is refused later."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.dumps(arguments, ensure_ascii=False)
    return {"id": call.get("id") or number, "function": {"name": function.get("name"), "arguments": arguments}}


def _has_no_messages(body: Mapping[str, Any]) -> bool:
    return body.get("messages") in (None, [])


def _render_generate(response: DialectResponse) -> dict[str, Any]:
    context = {"context": list(response.token_ids)} if response.token_ids else {}
    return _render(response, {"response": _text(response), **_thinking(response)}) | context


def _render_chat(response: DialectResponse) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _text(response), **_thinking(response)}
    calls = [call["function"] for choice in response.choices for call in choice.get("tool_calls", ())]
    values = [(call["name"], json_of(call["arguments"])) for call in calls]
    if calls:  # one that max_tokens has cut off is left out
        message["tool_calls"] = [
            {"function": {"name": name, "arguments": value}} for name, value in values if isinstance(value, dict)
        ]
    return _render(response, {"message": message})


def _text(response: DialectResponse) -> str:
    return "".join(choice["text"] for choice in response.choices)


def _thinking(response: DialectResponse) -> dict[str, str]:
    text = "".join(choice.get("reasoning_content", "") for choice in response.choices)
    return {"thinking": text} if text else {}


def _render(response: DialectResponse, content: dict[str, Any]) -> dict[str, Any]:
    at = datetime.datetime.fromtimestamp(response.envelope["created"], datetime.UTC)
    result: dict[str, Any] = {
        "model": response.envelope["model"],
        "created_at": at.isoformat().replace("+00:00", "Z"),
        **content,
        "done": response.usage is not None,
    }
    if response.usage is not None:
        result |= {
            "done_reason": response.finish_reason if response.finish_reason in ("length", "load") else "stop",
            "prompt_eval_count": response.usage["prompt_tokens"],
            "eval_count": response.usage["completion_tokens"],
            **_durations(response.phases),
        }
    return result


def _durations(phases: PhaseTimes | None) -> dict[str, int]:
    """In nanoseconds; the total includes the time in the queue."""
    if phases is None:
        return {}
    total_s = phases.queue_s + phases.prefill_s + phases.decode_s
    found = {"total_duration": total_s, "prompt_eval_duration": phases.prefill_s, "eval_duration": phases.decode_s}
    return {"load_duration": 0, **{name: int(seconds * 1e9) for name, seconds in found.items()}}


_OPTIONS = schema.object_of(
    {
        "num_predict": schema.integer(-2),
        **{name: schema.COMMON_FIELDS[name] for name in (*DEFAULTS, "min_p", "stop")},
        "repeat_penalty": schema.COMMON_FIELDS["repetition_penalty"],
        "seed": schema.integer(-1, MAX_SEED),
    },
    required=(),
)

OLLAMA_GENERATE = Dialect(
    path="/api/generate",
    summary="Ollama's form",
    to_openai=_generate_to_openai,
    render=_render_generate,
    request_schema=schema.object_of(
        {
            "model": schema.string(),
            "prompt": schema.nullable(schema.string()),
            "suffix": schema.nullable(schema.string()),
            "stream": schema.nullable({"type": "boolean"}),
            "raw": schema.nullable({"type": "boolean"}),
            "system": schema.nullable(schema.string()),
            "context": schema.nullable({"type": "array", "items": {"type": "integer", "minimum": 0}}),
            "options": schema.nullable(_OPTIONS),
        },
        required=["model"],
    ),
    response_schema=schema.object_of(
        {"model": schema.string(), "response": schema.string(), "done": {"type": "boolean"}}
    ),
    last_line=None,
    framing="ndjson",
    only_loads=_has_no_prompt,
)

OLLAMA_CHAT = Dialect(
    path="/api/chat",
    summary="Ollama's chat",
    to_openai=_chat_to_openai,
    render=_render_chat,
    request_schema=schema.object_of(
        {
            "model": schema.string(),
            "messages": schema.nullable({**schema.OLLAMA_MESSAGES, "minItems": 0}),
            "tools": schema.TOOL_FIELDS["tools"],
            "think": schema.nullable({"anyOf": [schema.string(), {"const": False}]}),
            "stream": schema.nullable({"type": "boolean"}),
            "options": schema.nullable(_OPTIONS),
        },
        required=["model"],
    ),
    response_schema=schema.object_of(
        {"model": schema.string(), "message": {"type": "object"}, "done": {"type": "boolean"}}
    ),
    last_line=None,
    framing="ndjson",
    needs_whole_calls=True,
    only_loads=_has_no_messages,
)
