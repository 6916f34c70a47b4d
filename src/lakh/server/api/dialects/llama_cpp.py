"""llama.cpp's POST /infill: input_prefix and input_suffix, for llama.vim and llama.vscode.

Defaults are llama.cpp's: temperature 0.8, no limit but the context (64 tokens here), seed -1 for a random one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lakh.server.api import schema
from lakh.server.api.dialects.dialect import Dialect, DialectResponse
from lakh.server.request import MAX_TIMEOUT_MS, RequestError
from lakh.server.sampling_params import MAX_SEED

__all__ = ["LLAMA_CPP"]

_SAME_NAME = (
    *("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "stop", "stream", "input_extra"),
    *("order", "stop_rule", "supersede", "user", "heal"),
)
_FORMS = ("grammar", "json_schema")
_REFUSED = (
    *("logit_bias", "mirostat", "typical_p"),
    *("xtc_probability", "dry_multiplier", "n_probs"),
)


def _to_openai(body: Mapping[str, Any]) -> dict[str, Any]:
    prefix = body.get("input_prefix", "")
    line = body.get("prompt") or ""  # follows the prefix: the line up to the cursor
    for name, value in (("input_prefix", prefix), ("prompt", line)):
        if not isinstance(value, str):
            raise RequestError(name, f"{name}: is not a string")
    renamed = {
        "prompt": prefix + line,
        "suffix": "" if (suffix := body.get("input_suffix")) is None else suffix,
        "max_tokens": body.get("n_predict"),
        "temperature": body.get("temperature", 0.8),
        "seed": body.get("seed"),
        "timeout_ms": body.get("t_max_predict_ms") or None,
        "repetition_penalty": body.get("repeat_penalty"),
        **{name: body[name] for name in (*_SAME_NAME, *_FORMS, *_REFUSED) if name in body},
    }
    if renamed["max_tokens"] in (None, -1):
        renamed["max_tokens"] = 64
    if type(renamed["max_tokens"]) is int and renamed["max_tokens"] == 0:  # only fills the prefix cache
        renamed["max_tokens"] = 1
    if renamed["seed"] == -1:
        renamed["seed"] = None
    return renamed


def _render(response: DialectResponse) -> dict[str, Any]:
    if not response.choices:
        return {"content": "", "stop": True}
    choice = response.choices[0]
    reason = choice["finish_reason"]
    result: dict[str, Any] = {"index": 0, "content": choice["text"], "stop": reason is not None}
    if reason is not None:
        stop_type = {"stop": "eos", "length": "limit"}.get(reason, "none")
        result |= {"model": response.envelope["model"], "stop_type": stop_type}
        result["truncated"] = False  # prompts are cut to leave room in the context
    if response.usage is not None:
        result["tokens_predicted"] = response.usage["completion_tokens"]
        result["tokens_evaluated"] = response.usage["prompt_tokens"]
        result["tokens_cached"] = response.usage["prompt_tokens_details"]["cached_tokens"]
    return result


LLAMA_CPP = Dialect(
    path="/infill",
    summary="llama.cpp's form",
    to_openai=_to_openai,
    render=_render,
    request_schema=schema.object_of(
        {
            "input_prefix": schema.string(),
            "input_suffix": schema.nullable(schema.string()),
            "prompt": schema.nullable(schema.string()),
            "n_predict": schema.integer(-1),
            "seed": schema.integer(-1, MAX_SEED),
            "t_max_predict_ms": schema.nullable({"type": "number", "minimum": 0, "maximum": MAX_TIMEOUT_MS}),
            **{name: schema.COMMON_FIELDS[name] for name in ("temperature", *_SAME_NAME)},
            "grammar": schema.nullable(schema.string()),
            "json_schema": schema.nullable({"type": "object"}),
        },
        required=(),
    ),
    response_schema=schema.object_of({"content": schema.string(), "stop": {"type": "boolean"}}),
    last_line=None,
)
