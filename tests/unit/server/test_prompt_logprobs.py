"""Log-probabilities of prompts: those of the model itself, whatever was cached, preempted or runs beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lakh.errors import ConfigError, UserError
from lakh.server.engine import Completion, Engine, SamplingParams
from lakh.server.model.runner import StepLimits
from lakh.server.offline import OfflineEngine
from lakh.server.sampling import prompt_logprobs
from lakh.server.sampling.prompt_logprobs import reduce_logits
from lakh.server.sampling.tokens import LOWEST_LOGPROB

from .conftest import random_weights, tiny_spec

VOCAB = 300  # of the tokenizer: without padding, every framework normalizes over the same ids
SCORE = SamplingParams(max_tokens=0, prompt_logprobs=3)
TOLERANCE = 1e-4  # of a log-probability in float32: sums in another order differ by about 1e-5 of a logit


@pytest.fixture(scope="module")
def scorer(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine(vocab=VOCAB)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = (1, 2, 15, 16, 17, 40, 95, 96)  # of a block and of the whole context too
    return [torch.randint(0, VOCAB, (size,), generator=generator).tolist() for size in lengths]


def values(done: Completion) -> list[float | None]:
    assert done.prompt_logprobs is not None
    return [None if item is None else item.logprob for item in done.prompt_logprobs]


def assert_close(found: Sequence[float | None], expected: Sequence[float | None]) -> None:
    assert len(found) == len(expected)
    assert found[0] is None
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert one is not None
        assert other is not None
        assert abs(one - other) < TOLERANCE


def test_they_are_those_of_transformers(
    save_model: Callable[..., Path], scorer: Engine, prompts: list[list[int]]
) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(save_model(vocab=VOCAB), dtype=torch.float32)
    for prompt, done in zip(prompts, scorer.generate(prompts, SCORE), strict=True):
        with torch.inference_mode():
            scores = model(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
        expected = [scores[at, token].item() for at, token in enumerate(prompt[1:])]
        assert_close(values(done), [None, *expected])
        assert (done.text, done.tokens, done.finish_reason) == ("", (), "length")
        assert done.prompt_logprobs is not None
        for at, item in enumerate(done.prompt_logprobs[1:]):
            assert item is not None
            assert item.token == prompt[at + 1]
            assert item.rank == int((scores[at] > scores[at, item.token]).sum()) + 1
            top = scores[at].topk(3)
            assert [token for token, _ in item.top] == top.indices.tolist()
            torch.testing.assert_close(torch.tensor([one for _, one in item.top]), top.values, atol=TOLERANCE, rtol=0)


def test_a_cached_prefix_is_computed_again(scorer: Engine, prompts: list[list[int]]) -> None:
    expected = [values(done) for done in scorer.generate(prompts, SCORE)]
    scorer.generate([prompt for prompt in prompts if len(prompt) < 96], SamplingParams(max_tokens=1))
    cached = scorer.counters.cached_tokens
    again = scorer.generate(prompts, SCORE)
    assert [values(done) for done in again] == expected  # on a CPU to the last bit
    assert scorer.counters.cached_tokens == cached
    # And what they computed is cached for others.
    scorer.generate([[*prompts[6][:90], 7]], SamplingParams(max_tokens=1))
    assert scorer.counters.cached_tokens == cached + 90


@pytest.mark.parametrize("step_tokens", [1, 7, 16, 256])
def test_chunks_and_the_room_for_logits_change_nothing(
    make_engine: Callable[..., Engine],
    scorer: Engine,
    prompts: list[list[int]],
    step_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = [values(done) for done in scorer.generate(prompts, SCORE)]
    engine = make_engine(vocab=VOCAB)
    engine.step_tokens, engine.runner.max_prompt_logits = step_tokens, max(step_tokens // 2, 1)
    monkeypatch.setattr(prompt_logprobs, "SLICE_LOGITS", 5 * VOCAB)
    rows: list[int] = []
    forward = engine.runner.forward

    def counted(segments: Any) -> Any:
        rows.append(sum(segment.scored for segment in segments))
        return forward(segments)

    monkeypatch.setattr(engine.runner, "forward", counted)
    assert [values(done) for done in engine.generate(prompts, SCORE)] == expected
    assert max(rows) <= engine.runner.max_prompt_logits + len(prompts)  # a token to sample from for each sequence


def test_a_gpu_s_largest_graph_holds_every_step(
    make_engine: Callable[..., Engine], scorer: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the limits of CUDA graphs and drafts that fill them."""
    expected = [values(done) for done in scorer.generate(prompts, SCORE)]
    engine = make_engine(vocab=VOCAB, options={"speculation": "lookup"})
    engine.runner.step_limits = StepLimits(tokens=40, scored=20)
    forward, sizes = engine.runner.forward, []

    def counted(segments: Any) -> Any:
        sizes.append((sum(len(one.tokens) for one in segments), sum(one.scored for one in segments)))
        return forward(segments)

    monkeypatch.setattr(engine.runner, "forward", counted)
    decoding = engine.make_sequences([[5, 6, 7, 8] * 4] * 2, SamplingParams(max_tokens=60))
    scored = engine.make_sequences(prompts, SCORE)
    engine.submit(*decoding)
    while not decoding[0].tokens:
        engine.step()
    engine.submit(*scored)
    while any(seq.finish_reason is None for seq in (*decoding, *scored)):
        engine.step()
    assert [values(seq.completion()) for seq in scored] == expected
    assert max(tokens for tokens, _ in sizes) <= 40
    assert max(rows for _, rows in sizes) <= 20


def test_preempted_and_batched_sequences_have_them(
    make_engine: Callable[..., Engine], scorer: Engine, prompts: list[list[int]]
) -> None:
    """A cache of little more than one context: sequences take each other's blocks, also amid their prompts."""
    sampling = SamplingParams(max_tokens=12, prompt_logprobs=2, logprobs=1)
    short = [prompt[:60] for prompt in prompts] * 2
    alone = [scorer.generate([prompt], sampling)[0] for prompt in short]
    engine = make_engine(vocab=VOCAB, options={"cache_tokens": 128})
    engine.step_tokens = 24
    together = engine.generate(short, sampling)
    assert engine.counters.preempted_seqs > 0
    for one, other in zip(alone, together, strict=True):
        assert one == other


def test_a_preempted_prompt_goes_on_where_it_was(make_engine: Callable[..., Engine], prompts: list[list[int]]) -> None:
    engine = make_engine(vocab=VOCAB)
    engine.step_tokens = 20
    expected = values(engine.generate([prompts[6]], SCORE)[0])
    seq = engine.make_sequences([prompts[6]], SCORE)[0]
    engine.submit(seq)
    engine.step()
    engine.step()
    assert seq.prompt_logprobs is not None
    assert len(seq.prompt_logprobs) == 40
    engine.scheduler.preempt_all()
    computed = engine.counters.computed_tokens
    while seq.finish_reason is None:
        engine.step()
    assert values(seq.completion()) == expected
    assert engine.counters.computed_tokens - computed == len(prompts[6]) - 40


def test_a_swap_of_weights_starts_unfinished_ones_again(
    make_engine: Callable[..., Engine], prompts: list[list[int]]
) -> None:
    engine, other = make_engine(vocab=VOCAB), make_engine(seed=2, vocab=VOCAB)
    engine.step_tokens = 20
    seq, finished = engine.make_sequences([prompts[6], prompts[2]], SCORE)
    engine.submit(finished)
    engine.step()
    engine.submit(seq)
    engine.step()
    before = values(finished.completion())
    engine.swap(random_weights(tiny_spec(vocab=VOCAB), 2))
    while seq.finish_reason is None:
        engine.step()
    assert_close(values(seq.completion()), values(other.generate([prompts[6]], SCORE)[0]))
    assert values(finished.completion()) == before


@pytest.mark.parametrize("precision", ["int8", "int4", "bf16"])
def test_quantized_and_narrow_engines_score_as_they_generate(
    make_engine: Callable[..., Engine], precision: str
) -> None:
    """A greedy completion has the same log-probabilities when it is scored as a part of the prompt."""
    engine = make_engine(options={"precision": precision}, width=64, ffn=128)
    prompt = list(range(20, 50))
    done = engine.generate([prompt], SamplingParams(max_tokens=30, logprobs=2))[0]
    scored = engine.generate([[*prompt, *done.tokens]], SamplingParams(max_tokens=0, prompt_logprobs=2))[0]
    assert done.logprobs is not None
    assert scored.prompt_logprobs is not None
    tolerance = 0.25 if precision == "bf16" else 1e-6  # the same bits on a CPU; bf16 in torch rounds at 8 bits
    for one, other in zip(done.logprobs, scored.prompt_logprobs[len(prompt) :], strict=True):
        assert other is not None
        assert abs(one.logprob - other.logprob) <= tolerance


def test_the_torch_path_gives_the_same(
    make_engine: Callable[..., Engine], scorer: Engine, prompts: list[list[int]]
) -> None:
    engine = make_engine(vocab=VOCAB)
    engine.network._decoder = None  # torch around native products, as for adapters and on a GPU without kernels
    for one, other in zip(scorer.generate(prompts, SCORE), engine.generate(prompts, SCORE), strict=True):
        assert_close(values(other), values(one))


def test_constraints_change_completions_and_not_prompts(scorer: Engine, prompts: list[list[int]]) -> None:
    plain = scorer.generate([prompts[5]], SCORE)[0]
    odd = SamplingParams(max_tokens=5, min_tokens=5, temperature=3.0, seed=1, repetition_penalty=1.5, prompt_logprobs=3)
    assert values(scorer.generate([prompts[5]], odd)[0]) == values(plain)


def test_ids_that_cannot_be_sampled_are_impossible(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()  # 320 ids in the model, 300 in the tokenizer
    done = engine.generate([[5, 310, 6]], SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
    assert values(done)[1] == LOWEST_LOGPROB
    score = values(done)[2]
    assert score is not None
    assert score > LOWEST_LOGPROB


def test_logits_are_reduced_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(50, 70)
    tokens = torch.randint(0, 70, (50,)).tolist()
    whole = reduce_logits(logits, tokens, 4)
    monkeypatch.setattr(prompt_logprobs, "SLICE_LOGITS", 3 * 70)
    assert reduce_logits(logits, tokens, 4) == whole
    assert all(math.isclose(item.logprob, dict(item.top)[item.token]) for item in whole if item.rank in (1, 2, 3, 4))


def test_the_engine_refuses_what_it_cannot_do(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="max_tokens"):
        SamplingParams(max_tokens=0)
    with pytest.raises(ConfigError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=21)
    with pytest.raises(UserError, match="prompt_logprobs"):
        OfflineEngine(engine).generate(["x"], [SCORE])


def test_a_stream_has_them_in_its_first_chunk(scorer: Engine, prompts: list[list[int]]) -> None:
    expected = scorer.generate([prompts[5]], SCORE)[0]
    chunks = list(scorer.stream(prompts[5], SamplingParams(max_tokens=20, prompt_logprobs=3)))
    assert chunks[0].prompt_logprobs == expected.prompt_logprobs
    assert all(chunk.prompt_logprobs is None for chunk in chunks[1:])
    only = list(scorer.stream(prompts[5], SCORE))
    assert [(chunk.text, chunk.finish_reason) for chunk in only] == [("", "length")]
    assert only[0].prompt_logprobs == expected.prompt_logprobs
