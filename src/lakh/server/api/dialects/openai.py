"""OpenAI's POST /v1/completions, which most libraries use."""

from __future__ import annotations

from typing import Any

from lakh.server.api import schema
from lakh.server.api.dialects.dialect import Dialect, DialectResponse
from lakh.server.request import MAX_CHOICES
from lakh.server.sampling.params import MAX_LOGPROBS, MAX_SEED

__all__ = ["OPENAI"]

_IDS = schema.array({"type": "integer", "minimum": 0})
_PROMPT = {"anyOf": [schema.string(), schema.array(schema.string(), MAX_CHOICES), _IDS, schema.array(_IDS)]}
_CHOICE = schema.object_of(
    {
        **schema.CHOICE,
        **schema.STOP_REASON,
        "text": schema.string(),
        "logprobs": schema.nullable({"type": "object"}),
    }
)


def _render(response: DialectResponse) -> dict[str, Any]:
    usage = {} if response.usage is None and response.is_delta else {"usage": response.usage}
    return {**response.envelope, "choices": response.choices, **usage}


OPENAI = Dialect(
    path="/v1/completions",
    summary="OpenAI's form, with the text after the cursor as suffix",
    to_openai=dict,
    render=_render,
    request_schema=schema.object_of(
        {
            **schema.COMMON_FIELDS,
            "prompt": _PROMPT,
            "max_tokens": schema.integer(0),
            "echo": schema.nullable({"type": "boolean"}),
            "prompt_logprobs": schema.integer(0, MAX_LOGPROBS),
            "n": schema.integer(1, MAX_CHOICES),
            **schema.STRUCTURED_FIELDS,
            "seed": schema.integer(0, MAX_SEED),
            "logprobs": schema.integer(0, MAX_LOGPROBS),
            "stream_options": schema.nullable({"type": "object"}),
            "return_token_ids": schema.nullable({"type": "boolean"}),
        },
        required=["prompt"],
    ),
    response_schema=schema.completion(_CHOICE),
)
