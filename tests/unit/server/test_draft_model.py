"""Draft models: greedy and seeded completions stay the same, others keep their distribution."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lakh.errors import UserError
from lakh.server.engine import Engine, SamplingParams
from lakh.server.model import weights as model_weights
from lakh.server.speculation import proposer
from lakh.server.speculation.policy import DraftLength, StepCosts, choose_draft_length
from lakh.server.speculation.rejection import DraftTokens, rejection_sample, sample_index
from lakh.spec.model import Model
from lakh.tokens.tokenizer import Tokenizer
from lakh.workloads.code.model import CodeModel, init_weights

pytestmark = pytest.mark.slow

Make = Callable[..., Engine]
ids = st.lists(st.integers(7, 299), min_size=1, max_size=60)
few = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SPEC = Model(layers=2, width=32, heads=4, kv_heads=2, ffn=64, vocab=320, context=96)


def weights_of(spec: Model, seed: int, noise: float = 0.0) -> dict[str, torch.Tensor]:
    model = CodeModel(spec)
    init_weights(model, seed)
    made = {name: tensor.detach() * (10 if tensor.dim() > 1 else 1) for name, tensor in model.state_dict().items()}
    generator = torch.Generator().manual_seed(3)
    return {name: t + noise * t.std() * torch.randn(t.shape, generator=generator) for name, t in made.items()}


@pytest.fixture(scope="module")
def make(tokenizer_json: Path) -> Make:
    tokenizer = Tokenizer.load(tokenizer_json)

    def make(*, noise: float | None, cache_tokens: int | None = None, spec: Model = SPEC) -> Engine:
        """With `noise`, the draft is the model with this much noise on its weights."""
        draft = None
        if noise is not None:
            draft = model_weights.LoadedModel("draft", "", spec, weights_of(spec, 1, noise), tokenizer_json)
        weights = weights_of(spec, 1)
        return Engine("m", spec, weights, tokenizer, device="cpu", draft=draft, cache_tokens=cache_tokens)

    return make


@few
@given(
    prompts=st.lists(ids, min_size=1, max_size=4),
    noise=st.sampled_from([0.0, 0.2, 2.0]),
    most=st.integers(1, 7),
    sampling=st.sampled_from(
        [SamplingParams(max_tokens=14), SamplingParams(max_tokens=14, temperature=1.0, top_k=40, seed=9)]
    ),
)
@example(prompts=[[116, 135]], noise=0.0, most=1, sampling=SamplingParams(max_tokens=14))
def test_a_draft_changes_no_greedy_or_seeded_completion(
    make: Make,
    assert_same: Callable[..., None],
    prompts: list[list[int]],
    noise: float,
    most: int,
    sampling: SamplingParams,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if noise == 0.0:  # in int8, as else on a CPU, the draft is wrong where two scores are close
            patch.setattr(proposer, "_precision", lambda target, spec: "f32")
        patch.setattr(
            proposer,
            "choose_draft_length",
            lambda **given: DraftLength(min(most, given["max_tokens"]), "the test requires it"),
        )
        plain, drafted = make(noise=None), make(noise=noise)
        for _ in range(2):  # the second time with cached prefixes in model and draft
            done = plain.generate(prompts, sampling)
            assert_same(prompts, sampling, drafted.generate(prompts, sampling), done)
    assert drafted._draft_model is not None
    assert (drafted.pool.num_used, drafted._draft_model._runner.pool.num_used) == (0, 0)
    if noise == 0.0 and all(
        one.finish_reason == "length" for one in done
    ):  # draft tokens past the end are not verified
        # A draft with the same weights is always right, except for a tie that rounding decides, in each sequence of
        # both rounds.
        assert drafted.counters.accepted_tokens >= drafted.counters.draft_tokens - 2 * most * len(prompts)


def test_a_good_draft_saves_steps(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        proposer,
        "choose_draft_length",
        lambda **given: DraftLength(min(4, given["max_tokens"]), "the test requires it"),
    )
    drafted = make(noise=0.0)
    done = drafted.generate([[30, 31, 32]], SamplingParams(max_tokens=40))[0]
    assert drafted.counters.steps <= 1 + -(-len(done.tokens) // 5)


def test_a_draft_on_a_cpu_uses_int8_where_its_widths_allow(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        proposer,
        "choose_draft_length",
        lambda **given: DraftLength(min(3, given["max_tokens"]), "the test requires it"),
    )
    wide, narrow = dataclasses.replace(SPEC, width=64, ffn=128), dataclasses.replace(SPEC, ffn=72)
    plain, drafted = make(noise=None, spec=wide), make(noise=0.0, spec=wide)
    prompts = [[30, 31, 32], list(range(40, 70))]
    assert drafted.generate(prompts, SamplingParams(max_tokens=40)) == plain.generate(
        prompts, SamplingParams(max_tokens=40)
    )
    assert drafted._draft_model is not None
    drafts = [engine._draft_model for engine in (drafted, make(noise=0.0, spec=narrow))]
    assert [draft._runner.network.precision for draft in drafts if draft is not None] == ["int8", "f32"]
    assert drafted.counters.accepted_tokens > drafted.counters.draft_tokens / 2


def test_preemption_and_a_draft_without_blocks_change_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        proposer,
        "choose_draft_length",
        lambda **given: DraftLength(min(3, given["max_tokens"]), "the test requires it"),
    )
    small, plain = make(noise=0.2, cache_tokens=1), make(noise=None)  # one full context each
    prompts = [[7 + i, *range(20, 50)] for i in range(6)]
    assert small.generate(prompts, SamplingParams(max_tokens=60)) == plain.generate(
        prompts, SamplingParams(max_tokens=60)
    )
    assert small.counters.preempted_seqs > 0
    assert small._draft_model is not None
    assert (small.pool.num_used, small._draft_model._runner.pool.num_used) == (0, 0)


@pytest.mark.slow
def test_rejection_sampling_keeps_the_target_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    p = [torch.rand(4, generator=generator) ** 2 for _ in range(3)]
    q = [torch.rand(4, generator=generator) ** 2 for _ in range(2)]
    p, q = [[v / v.sum() for v in vectors] for vectors in (p, q)]
    numbers, times = random.Random(1), 6_000
    firsts: Counter[int] = Counter()
    seconds: Counter[int] = Counter()
    kept = 0
    for _ in range(times):
        drafts = [sample_index(vector, numbers.random()) for vector in q]
        tokens = rejection_sample(DraftTokens(drafts, q), p, numbers.random)
        firsts[tokens[0]] += 1
        kept += tokens[0] == drafts[0] and len(tokens) > 1
        if len(tokens) > 1:
            seconds[tokens[1]] += 1
    # A fraction of n samples has a standard deviation of at most 0.5 / sqrt(n); five of them.
    for counts, expected in ((firsts, p[0]), (seconds, p[1])):
        total = sum(counts.values())
        for token in range(4):
            assert abs(counts[token] / total - float(expected[token])) < 2.5 / total**0.5
    distance = 0.5 * float((p[0] - q[0]).abs().sum())
    assert abs(kept / times - (1 - distance)) < 2.5 / times**0.5


def test_equal_distributions_accept_every_draft_token() -> None:
    p = torch.tensor([0.25, 0.75, 0.0])
    assert rejection_sample(DraftTokens([1, 0], [p, p]), [p, p, torch.tensor([0.0, 0.0, 1.0])], lambda: 0.999) == [
        1,
        0,
        2,
    ]
    sure = torch.tensor([0.0, 0.0, 1.0])
    assert rejection_sample(DraftTokens([0], [p]), [sure, p], lambda: 0.0) == [2]
    assert sample_index(torch.tensor([0.0, 0.5, 0.0]), 0.9999999) == 1


@pytest.mark.slow
def test_an_unseeded_completion_with_a_draft_has_the_target_distribution(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        proposer,
        "choose_draft_length",
        lambda **given: DraftLength(min(2, given["max_tokens"]), "the test requires it"),
    )
    torch.manual_seed(5)
    drafted, plain = make(noise=0.3), make(noise=None)
    sampling = SamplingParams(max_tokens=3, temperature=1.0, top_k=3)
    prompt, times = [20, 21, 22], 400

    def third(engine: Engine) -> Counter[tuple[int, ...]]:
        done = engine.generate([prompt] * times, sampling)
        return Counter(item.tokens[1:2] for item in done if len(item.tokens) > 1)

    left, right = third(drafted), third(plain)
    assert drafted.counters.draft_tokens > drafted.counters.accepted_tokens > 0
    n, m = sum(left.values()), sum(right.values())
    for token in left | right:  # the difference of two fractions: five standard deviations of the worst case
        assert abs(left[token] / n - right[token] / m) < 5 * 0.5 * (1 / n + 1 / m) ** 0.5


def test_a_draft_that_costs_as_much_as_the_model_is_not_used() -> None:
    flat = StepCosts({n: 1.0 + 0.01 * n for n in range(1, 9)})
    assert choose_draft_length(acceptance=0.7, num_seqs=1, costs=flat, draft_s=0.05).num_tokens > 1
    assert choose_draft_length(acceptance=0.7, num_seqs=1, costs=flat, draft_s=1.0).num_tokens == 0


def test_a_draft_with_another_tokenizer_or_a_shorter_context_is_rejected(make: Make, tokenizer_json: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_json)
    short = dataclasses.replace(SPEC, context=48)
    draft = model_weights.LoadedModel("short", "", short, weights_of(short, 1), tokenizer_json)
    with pytest.raises(UserError, match="context of 48"):
        Engine("m", SPEC, weights_of(SPEC, 1), tokenizer, device="cpu", draft=draft)


def test_a_draft_with_other_tokens_is_rejected(tmp_path: Path, tokenizer_json: Path) -> None:
    other = tmp_path / "tokenizer.json"
    other.write_bytes(tokenizer_json.read_bytes().replace(b"endoftext", b"endoffile"))
    draft = model_weights.LoadedModel("other", "", SPEC, weights_of(SPEC, 1), other)
    with pytest.raises(UserError):
        Engine("m", SPEC, weights_of(SPEC, 1), Tokenizer.load(tokenizer_json), device="cpu", draft=draft)


def test_prompt_lookup_and_draft_model_compete_by_speedup(
    tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its own acceptance rate: here prompt lookup is always right and the draft model hardly ever."""
    tokenizer = Tokenizer.load(tokenizer_json)
    prompt, sampling = (30, 31, 32), SamplingParams(max_tokens=40)
    plain = Engine("m", SPEC, weights_of(SPEC, 1), tokenizer, device="cpu").generate([prompt], sampling)[0]
    expected = (*prompt, *plain.tokens)
    draft = model_weights.LoadedModel("draft", "", SPEC, weights_of(SPEC, 5), tokenizer_json)
    both = Engine("m", SPEC, weights_of(SPEC, 1), tokenizer, device="cpu", draft=draft, speculation="lookup")
    monkeypatch.setattr(
        proposer.PromptLookup, "propose", lambda _, ids, most: list(expected[len(ids) : len(ids) + most])
    )
    monkeypatch.setattr(
        proposer,
        "choose_draft_length",
        lambda **given: DraftLength(min(2, given["max_tokens"]), "the test requires it", speedup=given["acceptance"]),
    )
    assert both.generate([prompt], sampling)[0] == plain
    assert both._proposer is not None
    looked_up, drafted = both._proposer._global.lookup, both._proposer._global.model
    assert 0 < drafted.num_drafted <= 4, "the draft was tried, and left alone once it was known to be wrong"
    assert looked_up.num_accepted == looked_up.num_drafted > 20
