"""Requests as sequences of the engine: their prompts are tokenized and their lengths checked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from lakh.server.engine import Engine
from lakh.server.prompts.chat_template import ChatMessage
from lakh.server.prompts.encoder import MAX_CHARS_PER_TOKEN
from lakh.server.prompts.incremental_tokenizer import EncodeOptions, TooMuchNewText
from lakh.server.prompts.token_healing import HealedPrompt
from lakh.server.request import MAX_PROMPT_LOGPROBS, CompletionRequest, RequestError
from lakh.server.sampling.logits_processor import LogitsProcessor
from lakh.server.sampling.params import NO_LIMIT, SamplingParams
from lakh.server.sampling.prompt_logprobs import PromptLogprobs
from lakh.server.sequence import Sequence
from lakh.server.stopping import TextEnd, stop_rule_for
from lakh.server.tools.answer import AnswerParser, FirstCallEnd, make_parser
from lakh.server.tools.forms import ToolForm

__all__ = ["make_answer_parser", "make_sequences"]

MAX_LOOKUP_CHARS = 1 << 16  # longer requests are always tokenized in a thread
PLAIN_TOKENS = 128  # of a message that is completed as a text, where the request has no limit


def make_sequences(
    engine: Engine, request: CompletionRequest, now_s: float, max_new_chars: int | None = None
) -> list[Sequence]:
    """Tokenize a request, check its length and make one sequence per choice.

    Raises TooMuchNewText for more than `max_new_chars` uncached characters. `now_s`: when the request arrived, on the
    engine's clock; its timeout starts then.
    """
    if max_new_chars is not None and request.num_chars > MAX_LOOKUP_CHARS:
        raise TooMuchNewText
    sampling, prompts = request.sampling, engine.prompts
    form = _answer_form(engine, request)
    shown = {} if form is None else prompts.form_tokens(form)
    constraint = sampling.structured_outputs
    if constraint is not None and form is not None and not request.continue_final_message:
        sampling = replace(sampling, structured_outputs=prompts.answer_constraint(form, constraint))
    if request.tools is not None and request.tools.has_grammar:
        sampling = replace(sampling, structured_outputs=prompts.tool_grammar(request.tools))
    # Compiling a form and tokenizing bad words may take longer.
    if max_new_chars is not None and (sampling.structured_outputs is not None or sampling.bad_words):
        raise TooMuchNewText
    adapter = None if request.model in (None, engine.name) else engine.adapters.get(request.model)
    if adapter is None and request.model not in (None, engine.name):
        raise RequestError("model", f"model {str(request.model)[:80]!r} is not served here", 404, "model_not_found")
    options = EncodeOptions(request.cache_space, max_new_chars)
    reserved = sampling.reserved_tokens
    if reserved >= engine.spec.context:
        found = f"max_tokens: {sampling.max_tokens} leaves no room in a context of {engine.spec.context} tokens"
        raise RequestError("max_tokens", found)
    deadline_s = None if request.timeout_s is None else now_s + request.timeout_s
    seqs = []
    copies: Counter[tuple[int, ...]] = Counter()
    processor: LogitsProcessor | None = None
    for prompt in request.prompts:
        messages = request.messages
        if request.as_message and prompts.chat_template is not None:
            messages = request.messages_of(str(prompt))
        elif request.as_message:
            sampling = _plain_sampling(engine, request)
        healed = _encode(engine, request, prompt, messages, sampling.reserved_tokens, options)
        num_top = sampling.prompt_logprobs
        scores = None if num_top is None else PromptLogprobs(healed.ids, num_top)
        processor = engine.make_processor(sampling) if processor is None else processor
        for _ in range(request.n):
            seq = engine.make_sequence(
                healed.ids,
                sampling,
                copy=copies[healed.ids],
                cache_space=request.cache_space,
                deadline_s=deadline_s,
                generation_s=request.generation_s,
                stop_rules=_stop_rules(engine, request, prompt),
                repeated=healed.repeated,
                tenant=request.tenant,
                adapter=adapter,
                continues_text=not messages or request.continue_final_message,
                is_file=request.suffix is not None or bool(request.extra) or (request.as_message and not messages),
                prompt_logprobs=scores,
                shown=shown,
                processor=processor,
            )
            seqs.append(seq)
            copies[healed.ids] += 1
        _check_num_logprobs(seqs)
    return seqs


def _encode(
    engine: Engine,
    request: CompletionRequest,
    prompt: str | tuple[int, ...],
    messages: tuple[ChatMessage, ...],
    reserved: int,
    options: EncodeOptions,
) -> HealedPrompt:
    """The ids of one prompt, which leave `reserved` tokens of the context."""
    prompts = engine.prompts
    at_cursor = request.suffix is not None or request.extra or request.as_message
    if isinstance(prompt, str) and at_cursor and not messages and not request.context_ids:
        return prompts.prompt_at_cursor(
            prompt,
            request.suffix or "",
            reserved,
            request.order,
            heal=request.heal,
            extra=request.extra,
            options=options,
        )
    said = "".join(message.content or "" for message in messages)
    _check_length(engine, _min_tokens(engine, said or prompt), reserved, "at least ")
    if messages:
        ids = prompts.encode_chat(
            messages,
            tools=() if request.tools is None else request.tools.tools,
            expects_answer=request.add_generation_prompt,
            continues=request.continue_final_message,
            variables=json.loads(request.template_variables or "{}"),
            options=options,
        )
    elif request.context_ids:
        ids = tuple(prompts.encode_continuation(str(prompt), "prompt", options))
    elif request.parse_special and isinstance(prompt, str):
        ids = prompts.encode_special(prompt, options=options)
    else:
        ids = prompts.encode_prompt(prompt, options=options)
    if request.context_ids:
        ids = _after_context(engine, request.context_ids, ids, reserved)
    _check_length(engine, len(ids), reserved)
    ids = prompts.truncate(ids, reserved)
    return prompts.heal(ids) if request.heal and isinstance(prompt, str) else HealedPrompt(ids)


def _after_context(engine: Engine, before: tuple[int, ...], ids: tuple[int, ...], reserved: int) -> tuple[int, ...]:
    """The ids of a message after those of an earlier conversation, whose oldest part is left out where an answer would
    get less than a quarter of the context."""
    engine.prompts.encode(before, "context")  # checks them
    begin = engine.tokenizer.begin_ids
    if begin and ids[: len(begin)] == begin:
        ids = ids[len(begin) :]
    room = engine.spec.context - len(ids) - max(reserved, engine.spec.context // 4)
    return (*before[-room:], *ids) if room > 0 else ids


def _stop_rules(engine: Engine, request: CompletionRequest, prompt: object) -> tuple[TextEnd, ...]:
    rules: list[TextEnd] = []
    rule = stop_rule_for(request.stop_rule, prompt)
    if rule is not None:
        rules.append(rule)
    parser = make_answer_parser(engine, request)
    if parser is not None and request.tools is not None and not request.tools.is_parallel:
        rules.append(FirstCallEnd(parser))
    return tuple(rules)


def make_answer_parser(engine: Engine, request: CompletionRequest) -> AnswerParser | None:
    """What tells calls and reasoning from text in the answer of a chat; None if all of it is text."""
    form = _answer_form(engine, request)
    return None if form is None else make_parser(form, request.tools, goes_on=request.continue_final_message)


def _answer_form(engine: Engine, request: CompletionRequest) -> ToolForm | None:
    return engine.prompts.answer_form(request.tools) if request.messages or request.as_message else None


def _plain_sampling(engine: Engine, request: CompletionRequest) -> SamplingParams:
    """Of a message to a model without a chat template, which then completes it as a text: nothing ends that."""
    if request.system:
        raise RequestError("system", "system: the model has no chat template; write everything into the prompt")
    sampling = request.sampling
    most = min(PLAIN_TOKENS, max(engine.spec.context // 2, 1))
    return replace(sampling, max_tokens=most) if sampling.max_tokens == NO_LIMIT else sampling


def _min_tokens(engine: Engine, prompt: str | tuple[int, ...]) -> int:
    """A lower bound on the tokens of a prompt, without tokenizing it. Text of more characters per token than any code
    has counts as too long: finding out exactly would take seconds.
    """
    most = 2 * MAX_CHARS_PER_TOKEN * engine.spec.context
    estimate = len(prompt) // (2 * MAX_CHARS_PER_TOKEN) if isinstance(prompt, str) and len(prompt) > most else 0
    return max(engine.prompts.min_tokens(prompt), estimate)


def _check_num_logprobs(seqs: Iterable[Sequence]) -> None:
    """Of prompts: each is built, sent and kept in memory as JSON."""
    total = sum(
        len(seq.prompt) * (seq.sampling.prompt_logprobs + 1) for seq in seqs if seq.sampling.prompt_logprobs is not None
    )
    if total > MAX_PROMPT_LOGPROBS:
        found = f"the prompts have {total} log-probabilities with their alternatives; at most {MAX_PROMPT_LOGPROBS}"
        raise RequestError("logprobs", f"logprobs: {found} in one request")


def _check_length(engine: Engine, num_ids: int, max_tokens: int, qualifier: str = "") -> None:
    if num_ids + max_tokens > engine.spec.context:
        found = f"prompt: {qualifier}{num_ids} tokens and max_tokens {max_tokens} are more than the context"
        raise RequestError("prompt", f"{found} of {engine.spec.context}", code="context_length_exceeded")
