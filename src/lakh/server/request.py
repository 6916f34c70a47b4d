"""A completion request in OpenAI's form, validated.

Defaults are OpenAI's (max_tokens 16, temperature 1), because clients rely on them. A field of the wrong type or range
is an error that names the field; so is an unsupported field that would change the completion (UNSUPPORTED). All
other unknown fields are ignored, since clients send many.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lakh.errors import ConfigError
from lakh.server.fairness import Share
from lakh.server.prompts.chat_template import RESERVED_VARIABLES, ChatMessage
from lakh.server.prompts.extra_files import ExtraFile
from lakh.server.prompts.fim import Order
from lakh.server.sampling.params import MAX_BIAS, MAX_BIASED_IDS, MAX_LOGPROBS, NO_LIMIT, SamplingParams
from lakh.server.stopping import STOP_RULES
from lakh.server.structured.constraint import find_constraint
from lakh.server.tools.messages import read_messages
from lakh.server.tools.tool_use import ToolUse, read_tool_use

__all__ = ["CompletionRequest", "RequestError", "ServerStopping", "Superseded", "parse"]

MAX_CHOICES = 64
MAX_TIMEOUT_MS = 3_600_000
MAX_SALT_CHARS = 256
MAX_EXTRA = 256
MAX_PROMPT_LOGPROBS = 1 << 19  # of one request, with the alternatives: a JSON text of about 20 MB
# Fields of OpenAI, vLLM, SGLang and llama.cpp that would change the completion -> the values that mean "not used".
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "structural_tag": ("",),
    "logits_processors": ([],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "use_beam_search": (False,),
    "typical_p": (1,),
    "mirostat": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "n_probs": (0,),
    "top_n_sigma": (-1,),
    "dynatemp_range": (0,),
    **dict.fromkeys(("no_stop_trim",), (False,)),
    **dict.fromkeys(("skip_special_tokens", "add_special_tokens"), (True,)),
    **dict.fromkeys(("truncate_prompt_tokens", "chat_template"), ()),
}


_ID_TEXT = re.compile("0|[1-9][0-9]{0,8}")
_NUMBERS = (int, float)
_TYPES = {bool: (bool,), int: _NUMBERS, float: _NUMBERS, dict: (dict,), list: (list,), str: (str,)}  # a bool is no 1


@dataclass(eq=False)
class RequestError(Exception):
    """An error for the client, in OpenAI's form. Picklable: it crosses from the engine process."""

    param: str | None
    message: str
    status: int = 400
    code: str | None = None
    retry_after_s: float = 1.0
    """Sent with 429 and 503."""

    def __str__(self) -> str:
        return self.message

    def as_dict(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Superseded(RequestError):
    def __init__(self) -> None:
        super().__init__(None, "superseded by a newer request", status=409, code="superseded")


class ServerStopping(RequestError):
    def __init__(self) -> None:
        super().__init__(None, "the server is shutting down", status=503)


@dataclass(frozen=True)
class CompletionRequest:
    prompts: tuple[str | tuple[int, ...], ...]
    suffix: str | None
    """The text after the cursor; "" at the end of a file. With a suffix, a long prompt is cut to the context; without
    one (None) it is an error."""
    n: int
    sampling: SamplingParams
    stream: bool
    include_usage: bool
    model: str | None
    stop_rule: str | None = None
    """One of STOP_RULES: end by the structure of the code."""
    order: Order = "psm"
    """Order of prefix and suffix in the prompt."""
    timeout_s: float | None = None
    """The completion ends with what it has after this time."""
    generation_s: float | None = None
    """The same, this long after its first token, once it has a line break."""
    supersede: Hashable = None
    """A newer request with the same key (of the same tenant and user) cancels this one."""
    tenant: str = ""
    user: str = ""
    """The user that the request names, within the tenant."""
    cache_salt: str = ""
    """Only requests with the same salt share cached data."""
    reuse: bool = False
    """Accept the rest of an earlier suggestion whose beginning the user has typed."""
    return_token_ids: bool = False
    heal: bool = False
    """Token healing: the prompt may end inside a word."""
    extra: tuple[ExtraFile, ...] = ()
    """Other files, the most relevant last."""
    parse_special: bool = False
    """The prompt's text may contain special tokens."""
    messages: tuple[ChatMessage, ...] = ()
    """A conversation in place of the prompt, which is then empty."""
    as_message: bool = False
    """The prompt is what a user says, if the model has a chat template; else a text, as at the end of a file."""
    system: str = ""
    """A system message before it."""
    context_ids: tuple[int, ...] = ()
    """The ids of the conversation before it."""
    tools: ToolUse | None = None
    """What the answer to `messages` may call; None for a text."""
    add_generation_prompt: bool = True
    """The prompt of `messages` ends where the model's turn begins."""
    continue_final_message: bool = False
    """The completion goes on with the last of `messages`."""
    template_variables: str = ""
    """Further variables of the chat template, as JSON text; "" for none."""
    echo: bool = False
    """The prompt comes before the completion, with its log-probabilities if `sampling.logprobs` asks for any."""
    prompt_logprobs: int | None = None
    """vLLM's field: log-probabilities of the prompt in a list of their own, with this many top alternatives."""

    @property
    def cache_space(self) -> str:
        """The cache that this request reads and writes. Tenant names have no NUL, so no salt names another tenant."""
        return f"{self.tenant}\0{self.cache_salt}" if self.cache_salt else self.tenant

    @property
    def share(self) -> Share:
        return Share(self.tenant, self.cache_space)

    @property
    def num_chars(self) -> int:
        """Characters of all prompts (an id counts as one), the suffix and other files."""
        own = sum(len(prompt) for prompt in self.prompts) + len(self.suffix or "")
        said = sum(message.num_chars for message in self.messages)
        said += len(self.system) + len(self.context_ids)
        said += len(self.template_variables) + (0 if self.tools is None else len(self.tools.definitions))
        return own + said + sum(len(file.name) + len(file.text) for file in self.extra)

    def messages_of(self, prompt: str) -> tuple[ChatMessage, ...]:
        """A prompt as a message."""
        system = (ChatMessage("system", self.system),) if self.system else ()
        return (*system, ChatMessage("user", prompt))

    @property
    def num_echoed_chars(self) -> int:
        """Characters of prompts in all choices (an id counts as one): no new text."""
        return self.n * sum(len(prompt) for prompt in self.prompts) if self.echo else 0

    @property
    def max_tokens(self) -> int | None:
        """None if only the context limits it."""
        return None if self.sampling.max_tokens == NO_LIMIT else self.sampling.max_tokens

    @property
    def num_choices(self) -> int:
        return self.n * len(self.prompts)


def parse(data: object, tenant: str = "") -> CompletionRequest:
    if not isinstance(data, Mapping):
        raise RequestError(None, "the body is not a JSON object")
    for field, unused in UNSUPPORTED.items():
        value = data.get(field)
        if value is not None and not any(type(value) in _TYPES[type(one)] and value == one for one in unused):
            raise RequestError(field, f"{field} is not supported; remove it")
    try:
        messages, tools = read_messages(data.get("messages")), read_tool_use(data)
    except ConfigError as error:
        raise RequestError(error.where, str(error)) from None
    if tools is not None and not messages:
        raise RequestError("tools", "tools: are for messages; ask /v1/chat/completions")
    expects_answer, continues = _turn(data, has_messages=bool(messages))
    prompts = _prompts("" if messages else data.get("prompt"))
    n = _take(data, "n", int, 1)
    if not 1 <= n <= MAX_CHOICES or n * len(prompts) > MAX_CHOICES:
        raise RequestError(
            "n", f"{len(prompts)} prompts x n = {reprlib.repr(n)} is not from 1 to {MAX_CHOICES} completions"
        )
    suffix = _take(data, "suffix", str, None)
    if suffix is not None and not all(isinstance(prompt, str) for prompt in prompts):
        raise RequestError("suffix", "suffix needs prompts of text, not of token ids")
    extra, parse_special = _extra(data), _take(data, "parse_special", bool, False)
    heal = _take(data, "heal", bool, False)
    if parse_special and (suffix is not None or extra or heal):
        message = "parse_special: the prompt's own special tokens cannot be combined with suffix, input_extra or heal"
        raise RequestError("parse_special", message)
    if messages and (suffix is not None or extra or heal or parse_special or data.get("prompt") is not None):
        raise RequestError("messages", "messages cannot be combined with prompt, suffix, input_extra or heal")
    if extra and not all(isinstance(prompt, str) for prompt in prompts):
        raise RequestError("input_extra", "input_extra needs prompts of text, not of token ids")
    options = data.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise RequestError("stream_options", f"stream_options: {reprlib.repr(options)} is not an object")
    salt = _take(data, "cache_salt", str, "")
    if len(salt) > MAX_SALT_CHARS:
        raise RequestError("cache_salt", f"cache_salt: has {len(salt)} characters; at most {MAX_SALT_CHARS}")
    as_message = _take(data, "as_message", bool, False)
    system, context_ids = _before_message(data) if as_message else ("", ())
    if as_message and (messages or suffix is not None or extra or heal or parse_special or len(prompts) > 1):
        raise RequestError("as_message", "as_message: is for one prompt, without suffix, input_extra or heal")
    if as_message and not isinstance(prompts[0], str):
        raise RequestError("prompt", "prompt: is not a string, and it is a message (as_message)")
    echo, prompt_logprobs = _take(data, "echo", bool, False), _take(data, "prompt_logprobs", int, None)
    if prompt_logprobs is not None and not 0 <= prompt_logprobs <= MAX_LOGPROBS:
        found = f"{reprlib.repr(prompt_logprobs)} is not from 0 to {MAX_LOGPROBS}"
        raise RequestError("prompt_logprobs", f"prompt_logprobs: {found}")
    for field, is_used in (("echo", echo), ("prompt_logprobs", prompt_logprobs is not None)):
        if is_used and (messages or as_message or suffix is not None or extra or heal):
            raise RequestError(field, f"{field}: cannot be combined with messages, suffix, input_extra or heal")
    sampling = _sampling(data, echo=echo)
    if heal and sampling.structured_outputs is not None:
        message = f"heal: cannot be combined with {sampling.structured_outputs.field}"
        raise RequestError("heal", message)
    if tools is not None and sampling.structured_outputs is not None:
        raise RequestError("tools", f"tools: cannot be combined with {sampling.structured_outputs.field}")
    if tools is not None and tools.has_grammar and sampling.min_tokens:
        message = "min_tokens: cannot be combined with strict tools, nor with a tool_choice that demands a call"
        raise RequestError("min_tokens", message)
    user, supersede = _take(data, "user", str, ""), _take(data, "supersede", str, None)
    return CompletionRequest(
        prompts=prompts,
        suffix=suffix,
        n=n,
        sampling=sampling,
        stream=_take(data, "stream", bool, False),
        include_usage=_take(options, "include_usage", bool, False),
        model=_take(data, "model", str, None) or None,  # clients that do not know one send an empty name
        stop_rule=_one_of(data, "stop_rule", STOP_RULES, None),
        order=_one_of(data, "order", ("psm", "spm"), "psm"),
        timeout_s=_milliseconds(data, "timeout_ms"),
        generation_s=_milliseconds(data, "generation_ms"),
        supersede=None if supersede is None else (tenant, user, supersede),
        tenant=tenant,
        user=user,
        cache_salt=salt,
        reuse=_take(data, "reuse", bool, supersede is not None),
        return_token_ids=_take(data, "return_token_ids", bool, False),
        heal=heal,
        extra=extra,
        parse_special=parse_special,
        messages=messages,
        as_message=as_message,
        system=system,
        context_ids=context_ids,
        tools=tools,
        add_generation_prompt=expects_answer,
        continue_final_message=continues,
        template_variables=_template_variables(data, has_messages=bool(messages)),
        echo=echo,
        prompt_logprobs=prompt_logprobs,
    )


def _sampling(data: Mapping[str, Any], *, echo: bool) -> SamplingParams:
    max_tokens, logprobs = _take(data, "max_tokens", int, 16), _take(data, "logprobs", int, None)
    of_prompt = [_take(data, "prompt_logprobs", int, None), logprobs if echo else None]
    if echo and max_tokens == 0:
        of_prompt.append(0)  # nothing is left to do but to compute the prompt
    stop = data.get("stop")
    if stop is None or isinstance(stop, list):
        stop = tuple(stop or ())
    elif isinstance(stop, str):
        stop = (stop,)
    allowed = data.get("allowed_token_ids")
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=_take(data, "temperature", float, 1.0),
            top_p=_take(data, "top_p", float, 1.0),
            top_k=0 if data.get("top_k") == -1 else _take(data, "top_k", int, 0),  # vLLM's and llama.cpp's "no limit"
            min_p=_take(data, "min_p", float, 0.0),
            min_tokens=_take(data, "min_tokens", int, 0),
            repetition_penalty=_take(data, "repetition_penalty", float, 1.0),
            presence_penalty=_take(data, "presence_penalty", float, 0.0),
            frequency_penalty=_take(data, "frequency_penalty", float, 0.0),
            seed=_take(data, "seed", int, None),
            stop=stop,
            stop_token_ids=_tuple_of(data.get("stop_token_ids")),
            include_stop_str_in_output=_take(data, "include_stop_str_in_output", bool, False),
            ignore_eos=_take(data, "ignore_eos", bool, False),
            logit_bias=_logit_bias(data.get("logit_bias")),
            allowed_token_ids=None if allowed is None else _tuple_of(allowed),
            bad_words=_tuple_of(data.get("bad_words")),
            logprobs=logprobs,
            prompt_logprobs=max((count for count in of_prompt if count is not None), default=None),
            structured_outputs=find_constraint(data),
        )
    except ConfigError as error:
        raise RequestError(error.where, str(error)) from None


def _tuple_of(value: Any) -> Any:
    """A list as a tuple, nothing as an empty one; SamplingParams checks what it holds."""
    return tuple(value) if isinstance(value, list) else value or ()


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    """OpenAI's form: ids as texts of digits, each with its bias."""
    if value is None or value == []:  # llama.cpp's neutral value
        return ()
    form = 'logit_bias: is not an object such as {"50256": -100}: ids as texts, and numbers'
    if not isinstance(value, Mapping) or len(value) > MAX_BIASED_IDS:
        more = "" if not isinstance(value, Mapping) else f" of at most {MAX_BIASED_IDS} ids"
        raise RequestError("logit_bias", form + more)
    found: dict[int, float] = {}
    for key, bias in value.items():
        if not _ID_TEXT.fullmatch(key) or isinstance(bias, bool) or not isinstance(bias, int | float):
            raise RequestError("logit_bias", form)
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            found_text = f"{reprlib.repr(bias)} is not from {-MAX_BIAS} to {MAX_BIAS}"
            raise RequestError("logit_bias", f"logit_bias: {found_text}")
        found[int(key)] = float(bias)
    return tuple(sorted(found.items()))


def _extra(data: Mapping[str, Any]) -> tuple[ExtraFile, ...]:
    files = data.get("input_extra") or []
    if not isinstance(files, list) or len(files) > MAX_EXTRA:
        raise RequestError("input_extra", f"input_extra: is not a list of at most {MAX_EXTRA} files")
    found = []
    for file in files:
        text = file.get("text") if isinstance(file, Mapping) else None
        name = (file.get("filename") or "") if isinstance(file, Mapping) else ""
        if not isinstance(text, str) or not isinstance(name, str):
            raise RequestError("input_extra", 'input_extra: a file is {"filename": "a.py", "text": "..."}')
        found.append(ExtraFile(name, text))
    return tuple(found)


def _turn(data: Mapping[str, Any], *, has_messages: bool) -> tuple[bool, bool]:
    """vLLM's add_generation_prompt and continue_final_message."""
    expects_answer = _take(data, "add_generation_prompt", bool, True)
    continues = _take(data, "continue_final_message", bool, False)
    for name, is_used in (("add_generation_prompt", not expects_answer), ("continue_final_message", continues)):
        if is_used and not has_messages:
            raise RequestError(name, f"{name}: is for messages; ask /v1/chat/completions")
    if continues and expects_answer:
        message = "continue_final_message: needs add_generation_prompt: false; the two exclude each other"
        raise RequestError("continue_final_message", message)
    return expects_answer, continues


def _template_variables(data: Mapping[str, Any], *, has_messages: bool) -> str:
    """vLLM's and llama.cpp's chat_template_kwargs, and OpenAI's reasoning_effort, which is one of them."""
    field = "chat_template_kwargs"
    variables = data.get(field)
    if variables is None:
        variables = {}
    if not isinstance(variables, Mapping):
        raise RequestError(field, f"{field}: {reprlib.repr(variables)} is not an object")
    effort = _take(data, "reasoning_effort", str, None) if has_messages else None
    if effort is not None:
        variables = {"reasoning_effort": effort, **variables}
    if not variables:
        return ""
    if not has_messages:
        raise RequestError(field, f"{field}: is for messages; ask /v1/chat/completions")
    for name in variables:
        if name in RESERVED_VARIABLES or not name.isidentifier():
            raise RequestError(field, f"{field}: {reprlib.repr(name)} is not a variable that a request may set")
    try:
        return json.dumps(variables, sort_keys=True)
    except RecursionError:
        raise RequestError(field, f"{field}: is nested too deeply") from None


def _before_message(data: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """The system message, and the ids of an earlier conversation."""
    ids = data.get("context") or []
    if not isinstance(ids, list) or (ids and not _are_ids(ids)):
        raise RequestError("context", f"context: {reprlib.repr(ids)} is not a list of token ids")
    return _take(data, "system", str, ""), tuple(ids)


def _one_of(data: Mapping[str, Any], field: str, known: Sequence[str], default: Any) -> Any:
    value = _take(data, field, str, default)
    if value is not default and value not in known:
        raise RequestError(field, f"{field}: {reprlib.repr(value)} is none of {', '.join(known)}")
    return value


def _milliseconds(data: Mapping[str, Any], field: str) -> float | None:
    """In seconds."""
    value: float | None = _take(data, field, float, None)
    if value is not None and not 0 < value <= MAX_TIMEOUT_MS:  # NaN compares false and is refused too
        raise RequestError(field, f"{field}: {reprlib.repr(value)} is not from 0 to {MAX_TIMEOUT_MS}")
    return None if value is None else value / 1000


def _take(data: Mapping[str, Any], field: str, kind: type, default: Any) -> Any:
    """The field's value; `default` if it is absent or null."""
    value = data.get(field)
    if value is None:
        return default
    if kind is float and type(value) is int and abs(value) < 2**53:
        return float(value)
    if type(value) is not kind:
        names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
        raise RequestError(field, f"{field}: {reprlib.repr(value)} is not {names[kind]}")
    return value


def _prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    """A string, a list of strings, a list of token ids, or a list of such lists."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if _are_ids(value):
            return (tuple(value),)
        if all(isinstance(item, list) and _are_ids(item) for item in value):
            return tuple(tuple(item) for item in value)
    found = "is missing" if value is None else f"{reprlib.repr(value)} is not a string or a list of strings"
    raise RequestError("prompt", f"prompt: {found}")


def _are_ids(value: list[Any]) -> bool:
    return bool(value) and all(type(item) is int for item in value)
