"""Token healing: the last token may be replaced by a longer one, and the prompt's text is not repeated."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from lakh.server.backends.request_sequences import make_sequences
from lakh.server.engine import Engine, SamplingParams
from lakh.server.prompts.token_healing import TokenHealer
from lakh.server.request import parse


def test_the_first_token_may_be_any_that_starts_with_the_removed_text(engine: Engine) -> None:
    encode, decode = engine.tokenizer.encode, engine.tokenizer.decode
    ids = (*encode("def "), *encode("r"))
    healed = engine.prompts.heal(ids)
    assert healed.ids == ids[:-1]
    assert healed.repeated is not None
    assert healed.repeated.text == "r"
    allowed = healed.repeated.allowed_after([])
    assert allowed is not None
    assert ids[-1] in allowed
    assert all(decode([token]).startswith("r") for token in allowed)
    assert all(healed.repeated.allowed_after([token]) is None for token in allowed)
    others = [token for token in range(engine.tokenizer.vocab_size) if decode([token]).startswith("r")]
    assert len(allowed) == len(others) > 1


def test_prompts_that_cannot_be_healed_stay_unchanged(engine: Engine) -> None:
    encode, special = engine.tokenizer.encode, engine.tokenizer.special
    half = encode("🙂")[:-1]
    for ids in ((), tuple(encode("r"))[:1], (20, special("<|fim_middle|>")), (20, *half)):
        assert engine.prompts.heal(ids) == (ids, None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_healed_completion_continues_the_prompt_as_text(
    make_engine: Callable[..., Engine], temperature: float
) -> None:
    engine = make_engine()
    ids = (*engine.tokenizer.encode("x = "), *engine.tokenizer.encode("r"))
    for seed in range(8):
        healed = engine.prompts.heal(ids)
        sampling = SamplingParams(max_tokens=6, temperature=temperature, seed=seed)
        seq = engine.make_sequence(healed.ids, sampling, repeated=healed.repeated)
        engine.submit(seq)
        while seq.finish_reason is None:
            engine.step()
        whole = engine.tokenizer.decode(seq.tokens)
        assert whole.startswith("r")
        assert seq.completion().text == whole[1:]


def test_healing_caches_nothing_that_another_tenant_could_detect(engine: Engine) -> None:
    healer = TokenHealer(engine.tokenizer)
    before = {name: (id(value), repr(value)) for name, value in vars(healer).items()}
    healed = healer.heal((20, *engine.tokenizer.encode("r")))
    assert healed.repeated
    assert healed.repeated.allowed_after([])
    assert {name: (id(value), repr(value)) for name, value in vars(healer).items()} == before


def test_a_healed_sequence_decodes_ahead_after_its_first_token(
    make_engine: Callable[..., Engine], make_ahead_engine: Callable[..., Any]
) -> None:
    plain, (ahead_engine, decoder) = make_engine(), make_ahead_engine()
    answers = []
    for one in (plain, ahead_engine):
        healed = one.prompts.heal((*one.tokenizer.encode("x = "), *one.tokenizer.encode("r")))
        seq = one.make_sequence(healed.ids, SamplingParams(max_tokens=17), repeated=healed.repeated)
        one.submit(seq)
        while seq.finish_reason is None:
            one.step()
        answers.append(seq.completion())
    assert answers[0] == answers[1]
    assert sum(decoder.launches) == 16


@pytest.mark.parametrize("typed", ["def add(left):\n    retu", "x = lef", "y = le", "le ri"])
@pytest.mark.parametrize("options", [{}, {"speculation": "lookup"}])
def test_the_whole_word_is_rolled_back_and_repeated_in_any_tokens(
    make_engine: Callable[..., Engine], options: dict[str, Any], typed: str
) -> None:
    engine = make_engine(options=options)
    encode, decode = engine.tokenizer.encode, engine.tokenizer.decode
    ids = tuple(encode(typed))
    healed = engine.prompts.heal(ids)
    assert healed.repeated is not None
    assert decode(healed.ids) + healed.repeated.text == typed
    word = re.search(r"\w+$", typed)
    assert word is not None
    assert healed.repeated.text.endswith(word[0])
    for seed in range(4):
        seq = engine.make_sequence(
            healed.ids, SamplingParams(max_tokens=12, temperature=1.0, seed=seed), repeated=healed.repeated
        )
        engine.submit(seq)
        while seq.finish_reason is None:
            engine.step()
        whole = decode(seq.tokens)
        assert whole.startswith(healed.repeated.text)
        assert seq.completion().text == whole[len(healed.repeated.text) :]


@pytest.mark.parametrize("order", ["psm", "spm"])
def test_healing_works_in_both_orders_of_a_middle(engine: Engine, order: str) -> None:
    request = parse(
        {"prompt": "def add(left):\n    retu", "suffix": "\n", "order": order, "heal": True, "max_tokens": 4}
    )
    (seq,) = make_sequences(engine, request, 0.0)
    assert seq.repeated is not None
    assert seq.repeated.text.endswith("retu")
    assert "retu" not in engine.tokenizer.decode(seq.prompt)
