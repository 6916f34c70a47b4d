"""OpenAI's POST /v1/chat/completions, for models with a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lakh.server.api import schema
from lakh.server.api.dialects.dialect import Dialect
from lakh.server.api.dialects.mistral import MISTRAL
from lakh.server.request import MAX_CHOICES, RequestError
from lakh.server.sampling_params import MAX_SEED

__all__ = ["OPENAI_CHAT"]

MAX_TOKENS = 256  # OpenAI's chat has no limit of its own


def _to_openai(body: Mapping[str, Any]) -> dict[str, Any]:
    renamed = {name: value for name, value in body.items() if name not in ("prompt", "suffix")}
    newer = renamed.pop("max_completion_tokens", None)
    if renamed.get("max_tokens") is None:
        renamed["max_tokens"] = MAX_TOKENS if newer is None else newer
    if renamed.pop("logprobs", None) or renamed.pop("top_logprobs", None):
        raise RequestError("logprobs", "logprobs is not supported in chats; remove it")
    renamed["messages"] = [] if body.get("messages") is None else body["messages"]
    return renamed


_FIELDS = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "min_tokens", "stop", "stream", "user", "model"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)

OPENAI_CHAT = Dialect(
    path="/v1/chat/completions",
    summary="OpenAI's chat",
    to_openai=_to_openai,
    render=MISTRAL.render,  # the same form
    request_schema=schema.object_of(
        {
            **{name: value for name, value in schema.COMMON_FIELDS.items() if name in _FIELDS},
            "messages": schema.MESSAGES,
            "max_completion_tokens": schema.integer(1),
            "n": schema.integer(1, MAX_CHOICES),
            **schema.STRUCTURED_FIELDS,
            "seed": schema.integer(0, MAX_SEED),
        },
        required=["messages"],
    ),
    response_schema=MISTRAL.response_schema,
)
