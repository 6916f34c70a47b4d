"""OpenAI's POST /v1/completions, which most libraries use."""

from __future__ import annotations

from typing import Any

from lakh.server.api.dialects.dialect import Dialect, DialectResponse
from lakh.server.api.schema import (
    ENVELOPE,
    EXTENSION_FIELDS,
    FINISH_REASON,
    PROMPT_FIELDS,
    SAMPLING_FIELDS,
    USAGE,
    array,
    integer,
    nullable,
    object_of,
    string,
)
from lakh.server.request import MAX_CHOICES
from lakh.server.sampling_params import MAX_LOGPROBS, MAX_SEED

__all__ = ["OPENAI"]

_IDS = array({"type": "integer", "minimum": 0})
_PROMPT = {"anyOf": [string(), array(string(), MAX_CHOICES), _IDS, array(_IDS)]}
_CHOICE = object_of(
    {
        "index": {"type": "integer"},
        "text": string(),
        "logprobs": nullable({"type": "object"}),
        "finish_reason": FINISH_REASON,
    },
    required=["index", "text", "logprobs", "finish_reason"],
)


def _render(response: DialectResponse) -> dict[str, Any]:
    usage = {} if response.usage is None and response.is_delta else {"usage": response.usage}
    return {**response.envelope, "choices": response.choices, **usage}


OPENAI = Dialect(
    path="/v1/completions",
    summary="OpenAI's form, with the text after the cursor as suffix",
    to_openai=dict,
    render=_render,
    request_schema=object_of(
        {
            **PROMPT_FIELDS,
            "prompt": _PROMPT,
            "n": integer(1, MAX_CHOICES),
            "seed": integer(0, MAX_SEED),
            "logprobs": integer(0, MAX_LOGPROBS),
            "stream_options": nullable({"type": "object"}),
            "return_token_ids": nullable({"type": "boolean"}),
            **SAMPLING_FIELDS,
            **EXTENSION_FIELDS,
        },
        required=["prompt"],
    ),
    response_schema=object_of(
        {"id": string(), "model": string(), "choices": {"type": "array", "items": _CHOICE}, "usage": USAGE},
        required=[*ENVELOPE, "choices", "usage"],
    ),
)
