"""A step as a single kernel: which models can be shared out, and that the source gets all of its words."""

import re
from dataclasses import replace

import pytest

from lakh.server.model.gpu import whole_step
from lakh.spec.model import Model

MODEL = Model(layers=24, width=2048, heads=16, kv_heads=8, ffn=5504, vocab=32064, context=4096)
SMS, SHARED_BYTES = 132, 232448  # of an H200


def test_a_model_of_a_usual_shape_fills_the_shared_memory_with_weights() -> None:
    plan = whole_step.plan(MODEL, MODEL.vocab, SMS, SHARED_BYTES)
    assert plan is not None
    assert (plan.splits, plan.chunk_bytes, plan.slots) == (8, 16384, 12)
    assert SHARED_BYTES - plan.chunk_bytes < plan.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize("ffn", [8192, 14336])
def test_a_chunk_holds_a_whole_row(ffn: int) -> None:
    plan = whole_step.plan(replace(MODEL, ffn=ffn), MODEL.vocab, SMS, SHARED_BYTES)
    assert plan is not None
    assert plan.chunk_bytes == 2 * ffn
    assert plan.slots >= whole_step.LEAST_SLOTS


@pytest.mark.parametrize(
    "other",
    [
        {"qk_norm": True},
        {"ffn": 5505 + 31},  # 5536 is no multiple of 64
        {"width": 1568, "heads": 16},  # heads of 98
        {"ffn": 65536},  # four rows do not fit
    ],
    ids=str,
)
def test_other_models_keep_their_several_kernels(other: dict[str, int]) -> None:
    assert whole_step.plan(replace(MODEL, **other), MODEL.vocab, SMS, SHARED_BYTES) is None


def test_a_chip_with_little_shared_memory_keeps_them_too() -> None:
    assert whole_step.plan(MODEL, MODEL.vocab, 80, 100 * 1024) is None


def test_the_source_gets_the_words_that_it_says_it_needs() -> None:
    text = whole_step.source()
    plan = whole_step.plan(MODEL, MODEL.vocab, SMS, SHARED_BYTES)
    assert plan is not None
    needs = text[text.index("Defined by whoever") : text.index("typedef")]
    promised = {
        word
        for line in needs.splitlines()[1:]
        for word in re.split(r"\s{2,}", line[3:].strip())[0].split()
        if word.isupper() or "_" in word
    }
    given = whole_step.defines(MODEL, MODEL.vocab, plan)
    assert promised == set(given)
    for word in given:
        assert len(re.findall(rf"\b{word}\b", text)) > 1, f"{word} is of no use"
