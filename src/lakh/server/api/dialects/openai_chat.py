"""OpenAI's POST /v1/chat/completions, for models with a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lakh.server.api import schema
from lakh.server.api.dialects.dialect import Dialect, DialectResponse
from lakh.server.api.dialects.mistral import MISTRAL
from lakh.server.detokenizer import REPLACEMENT
from lakh.server.request import MAX_CHOICES, RequestError
from lakh.server.sampling.params import MAX_LOGPROBS, MAX_SEED, NO_LIMIT

__all__ = ["OPENAI_CHAT"]


def _to_openai(body: Mapping[str, Any]) -> dict[str, Any]:
    renamed = {name: value for name, value in body.items() if name not in ("prompt", "suffix")}
    newer = renamed.pop("max_completion_tokens", None)
    if renamed.get("max_tokens") is None:
        renamed["max_tokens"] = newer
    if renamed["max_tokens"] in (None, -1):  # -1: llama.cpp's clients
        renamed["max_tokens"] = NO_LIMIT
    renamed["logprobs"] = _num_logprobs(renamed.pop("logprobs", None), renamed.pop("top_logprobs", None))
    renamed["messages"] = [] if body.get("messages") is None else body["messages"]
    return renamed


def _num_logprobs(wanted: object, num_top: object) -> object:
    """The number of alternatives, which the older API calls logprobs; None for no log-probabilities."""
    if wanted is not None and not isinstance(wanted, bool):
        raise RequestError("logprobs", "logprobs: is not true or false; the number of alternatives is top_logprobs")
    if not wanted:
        if num_top:
            raise RequestError("top_logprobs", "top_logprobs: needs logprobs: true")
        return None
    return 0 if num_top is None else num_top


def _render(response: DialectResponse) -> dict[str, Any]:
    """Mistral's form, with calls of tools, log-probabilities, and vLLM's `stop_reason` and `reasoning_content`."""
    body = MISTRAL.render(response)
    for choice, found in zip(body["choices"], response.choices, strict=True):
        if not response.is_delta or found["finish_reason"] is not None:  # as vLLM: a stream has it at the end
            choice["stop_reason"] = found["stop_reason"]
        message = choice["delta" if response.is_delta else "message"]
        if found.get("reasoning_content"):
            message["reasoning_content"] = found["reasoning_content"]
        calls = found.get("tool_calls")
        if calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = calls if response.is_delta else [_without_index(call) for call in calls]
        if found["logprobs"] is not None:
            choice["logprobs"] = {"content": _chat_logprobs(found["logprobs"]), "refusal": None}
    return body


def _without_index(call: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name != "index"}


def _chat_logprobs(logprobs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A list of tokens, from the parallel lists of the older API."""
    found = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    return [
        {**_token(text, logprob), "top_logprobs": [_token(*one) for one in top.items()]} for text, logprob, top in found
    ]


def _token(text: str, logprob: float) -> dict[str, Any]:
    """The bytes of a partial character are not known."""
    return {"token": text, "logprob": logprob, "bytes": None if REPLACEMENT in text else list(text.encode())}


_FIELDS = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "min_tokens", "stop", "stream", "user", "model"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words"),
    *("stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
)

_MESSAGE = schema.object_of(
    {
        "role": schema.string(),
        "content": schema.nullable(schema.string()),
        "reasoning_content": schema.string(),
        "tool_calls": schema.array(schema.TOOL_CALL),
    },
    required=["role", "content"],
)

OPENAI_CHAT = Dialect(
    path="/v1/chat/completions",
    summary="OpenAI's chat",
    to_openai=_to_openai,
    render=_render,
    request_schema=schema.object_of(
        {
            **{name: value for name, value in schema.COMMON_FIELDS.items() if name in _FIELDS},
            "messages": schema.MESSAGES,
            **schema.TOOL_FIELDS,
            "add_generation_prompt": schema.nullable({"type": "boolean"}),
            "continue_final_message": schema.nullable({"type": "boolean"}),
            "chat_template_kwargs": schema.nullable({"type": "object"}),
            "reasoning_effort": schema.nullable(schema.string()),
            "max_completion_tokens": schema.integer(1),
            "n": schema.integer(1, MAX_CHOICES),
            **schema.STRUCTURED_FIELDS,
            "seed": schema.integer(0, MAX_SEED),
            "logprobs": schema.nullable({"type": "boolean"}),
            "top_logprobs": schema.integer(0, MAX_LOGPROBS),
        },
        required=["messages"],
    ),
    response_schema=schema.completion(schema.object_of({**schema.CHOICE, **schema.STOP_REASON, "message": _MESSAGE})),
)
