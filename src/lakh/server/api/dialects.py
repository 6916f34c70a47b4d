"""Three ways in which clients ask for a completion, over one handler.

    OPENAI      POST /v1/completions        text_completion; what most libraries speak
    MISTRAL     POST /v1/fim/completions    prompt and suffix; answers in the form of a chat message
    LLAMA_CPP   POST /infill                input_prefix and input_suffix; what llama.vim and llama.vscode speak

A dialect turns a body into OpenAI's field names, and an answer or a piece of one into its own form. Unknown fields are
ignored as in requests.py. Pure functions of JSON values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lakh.server.request import RequestError

__all__ = ["DIALECTS", "DialectResponse", "Dialect"]


@dataclass(frozen=True)
class DialectResponse:
    """A whole answer, or a piece of one, before it takes a dialect's form."""

    frame: dict[str, Any]
    """id, object, created, model"""
    choices: list[dict[str, Any]]
    usage: dict[str, Any] | None
    is_piece: bool


@dataclass(frozen=True)
class Dialect:
    path: str
    to_openai: Callable[[Mapping[str, Any]], dict[str, Any]]
    render: Callable[[DialectResponse], dict[str, Any]]
    last_line: str | None
    """What ends a stream."""


def _same(body: Mapping[str, Any]) -> dict[str, Any]:
    return dict(body)


def _openai(answer: DialectResponse) -> dict[str, Any]:
    usage = {} if answer.usage is None and answer.is_piece else {"usage": answer.usage}
    return {**answer.frame, "choices": answer.choices, **usage}


def _from_mistral(body: Mapping[str, Any]) -> dict[str, Any]:
    renamed = dict(body)
    if "random_seed" in renamed:
        renamed["seed"] = renamed.pop("random_seed")
    renamed.setdefault("max_tokens", 64)
    return renamed


def _mistral(answer: DialectResponse) -> dict[str, Any]:
    word, kind = ("delta", "chat.completion.chunk") if answer.is_piece else ("message", "chat.completion")
    choices = [
        {
            "index": choice["index"],
            word: {"role": "assistant", "content": choice["text"]},
            "finish_reason": choice["finish_reason"],
        }
        for choice in answer.choices
    ]
    usage = {} if answer.usage is None else {"usage": answer.usage}
    return {**answer.frame, "object": kind, "choices": choices, **usage}


def _from_llama_cpp(body: Mapping[str, Any]) -> dict[str, Any]:
    """llama.cpp's defaults: temperature 0.8, no limit but the context (64 tokens here), seed -1 for none."""
    prefix = body.get("input_prefix", "")
    extra = body.get("prompt") or ""  # what stands after the prefix: the line up to the cursor
    for name, value in (("input_prefix", prefix), ("prompt", extra)):
        if not isinstance(value, str):
            raise RequestError(name, f"{name}: is not a string")
    renamed = {
        "prompt": prefix + extra,
        "suffix": body.get("input_suffix"),
        "max_tokens": body.get("n_predict"),
        "temperature": body.get("temperature", 0.8),
        "seed": body.get("seed"),
        "timeout_ms": body.get("t_max_predict_ms") or None,
        **{name: body[name] for name in ("top_p", "top_k", "stop", "stream", "order", "stop_rule") if name in body},
        **{name: body[name] for name in ("supersede", "user", "heal") if name in body},
    }
    if renamed["max_tokens"] in (None, -1):
        renamed["max_tokens"] = 64
    if type(renamed["max_tokens"]) is int and renamed["max_tokens"] == 0:  # only to have the prompt in the cache
        renamed["max_tokens"] = 1
    if renamed["seed"] == -1:
        renamed["seed"] = None
    return renamed


def _llama_cpp(answer: DialectResponse) -> dict[str, Any]:
    if not answer.choices:
        return {"content": "", "stop": True}
    choice = answer.choices[0]
    reason = choice["finish_reason"]
    result: dict[str, Any] = {"index": 0, "content": choice["text"], "stop": reason is not None}
    if reason is not None:
        result |= {"model": answer.frame["model"], "stop_type": {"stop": "eos", "length": "limit"}.get(reason, "none")}
        result["truncated"] = False  # of the context: prompts are cut to leave room
    if answer.usage is not None:
        result["tokens_predicted"] = answer.usage["completion_tokens"]
        result["tokens_evaluated"] = answer.usage["prompt_tokens"]
        result["tokens_cached"] = answer.usage["prompt_tokens_details"]["cached_tokens"]
    return result


DIALECTS = (
    Dialect("/v1/completions", _same, _openai, "[DONE]"),
    Dialect("/v1/fim/completions", _from_mistral, _mistral, "[DONE]"),
    Dialect("/infill", _from_llama_cpp, _llama_cpp, None),
)
