"""Token healing: the last token may be replaced by a longer one, and the prompt's text is not repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lakh.server.engine import Engine, SamplingParams
from lakh.server.prompts.token_healing import TokenHealer


def test_the_first_token_may_be_any_that_starts_with_the_removed_text(engine: Engine) -> None:
    encode, decode = engine.tokenizer.encode, engine.tokenizer.decode
    ids = (*encode("def "), *encode("r"))
    healed = engine.prompts.heal(ids)
    assert healed.ids == ids[:-1]
    assert healed.skip == "r"
    assert healed.first_token_ids is not None
    assert ids[-1] in healed.first_token_ids
    assert all(decode([token]).startswith("r") for token in healed.first_token_ids)
    others = [token for token in range(engine.tokenizer.vocab_size) if decode([token]).startswith("r")]
    assert len(healed.first_token_ids) == len(others) > 1


def test_prompts_that_cannot_be_healed_stay_unchanged(engine: Engine) -> None:
    encode, special = engine.tokenizer.encode, engine.tokenizer.special
    half = encode("🙂")[:-1]
    for ids in ((), tuple(encode("r"))[:1], (20, special("<|fim_middle|>")), (20, *half)):
        assert engine.prompts.heal(ids) == (ids, None, "")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_healed_completion_continues_the_prompt_as_text(
    make_engine: Callable[..., Engine], temperature: float
) -> None:
    engine = make_engine()
    ids = (*engine.tokenizer.encode("x = "), *engine.tokenizer.encode("r"))
    for seed in range(8):
        healed = engine.prompts.heal(ids)
        sampling = SamplingParams(max_tokens=6, temperature=temperature, seed=seed)
        seq = engine.make_sequence(healed.ids, sampling, first_token_ids=healed.first_token_ids, skip=healed.skip)
        engine.submit(seq)
        while seq.finish_reason is None:
            engine.step()
        assert healed.first_token_ids is not None
        assert seq.tokens[0] in healed.first_token_ids
        whole = engine.tokenizer.decode(seq.tokens)
        assert whole.startswith("r")
        assert seq.completion().text == whole[1:]


def test_healing_caches_nothing_that_another_tenant_could_detect(engine: Engine) -> None:
    healer = TokenHealer(engine.tokenizer)
    before = {name: (id(value), repr(value)) for name, value in vars(healer).items()}
    assert healer.heal((20, *engine.tokenizer.encode("r"))).first_token_ids
    assert {name: (id(value), repr(value)) for name, value in vars(healer).items()} == before


def test_a_healed_sequence_decodes_ahead_after_its_first_token(
    make_engine: Callable[..., Engine], make_ahead_engine: Callable[..., Any]
) -> None:
    plain, (ahead_engine, decoder) = make_engine(), make_ahead_engine()
    answers = []
    for one in (plain, ahead_engine):
        healed = one.prompts.heal((*one.tokenizer.encode("x = "), *one.tokenizer.encode("r")))
        seq = one.make_sequence(
            healed.ids, SamplingParams(max_tokens=17), first_token_ids=healed.first_token_ids, skip=healed.skip
        )
        one.submit(seq)
        while seq.finish_reason is None:
            one.step()
        answers.append(seq.completion())
    assert answers[0] == answers[1]
    assert sum(decoder.launches) == 16
