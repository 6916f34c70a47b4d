"""Mistral's POST /v1/fim/completions: prompt and suffix; responds in the form of a chat message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lakh.server.api import schema
from lakh.server.api.dialects.dialect import Dialect, DialectResponse
from lakh.server.sampling.params import MAX_SEED

__all__ = ["MISTRAL"]

_MESSAGE = schema.object_of({"role": schema.string(), "content": schema.string()})


def _to_openai(body: Mapping[str, Any]) -> dict[str, Any]:
    renamed = dict(body)
    if "random_seed" in renamed:
        renamed["seed"] = renamed.pop("random_seed")
    renamed.setdefault("max_tokens", 64)
    if renamed.get("suffix") is None:  # the end of a file: a long prompt is cut to the context
        renamed["suffix"] = ""
    return renamed


def _render(response: DialectResponse) -> dict[str, Any]:
    field, kind = ("delta", "chat.completion.chunk") if response.is_delta else ("message", "chat.completion")
    # Once per choice of a stream: clients concatenate the texts of all deltas, the role's too.
    role = {} if response.is_delta and not response.is_first else {"role": "assistant"}
    choices = [
        {
            "index": choice["index"],
            field: {**role, "content": choice["text"]},
            "finish_reason": choice["finish_reason"],
        }
        for choice in response.choices
    ]
    usage = {} if response.usage is None else {"usage": response.usage}
    return {**response.envelope, "object": kind, "choices": choices, **usage}


MISTRAL = Dialect(
    path="/v1/fim/completions",
    summary="Mistral's form",
    to_openai=_to_openai,
    render=_render,
    request_schema=schema.object_of(
        {**schema.COMMON_FIELDS, "random_seed": schema.integer(0, MAX_SEED)}, required=["prompt"]
    ),
    response_schema=schema.completion(schema.object_of({**schema.CHOICE, "message": _MESSAGE})),
)
