"""Sampling fields that exclude, prefer or end tokens: each token is the one that a step-by-step computation gives,
alone, in a batch, with draft tokens, with decode-ahead, in 8 bits, in a form and behind a gateway.
"""

from __future__ import annotations

import asyncio
import pickle
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from lakh.errors import UserError
from lakh.server.backends.in_process import InProcessBackend
from lakh.server.backends.request_sequences import make_sequences
from lakh.server.engine import Engine, SamplingParams
from lakh.server.offline import OfflineEngine
from lakh.server.request import parse
from lakh.server.sampling.logits_processor import LogitsProcessor
from lakh.server.scheduler import NO_DRAFT
from lakh.server.sequence import Sequence as EngineSequence
from lakh.server.speculation.rejection import DraftTokens
from lakh.workloads.code.model import CodeModel

from .test_gateway import Fleet, gateway_of, other_engine
from .test_gateway import run as run_gateway

PROMPT = "def add("
NUM_TOKENS = 12
EOT = 0
TIMEOUT_S = 60.0


def params(**fields: Any) -> SamplingParams:
    return parse({"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, **fields}).sampling


def from_scratch(engine: Engine, reference: CodeModel, **fields: Any) -> list[int]:
    """Greedy tokens, by the definitions of the fields and the training model. Of two orders the biases come first."""
    encode, num_ids = engine.tokenizer.encode, engine.tokenizer.vocab_size
    bias = {int(number): value for number, value in fields.get("logit_bias", {}).items()}
    bad = [encode(text) for word in fields.get("bad_words", ()) for text in (word, f" {word}")]
    end_ids, stop_ids = [EOT], fields.get("stop_token_ids", [])
    tokens = encode(PROMPT)
    found: list[int] = []
    while len(found) < fields.get("max_tokens", NUM_TOKENS):
        logits = reference(torch.tensor([tokens + found]))[0, -1, :num_ids].tolist()
        for number, value in bias.items():
            logits[number] += value
        penalty = fields.get("repetition_penalty", 1.0)
        for number in {*tokens, *found}:
            logits[number] = logits[number] / penalty if logits[number] > 0 else logits[number] * penalty
        excluded = {number for number, value in bias.items() if value == -100}
        if "allowed_token_ids" in fields:
            excluded |= set(range(num_ids)) - set(fields["allowed_token_ids"])
        excluded |= {ids[-1] for ids in bad if [*found, ids[-1]][-len(ids) :] == ids}
        if len(found) < fields.get("min_tokens", 0):
            excluded |= {*end_ids, *stop_ids}
        best = max((number for number in range(num_ids) if number not in excluded), key=logits.__getitem__)
        found.append(best)
        if best in stop_ids or (best in end_ids and not fields.get("ignore_eos")):
            break
    return found


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[int]:
    """What the engine gives without any field."""
    return list(engine.generate([PROMPT], params())[0].tokens)


def bad_words(engine: Engine, length: int) -> dict[str, Any]:
    """Words of this many tokens that a completion of letters would have."""
    letters = [token for token in range(300) if re.fullmatch("[a-z]+", engine.tokenizer.decode([token]))]
    (done,) = engine.generate([PROMPT], params(allowed_token_ids=letters))
    parts = [done.tokens[at : at + length] for at in range(6)]
    words = [engine.tokenizer.decode(part) for part in parts]
    found = [word for word, ids in zip(words, parts, strict=True) if engine.tokenizer.encode(word) == list(ids)]
    assert found
    return {"allowed_token_ids": letters, "bad_words": found}


Fields = Callable[[Engine, Sequence[int]], dict[str, Any]]

FIELDS: dict[str, Fields] = {
    "ban": lambda engine, plain: {"logit_bias": {str(token): -100 for token in plain[:4]}},
    "bias": lambda engine, plain: {"logit_bias": {"40": 60.0, "41": 12, str(plain[0]): -30}},
    "bias and penalty": lambda engine, plain: {"logit_bias": {"40": 60.0}, "repetition_penalty": 1.8},
    "allowed": lambda engine, plain: {"allowed_token_ids": [20, 21, plain[1], 22, 90, 250]},
    "bad words": lambda engine, plain: bad_words(engine, 1),
    "bad sequence": lambda engine, plain: bad_words(engine, 2),
    "stop id": lambda engine, plain: {"stop_token_ids": [plain[4], 299]},
    "stop id later": lambda engine, plain: {"stop_token_ids": [plain[1]], "min_tokens": 6},
    "end": lambda engine, plain: {"logit_bias": {str(EOT): 100}},
    "ignored end": lambda engine, plain: {"logit_bias": {str(EOT): 100}, "ignore_eos": True},
    "ignored end later": lambda engine, plain: {"logit_bias": {str(EOT): 100}, "ignore_eos": True, "min_tokens": 3},
    "all": lambda engine, plain: {
        "allowed_token_ids": [*range(20, 200)],
        "logit_bias": {"30": 40, str(plain[0]): -100},
        "bad_words": ["x", "de"],
        "stop_token_ids": [299],
        "ignore_eos": True,
    },
}
each = pytest.mark.parametrize("kind", FIELDS)


@each
def test_tokens_are_those_of_the_definitions(engine: Engine, reference: CodeModel, plain: list[int], kind: str) -> None:
    fields = FIELDS[kind](engine, plain)
    expected = from_scratch(engine, reference, **fields)
    (alone,) = engine.generate([PROMPT], params(**fields))
    assert list(alone.tokens) == expected
    if kind != "stop id later":
        assert expected != plain
    together = engine.generate([PROMPT] * 3, [params(), params(**fields), params(temperature=1.0, seed=1)])
    assert list(together[0].tokens) == plain  # others in the batch are not changed
    assert together[1] == alone
    chunks = list(engine.stream(PROMPT, params(**fields)))
    assert "".join(chunk.text for chunk in chunks) == alone.text
    if "stop_token_ids" in fields and alone.finish_reason == "stop":
        assert alone.text == engine.tokenizer.decode(expected[:-1])
        (included,) = engine.generate([PROMPT], params(**fields, include_stop_str_in_output=True))
        assert included.text == engine.tokenizer.decode(expected)


@each
@pytest.mark.parametrize("drafts", ["right", "plain", "banned"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_tokens_are_judged_by_the_same_rules(
    engine: Engine,
    make_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    plain: list[int],
    kind: str,
    drafts: str,
    temperature: float,
) -> None:
    sampling = params(**FIELDS[kind](engine, plain), temperature=temperature, seed=5)
    (expected,) = engine.generate([PROMPT], sampling)
    speculating = make_engine(options={"speculation": "lookup"})

    def propose(running: Sequence[EngineSequence]) -> dict[EngineSequence, DraftTokens]:
        found = {}
        for seq in running:
            if seq.num_pending > 1 or not seq.tokens:
                continue
            at, most = len(seq.tokens), seq.max_new_tokens - len(seq.tokens) - 1
            banned = [number for number, _ in sampling.logit_bias] + plain[:3]
            tokens = {"right": expected.tokens[at : at + 4], "plain": plain[at : at + 4], "banned": banned}[drafts]
            found[seq] = DraftTokens(list(tokens)[:most], []) if most > 0 and tokens else NO_DRAFT
        return found

    assert speculating._proposer is not None
    monkeypatch.setattr(speculating._proposer, "propose", propose)
    monkeypatch.setattr(speculating._proposer, "record_acceptance", lambda *_: None)
    (found,) = speculating.generate([PROMPT], sampling)
    assert found == expected
    if drafts == "right" and len(expected.tokens) > 3:
        assert speculating.counters.accepted_tokens > 0


@each
def test_a_gpu_s_greedy_bursts_leave_changed_logits_alone(
    engine: Engine, make_ahead_engine: Callable[..., tuple[Engine, Any]], plain: list[int], kind: str
) -> None:
    sampling = params(**FIELDS[kind](engine, plain))
    ahead, decoder = make_ahead_engine()
    assert ahead.generate([PROMPT], sampling) == engine.generate([PROMPT], sampling)
    # Ids that end a completion change no logits: they need no other path.
    assert (decoder.num_bursts > 0) == (kind in ("stop id", "stop id later"))


def test_rules_hold_in_8_bits(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(options={"precision": "int8"})
    banned = {str(token): -100 for token in engine.generate([PROMPT], params())[0].tokens}
    (done,) = engine.generate([PROMPT], params(logit_bias=banned))
    assert {str(token) for token in done.tokens}.isdisjoint(banned)


@pytest.mark.parametrize("seed", range(6))
def test_rules_hold_where_tokens_are_sampled(engine: Engine, seed: int) -> None:
    hot = {"temperature": 5.0, "seed": seed, "max_tokens": 40}
    assert {*engine.generate([PROMPT], params(allowed_token_ids=[20, 30], **hot))[0].tokens} <= {20, 30}
    words = ["return", "l", "re", "é"]
    (done,) = engine.generate([PROMPT], params(bad_words=words, **hot))
    bad = {tuple(engine.tokenizer.encode(text)) for word in words for text in (word, f" {word}")}
    for ids in bad:
        assert all(done.tokens[at : at + len(ids)] != ids for at in range(len(done.tokens)))


@pytest.mark.parametrize("is_included", [False, True])
def test_a_stop_string_is_part_of_the_text_on_request(engine: Engine, is_included: bool) -> None:
    (whole,) = engine.generate([PROMPT], params())
    stop = whole.text[4:6]
    end = whole.text.index(stop) + (len(stop) if is_included else 0)
    sampling = params(stop=[stop, "never"], include_stop_str_in_output=is_included)
    (done,) = engine.generate([PROMPT], sampling)
    assert (done.text, done.finish_reason) == (whole.text[:end], "stop")
    assert "".join(chunk.text for chunk in engine.stream(PROMPT, sampling)) == done.text


def test_a_form_goes_on_where_its_end_is_ignored(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(context=256)
    form = {"guided_regex": "a{2,30}", "max_tokens": 60, "logit_bias": {str(EOT): 100}}
    (short,) = engine.generate([PROMPT], params(**form))
    (long,) = engine.generate([PROMPT], params(**form, ignore_eos=True))
    assert (short.text, short.finish_reason) == ("aa", "stop")
    assert (long.text, long.finish_reason) == ("a" * 30, "stop")
    (banned,) = engine.generate([PROMPT], params(guided_regex="[ab]{20}", max_tokens=60, bad_words=["ab", "b"]))
    assert banned.text == "a" * 20
    for word in ("left", "right"):
        wish = {str(number): 100 for number in engine.tokenizer.encode(word)}
        (chosen,) = engine.generate([PROMPT], params(guided_choice=["left", "right"], logit_bias=wish))
        assert chosen.text == word


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"guided_regex": "[ab]{20}", "bad_words": ["a", "b"]}, "guided_regex"),
        ({"allowed_token_ids": [30], "logit_bias": {"30": -100}}, "allowed_token_ids"),
        ({"logit_bias": {str(number): -100 for number in range(300)}}, "logit_bias"),
        ({"allowed_token_ids": ["a"], "bad_words": ["aaa"]}, "allowed_token_ids"),
    ],
)
def test_a_request_that_allows_no_token_fails_alone(engine: Engine, fields: dict[str, Any], where: str) -> None:
    if fields.get("allowed_token_ids") == ["a"]:
        fields = {**fields, "allowed_token_ids": engine.tokenizer.encode("a")}

    async def scenario() -> None:
        backend = InProcessBackend(engine)
        other = asyncio.create_task(collect(backend, {"max_tokens": 40}))
        with pytest.raises(UserError, match="no token of the vocabulary can follow") as caught:
            await collect(backend, fields)
        assert caught.value.where == where
        assert len(await other) > 0
        assert engine.pool.num_used == 0
        await backend.close()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


async def collect(backend: InProcessBackend, fields: dict[str, Any]) -> str:
    request = parse({"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, **fields})
    return "".join([getattr(item, "text", "") async for item in backend.complete(request)])


def test_ids_beyond_the_vocabulary_and_half_characters_are_refused(engine: Engine) -> None:
    for field, value in (
        ("stop_token_ids", [300]),
        ("logit_bias", {"300": 1}),
        ("allowed_token_ids", [5, 319]),  # the model has such rows, the tokenizer has no such ids
        ("bad_words", ["\ud800"]),
    ):
        with pytest.raises(UserError) as caught:
            engine.generate([PROMPT], params(**{field: value}))
        assert caught.value.where == field


def test_the_choices_of_a_request_share_what_is_made_of_its_rules(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[SamplingParams] = []
    begin = LogitsProcessor.__init__

    def counted(processor: LogitsProcessor, sampling: SamplingParams, tokenizer: Any) -> None:
        made.append(sampling)
        begin(processor, sampling, tokenizer)

    monkeypatch.setattr(LogitsProcessor, "__init__", counted)
    request = parse({"prompt": [PROMPT, "x"], "n": 8, "bad_words": ["x"], "max_tokens": 2})
    seqs = make_sequences(engine, request, 0.0)
    assert len(seqs) == 16
    assert len(made) == 1
    assert len({id(seq.processor) for seq in seqs}) == 1


def test_a_gateway_passes_the_fields_on(engine: Engine, plain: list[int]) -> None:
    ask = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
    bodies = [{**ask, **make(engine, plain)} for make in FIELDS.values()]
    bodies.append({**ask, "stop_token_ids": [plain[3]], "include_stop_str_in_output": True})
    expected = [engine.generate([PROMPT], parse(body).sampling)[0] for body in bodies]

    async def scenario(fleet: Fleet) -> None:
        for body, answer in zip(bodies, expected, strict=True):
            status, found = await fleet.post(body)
            assert status == 200, found
            assert found["choices"][0]["text"] == answer.text
            assert found["usage"]["completion_tokens"] == len(answer.tokens)
        status, refused = await fleet.post({**ask, "stop_token_ids": [300]})
        assert (status, refused["error"]["param"]) == (400, "stop_token_ids")

    run_gateway([engine], scenario)


def test_other_engines_get_vllm_s_names(engine: Engine, plain: list[int]) -> None:
    fields = {**FIELDS["all"](engine, plain), "include_stop_str_in_output": True}

    async def main() -> None:
        asked: list[dict[str, Any]] = []
        async with asyncio.timeout(TIMEOUT_S), other_engine(asked, ["x"]) as url, gateway_of([], (url,)) as fleet:
            assert (await fleet.post({"prompt": PROMPT, "max_tokens": 4, **fields}))[0] == 200
        assert {name: asked[0][name] for name in fields} == {
            **fields,
            "logit_bias": {number: float(bias) for number, bias in fields["logit_bias"].items()},
        }

    asyncio.run(main())


def test_requests_with_rules_cross_to_another_process(engine: Engine, plain: list[int]) -> None:
    for make in FIELDS.values():
        request = parse({"prompt": PROMPT, **make(engine, plain)})
        assert pickle.loads(pickle.dumps(request)) == request


def test_offline_generation_ignores_ends_and_refuses_the_rest(engine: Engine, plain: list[int]) -> None:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    assert OfflineEngine(engine).generate([PROMPT], [sampling])[0].tokens == tuple(plain)
    for kind in ("ban", "allowed", "bad words", "stop id"):
        with pytest.raises(UserError, match=re.escape("is not supported offline")):
            OfflineEngine(engine).generate([PROMPT], [params(**FIELDS[kind](engine, plain))])
