"""llama.cpp's POST /infill: input_prefix and input_suffix, for llama.vim and llama.vscode.

Defaults are llama.cpp's (temperature 0.8, top_k 40, top_p 0.95, min_p 0.05, seed -1 for a random one), except that a
completion without `n_predict` has at most 64 tokens. `n_indent` ends it as stop_rule "block": at a line indented less
than the cursor's, or at a blank one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lakh.server.api import schema
from lakh.server.api.dialects.dialect import Dialect, DialectResponse
from lakh.server.request import MAX_TIMEOUT_MS, RequestError
from lakh.server.sampling.params import MAX_SEED

__all__ = ["LLAMA_CPP"]

_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
_SAME_NAME = (
    *("presence_penalty", "frequency_penalty", "stop", "stream", "input_extra", "ignore_eos", "logit_bias"),
    *("order", "stop_rule", "supersede", "user", "heal"),
)
_FORMS = ("grammar", "json_schema")
_REFUSED = (
    *("mirostat", "typical_p"),
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
        **{name: default if body.get(name) is None else body[name] for name, default in _DEFAULTS.items()},
        "seed": body.get("seed"),
        "generation_ms": body.get("t_max_predict_ms") or None,
        "repetition_penalty": body.get("repeat_penalty"),
        "stream_options": {"include_usage": True},
        **{name: body[name] for name in (*_SAME_NAME, *_FORMS, *_REFUSED) if name in body},
    }
    if renamed["max_tokens"] in (None, -1):
        renamed["max_tokens"] = 64
    if type(renamed["max_tokens"]) is int and renamed["max_tokens"] == 0:  # only fills the prefix cache
        renamed["max_tokens"] = 1
    if renamed["seed"] == -1:
        renamed["seed"] = None
    indent = body.get("n_indent")
    if indent is not None and type(indent) is not int:
        raise RequestError("n_indent", "n_indent: is not a whole number")
    if indent is not None and indent > 0 and renamed.get("stop_rule") is None:
        renamed["stop_rule"] = "block"
    return renamed


def _render(response: DialectResponse) -> dict[str, Any]:
    text = "".join(choice["text"] for choice in response.choices)
    result: dict[str, Any] = {"index": 0, "content": text, "stop": response.usage is not None}
    if response.usage is not None:
        num_prompt, num_new = response.usage["prompt_tokens"], response.usage["completion_tokens"]
        num_cached = response.usage["prompt_tokens_details"]["cached_tokens"]
        result |= {
            "model": response.envelope["model"],
            "stop_type": "eos" if response.finish_reason == "stop" else "limit",
            "truncated": False,  # prompts are cut to leave room in the context
            "tokens_predicted": num_new,
            "tokens_evaluated": num_prompt,
            "tokens_cached": num_cached,
        }
        if response.phases is not None:
            result["timings"] = {
                "cache_n": num_cached,
                **_timing("prompt", num_prompt - num_cached, response.phases.prefill_s),
                **_timing("predicted", num_new, response.phases.decode_s),
            }
    return result


def _timing(what: str, number: int, seconds: float) -> dict[str, float]:
    per_token_ms = seconds * 1e3 / number if number else 0.0
    rate = number / seconds if seconds else 0.0
    return {
        f"{what}_n": number,
        f"{what}_ms": seconds * 1e3,
        f"{what}_per_token_ms": per_token_ms,
        f"{what}_per_second": rate,
    }


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
            "n_indent": schema.integer(0),
            "t_max_predict_ms": schema.nullable({"type": "number", "minimum": 0, "maximum": MAX_TIMEOUT_MS}),
            **{name: schema.COMMON_FIELDS[name] for name in (*_DEFAULTS, *_SAME_NAME)},
            "grammar": schema.nullable(schema.string()),
            "json_schema": schema.nullable({"type": "object"}),
        },
        required=(),
    ),
    response_schema=schema.object_of({"content": schema.string(), "stop": {"type": "boolean"}}),
    last_line=None,
)
