"""Structured output: every completion of a random model has the requested form, and ends where the form ends."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from lakh.errors import ConfigError, MissingExtra, UserError
from lakh.server.api.dialects.ollama import OLLAMA_GENERATE
from lakh.server.backend import CompletionDelta
from lakh.server.backends.completion_cache import CompletionCache
from lakh.server.backends.in_process import InProcessBackend
from lakh.server.engine import Engine, SamplingParams
from lakh.server.offline import OfflineEngine
from lakh.server.request import RequestError, parse
from lakh.server.scheduler import NO_DRAFT
from lakh.server.sequence import Sequence as EngineSequence
from lakh.server.speculation.rejection import DraftTokens
from lakh.server.store import MemoryCacheStore
from lakh.server.structured.constraint import MAX_CHARS, OutputConstraint, find_constraint
from lakh.server.structured.grammar import EASY_S, GrammarCompiler, TokenMatcher

TIMEOUT_S = 60.0
PROMPT = "def add("
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["left", "right", None]}, "maxItems": 2},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "size", "tags", "ok"],
    "additionalProperties": False,
}
DATE = r"20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"
GBNF = 'root ::= "<" item ("," item){0,3} ">"\nitem ::= [a-c] | "(" item ")"'
LARK = 'start: "a" NUMBER "b"\nNUMBER: /[0-9]{1,3}/'


def has_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "size", "tags", "ok"]
        and re.fullmatch("[a-z]{1,6}", value["name"]) is not None
        and type(value["size"]) is int
        and 0 <= value["size"] <= 99
        and len(value["tags"]) <= 2
        and all(tag in ("left", "right", None) for tag in value["tags"])
        and type(value["ok"]) is bool
    )


def is_balanced(text: str) -> bool:
    return text[0] == "<" and text[-1] == ">" and text.count("(") == text.count(")") and not re.search(r"\)\(", text)


FORMS: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"guided_json": SCHEMA}, has_schema),
    ({"guided_json": json.dumps(SCHEMA)}, has_schema),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, has_schema),
    ({"structured_outputs": {"json": SCHEMA}}, has_schema),
    ({"guided_regex": DATE}, lambda text: re.fullmatch(DATE, text) is not None),
    ({"regex": "é🙂?日{2}"}, lambda text: text in ("é日日", "é🙂日日")),
    ({"guided_choice": ["left", "right", "le"]}, lambda text: text in ("left", "right", "le")),
    ({"guided_grammar": GBNF}, is_balanced),
    ({"ebnf": LARK}, lambda text: re.fullmatch("a[0-9]{1,3}b", text) is not None),
]


@pytest.fixture(scope="module")
def long_engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine(context=512)


def params(body: dict[str, Any], **more: Any) -> SamplingParams:
    return parse({"prompt": PROMPT, "max_tokens": 400, **body, **more}).sampling


@pytest.mark.parametrize(("body", "is_valid"), FORMS, ids=[next(iter(body)) for body, _ in FORMS])
def test_every_completion_has_the_form(
    long_engine: Engine, body: dict[str, Any], is_valid: Callable[[str], bool]
) -> None:
    samplings = [params(body, temperature=0)]
    samplings += [params(body, temperature=temperature, seed=seed) for seed in range(4) for temperature in (0.7, 3.0)]
    samplings += [params(body, temperature=1.0, top_p=0.5, top_k=3, frequency_penalty=1.0)]
    unconstrained = SamplingParams(max_tokens=8)
    done = long_engine.generate([PROMPT] * len(samplings) + [PROMPT], [*samplings, unconstrained])
    for completion in done[:-1]:
        assert completion.finish_reason in ("stop", "length"), completion
        assert completion.finish_reason == "length" or is_valid(completion.text), completion
    assert sum(completion.finish_reason == "stop" for completion in done[:-1]) > len(samplings) // 2
    assert done[-1] == long_engine.generate([PROMPT], unconstrained)[0]  # others in the batch are not restricted


def test_a_form_that_allows_nothing_more_ends_the_completion_at_once(long_engine: Engine) -> None:
    (completion,) = long_engine.generate([PROMPT], params({"guided_choice": ["left"]}))
    assert (completion.text, completion.finish_reason) == ("left", "stop")
    assert completion.tokens[-1] not in long_engine.tokenizer.end_ids  # no step was needed to end it
    (cut,) = long_engine.generate([PROMPT], params({"guided_regex": "[a-z]{50}"}, max_tokens=3))
    assert cut.finish_reason == "length"
    assert re.fullmatch("[a-z]+", cut.text)


def test_json_objects_have_no_endless_white_space(long_engine: Engine) -> None:
    compiler = GrammarCompiler(long_engine.tokenizer)
    encode = long_engine.tokenizer.encode

    def accepts(text: str) -> bool:
        matcher = compiler.matcher(OutputConstraint("json", '{"type": "object"}'))
        for token in encode(text):
            allowed = matcher.allowed()
            if allowed is None or not allowed[token]:
                return False
            matcher.append(token)
        return matcher.is_complete or bool(matcher._matcher.is_accepting())

    assert accepts('{"a": [1, 2.5e3, null], "b": {"c": "\\n"}}')
    assert accepts('{\n    "a": [\n        true\n    ]\n}')
    assert accepts('{"a":1}')
    assert not accepts('{"a":' + " " * 30 + "1}")
    assert not accepts("[1]")
    assert not accepts("{'a': 1}")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafts", ["right", "wrong", "mixed", "end"])
def test_draft_tokens_never_leave_the_form(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, temperature: float, drafts: str
) -> None:
    plain, speculating = make_engine(context=512), make_engine(context=512, options={"speculation": "lookup"})
    sampling = params({"guided_json": SCHEMA}, temperature=temperature, seed=3)
    (expected,) = plain.generate([PROMPT], sampling)
    assert has_schema(expected.text)

    def propose(running: Sequence[EngineSequence]) -> dict[EngineSequence, DraftTokens]:
        found = {}
        for seq in running:
            if seq.num_pending > 1 or not seq.tokens:
                continue
            at = len(seq.tokens)
            right = list(expected.tokens[at : at + 5])
            wrong = speculating.tokenizer.encode("###")
            ends = list(speculating.tokenizer.end_ids)
            tokens = {"right": right, "wrong": wrong, "mixed": right[:2] + wrong, "end": right[:1] + ends}[drafts]
            found[seq] = DraftTokens(tokens, []) if tokens else NO_DRAFT
        return found

    assert speculating._proposer is not None
    monkeypatch.setattr(speculating._proposer, "propose", propose)
    monkeypatch.setattr(speculating._proposer, "record_acceptance", lambda *_: None)
    (found,) = speculating.generate([PROMPT], sampling)
    assert (found.text, found.tokens, found.finish_reason) == (expected.text, expected.tokens, "stop")
    if drafts == "right":
        assert speculating.counters.accepted_tokens > 0


def test_decode_ahead_leaves_constrained_sequences_alone(
    make_ahead_engine: Callable[..., tuple[Engine, Any]],
) -> None:
    engine, decoder = make_ahead_engine(context=512)
    (completion,) = engine.generate([PROMPT], params({"guided_json": SCHEMA}, temperature=0))
    assert has_schema(completion.text)
    assert decoder.num_bursts == 0


def test_streams_choices_and_log_probabilities(long_engine: Engine) -> None:
    async def scenario() -> None:
        backend = InProcessBackend(long_engine)
        body = {"prompt": PROMPT, "max_tokens": 400, "n": 4, "guided_json": SCHEMA, "logprobs": 2, "seed": 1}
        texts = dict.fromkeys(range(4), "")
        reasons = {}
        async for item in backend.complete(parse(body)):
            if isinstance(item, CompletionDelta):
                texts[item.index] += item.text
                reasons[item.index] = item.finish_reason or reasons.get(item.index)
                assert item.logprobs is not None
                assert all(score > -9000 for score in item.logprobs["token_logprobs"])
        assert all(reasons[index] == "length" or has_schema(text) for index, text in texts.items())
        assert "stop" in reasons.values()
        assert len(set(texts.values())) > 1
        await backend.close()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"guided_json": {"type": "nothing"}}, "guided_json"),
        ({"guided_json": {"$ref": "#/missing"}}, "guided_json"),
        ({"guided_json": {"not": {}}}, "guided_json"),  # valid, but not supported: an error, never ignored
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"json_schema": "true"}, "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"guided_regex": "((a{900}){900}){900}"}, "guided_regex"),
        ({"guided_regex": 4}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_grammar": "root ::= other"}, "guided_grammar"),
        ({"grammar": "start: ("}, "grammar"),
        ({"guided_grammar": "x" * (MAX_CHARS + 1)}, "guided_grammar"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": "a"}, "structured_outputs"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
        ({"guided_regex": "a", "heal": True}, "heal"),
    ],
)
def test_an_invalid_form_is_a_400_that_names_the_field(engine: Engine, body: dict[str, Any], field: str) -> None:
    async def scenario() -> None:
        backend = InProcessBackend(engine)
        with pytest.raises((RequestError, ConfigError)) as caught:
            _ = [item async for item in backend.complete(parse({"prompt": PROMPT, **body}))]
        error = caught.value
        name = error.param if isinstance(error, RequestError) else error.where
        assert name == field
        assert len(str(error)) < 400
        assert not isinstance(error, RequestError) or error.status == 400
        await backend.close()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


@pytest.mark.parametrize(
    "body", [{"response_format": {"type": "text"}}, {"guided_json": None}, {"grammar": ""}, {"structured_outputs": {}}]
)
def test_neutral_values_state_no_form(body: dict[str, Any]) -> None:
    assert find_constraint(body) is None


def test_a_form_that_becomes_too_complex_fails_its_own_request_only(
    long_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, wrong = long_engine._grammars.matcher, long_engine.tokenizer.encode("#")[0]

    def failing(*arguments: Any) -> Any:
        matcher = make(*arguments)
        append = matcher.append
        matcher.append = lambda token: append(wrong)  # not allowed: an error state
        return matcher

    monkeypatch.setattr(long_engine._grammars, "matcher", failing)

    async def scenario() -> None:
        backend = InProcessBackend(long_engine)
        other = asyncio.create_task(_texts(backend, {"prompt": PROMPT, "max_tokens": 200, "temperature": 0}))

        async def ask() -> None:
            body = {"prompt": PROMPT, "max_tokens": 400, "guided_regex": "[a-z]{300}"}
            async for _ in backend.complete(parse(body)):
                pass

        with pytest.raises(UserError, match="cannot be followed any further"):
            await ask()
        assert await other
        assert long_engine.pool.num_used == 0
        await backend.close()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


def test_the_cache_keeps_forms_apart_and_never_returns_a_rest(long_engine: Engine) -> None:
    async def scenario() -> None:
        backend, store = InProcessBackend(long_engine), MemoryCacheStore()
        cache = CompletionCache(backend, store)
        body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "reuse": True}
        left = await _texts(cache, {**body, "guided_choice": ["left side"]})
        right = await _texts(cache, {**body, "guided_choice": ["right"]})
        assert (left, right) == ("left side", "right")
        assert await _texts(cache, {**body, "guided_choice": ["left side"]}) == left
        assert cache.num_repeated == 1
        typed = {**body, "prompt": PROMPT + "left", "guided_choice": ["left side"]}
        assert await _texts(cache, typed) == "left side"  # what was typed is no part of the form
        await backend.close()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


async def _texts(backend: Any, body: dict[str, Any]) -> str:
    items: AsyncIterator[Any] = backend.complete(parse(body))
    return "".join([item.text async for item in items if isinstance(item, CompletionDelta)])


def test_ollama_format_is_a_form() -> None:
    for form, kind in (("json", {"type": "object"}), (SCHEMA, SCHEMA)):
        body = OLLAMA_GENERATE.to_openai({"prompt": "x", "format": form})
        constraint = find_constraint(body)
        assert constraint is not None
        assert json.loads(constraint.text) == kind
    with pytest.raises(RequestError, match="format"):
        OLLAMA_GENERATE.to_openai({"prompt": "x", "format": "xml"})


def test_without_llguidance_the_request_names_the_extra(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    engine = make_engine()
    assert engine.generate([PROMPT], SamplingParams(max_tokens=2))[0].tokens
    with pytest.raises(MissingExtra, match=r"lakh\[structured\]"):
        engine.generate([PROMPT], params({"guided_regex": "a"}))


def test_offline_generation_refuses_a_form(engine: Engine) -> None:
    with pytest.raises(UserError, match="offline"):
        OfflineEngine(engine).generate([PROMPT], [params({"guided_regex": "a"}, max_tokens=2)])


def test_a_form_whose_tokens_take_too_long_is_refused_and_delays_no_one(
    long_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(long_engine, "_grammars", GrammarCompiler(long_engine.tokenizer, lambda: now_s[0]))
    grammar = 'start: start start | "a" | "b"'
    slow = {"prompt": PROMPT, "max_tokens": 200, "n": 4, "guided_grammar": grammar}
    steps: list[bool] = []
    allowed = TokenMatcher._allowed

    def measured(matcher: TokenMatcher, drafted: Sequence[int]) -> Any:
        is_slow = matcher._form is slow_form
        now_s[0] += 0.1 if is_slow else EASY_S  # of an ambiguous grammar with 150,000 ids, after some tokens
        steps.append(is_slow)
        return allowed(matcher, drafted)

    monkeypatch.setattr(TokenMatcher, "_allowed", measured)  # inside of what is timed
    slow_form = long_engine._grammars.matcher(OutputConstraint("grammar", grammar))._form

    async def scenario() -> None:
        backend = InProcessBackend(long_engine)
        easy = {"prompt": PROMPT, "max_tokens": 200, "guided_regex": "[a-z]{50}", "temperature": 0}
        other = asyncio.create_task(_texts(backend, easy))
        with pytest.raises(UserError, match="takes too long for each token"):
            await _texts(backend, slow)
        assert 3 <= sum(steps) <= 8  # all choices of a form together
        with pytest.raises(ConfigError, match="guided_grammar: is not a usable grammar"):  # known now: at once
            await _texts(backend, slow)
        assert sum(steps) <= 8
        assert re.fullmatch("[a-z]{50}", await other)
        assert long_engine.pool.num_used == 0
        await backend.close()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))
