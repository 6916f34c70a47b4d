"""Sampling: validation by name, and distributions that follow the parameters."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from lakh.errors import ConfigError
from lakh.server.sampling.tokens import (
    NoiseKeys,
    SamplingParams,
    gumbel_noise,
    penalise,
    probabilities,
    sample,
    token_logprobs,
)

REFUSED = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ("",)}, "stop"),
    ({"stop": "end"}, "stop"),
    ({"stop": ("x",) * 17}, "stop"),
    ({"logprobs": 21}, "logprobs"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_tokens": 65}, "min_tokens"),  # more than max_tokens
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
]


@pytest.mark.parametrize(("settings", "field"), REFUSED)
def test_invalid_sampling_parameters_are_rejected_by_name(settings: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**settings)  # type: ignore[arg-type]
    assert caught.value.where == field


def test_sampling_parameters_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().max_tokens = 3  # type: ignore[misc]


def draw(logits: torch.Tensor, sampling: SamplingParams, times: int = 2000) -> torch.Tensor:
    """The frequency of each token."""
    keys = NoiseKeys(sampling)
    rows = logits[None].expand(times, -1)
    picks = sample(rows, [sampling] * times, [keys[i] for i in range(times)])
    return torch.bincount(torch.tensor(picks), minlength=len(logits)) / times


def test_min_p_keeps_tokens_by_their_share_of_the_largest_probability() -> None:
    logits = torch.tensor([0.9, 0.5, 0.1, 0.04]).log()
    found = draw(logits, SamplingParams(temperature=1.0, min_p=0.1, seed=1))
    assert found[3] == 0
    assert (found[:3] > 0).all()
    assert draw(logits, SamplingParams(temperature=1.0, min_p=1.0, seed=1))[0] == 1


@pytest.mark.parametrize("top_p", [1e-46, 5e-324])
def test_a_top_p_that_rounds_to_zero_keeps_the_most_likely_token(top_p: float) -> None:
    logits = torch.tensor([0.0, 1.0, 3.0, 2.0])
    assert draw(logits, SamplingParams(temperature=1.0, top_p=top_p, seed=1), 20)[2] == 1


def test_penalties_are_those_of_vllm() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, 1.0])
    both = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    # 0 is in the prompt, 1 in both, 2 is generated twice, 3 is new; 9 is no id that can be sampled.
    found = penalise(logits, both, prompt=[0, 1, 9], generated=[1, 2, 2])
    assert found.tolist() == [1.0, -4.0 - 0.75, 0.5 - 1.0, 1.0]
    assert logits.tolist() == [2.0, -2.0, 1.0, 1.0]


def test_frequencies_follow_the_softmax_at_the_temperature() -> None:
    logits = torch.tensor([0.5, 2.0, -1.0, 1.0])
    for temperature in (0.5, 1.0, 2.0):
        found = draw(logits, SamplingParams(temperature=temperature, seed=11))
        expected = (logits / temperature).softmax(dim=-1)
        # The standard deviation of a fraction of 2000 samples is at most 0.0112; 4.5 of them.
        assert (found - expected).abs().max() < 0.05


def test_top_k_and_top_p_keep_the_most_likely() -> None:
    logits = torch.tensor([0.2, 0.4, 0.1, 0.3]).log()
    kept = draw(logits, SamplingParams(temperature=1.0, top_k=2, seed=1)) > 0
    assert kept.tolist() == [False, True, False, True]
    kept = draw(logits, SamplingParams(temperature=1.0, top_p=0.75, seed=1)) > 0  # 0.4 + 0.3 is not yet 0.75
    assert kept.tolist() == [True, True, False, True]
    kept = draw(logits, SamplingParams(temperature=1.0, top_p=0.01, seed=1)) > 0  # at least one id stays
    assert kept.tolist() == [False, True, False, False]


def test_sequences_with_different_settings_share_a_batch() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]] * 3)
    samplings = [
        SamplingParams(),
        SamplingParams(temperature=1.0, top_k=1, seed=1),
        SamplingParams(temperature=5.0, seed=3),
    ]
    keys = [0, 3, 9]
    alone = sample(logits[2:], samplings[2:], keys[2:])
    assert sample(logits, samplings, keys) == [1, 1, alone[0]]


@pytest.mark.parametrize("temperature", [1e-30, 1e-3])
def test_a_tiny_temperature_is_greedy_and_finite(temperature: float) -> None:
    logits = torch.tensor([[1.0, 2.0, -math.inf, 1.9]])
    assert sample(logits.expand(50, -1), [SamplingParams(temperature=temperature, seed=1)] * 50, range(50)) == [1] * 50


def test_noise_keys_are_a_function_of_seed_copy_and_position() -> None:
    sampling = SamplingParams(temperature=1.0, seed=3)
    late, early = NoiseKeys(sampling), NoiseKeys(sampling)
    assert [late[i] for i in (5, 0, 3)] == [[early[i] for i in range(6)][i] for i in (5, 0, 3)]
    assert NoiseKeys(sampling, copy=1)[0] != early[0] != NoiseKeys(SamplingParams(temperature=1.0, seed=4))[0]
    assert len({early[i] for i in range(100)}) == 100


def test_noise_is_gumbel_and_differs_between_keys_and_ids() -> None:
    made = gumbel_noise(torch.arange(400), 500).double()  # consecutive keys are the hardest to separate
    uniform = (-(-made).exp()).exp()
    # 200,000 numbers: a mean has a standard deviation of 0.00065, a correlation of 0.0022, a tenth of them of 134.
    assert abs(float(uniform.mean()) - 0.5) < 0.004
    assert (torch.histc(uniform, 10, 0, 1) - 20_000).abs().max() < 800
    for left, right in ((uniform[1:], uniform[:-1]), (uniform[:, 1:], uniform[:, :-1])):
        assert abs(float(torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1])) < 0.012
    other_half = gumbel_noise(torch.tensor([1 << 32]), 500)
    assert float((other_half - gumbel_noise(torch.tensor([0]), 500)).abs().min()) > 0


@pytest.mark.parametrize("limits", [{}, {"top_k": 500}, {"top_p": 0.9}])
def test_rounding_changes_a_token_with_the_total_variation_distance(limits: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2000, generator=generator)
    moved = logits + 1e-3 * torch.randn(2000, generator=generator)
    sampling, times = SamplingParams(temperature=1.0, seed=5, **limits), 2000  # type: ignore[arg-type]
    keys = [NoiseKeys(sampling)[i] for i in range(times)]
    left, right = (sample(scores.expand(times, -1), [sampling] * times, keys) for scores in (logits, moved))
    p, q = (probabilities(scores[None], [sampling])[0] for scores in (logits, moved))
    # At most twice the distance of the two distributions, and five standard deviations of a count. Inverting the
    # cumulative distribution would change 31, 350 and 11 tokens here.
    expected = times * float((p - q).abs().sum())
    assert sum(a != b for a, b in zip(left, right, strict=True)) < expected + 5 * expected**0.5


def test_logprobs_are_those_before_temperature() -> None:
    logits = torch.tensor([0.5, 2.0, -1.0, 1.0])
    found = token_logprobs(logits, 2, 2)
    expected = logits.log_softmax(dim=-1)
    assert found.logprob == pytest.approx(expected[2].item())
    assert [token for token, _ in found.top] == [1, 3]
    assert found.top[0][1] == pytest.approx(expected[1].item())
