"""Prompt lookup, draft lengths that pay off, token budgets and decode-ahead limits."""

from __future__ import annotations

import random

import pytest

from lakh.server.scheduler import split_token_budget, steps_between_proposals, steps_to_launch
from lakh.server.speculation.policy import AcceptanceRate, StepCosts, choose_draft_length, expected_tokens
from lakh.server.speculation.prompt_lookup import PromptLookup


def test_prompt_lookup_proposes_what_followed_before() -> None:
    ids = [1, 2, 3, 4, 5, 6, 9, 2, 3]
    assert PromptLookup().propose(ids, 3) == [4, 5, 6]
    assert PromptLookup().propose([1, 2, 3, 4], 3) == []
    assert PromptLookup().propose([7, 8, 7, 8], 5) == [7, 8, 7, 8, 7]


def test_prompt_lookup_follows_growing_text() -> None:
    lookup, ids = PromptLookup(), [1, 2, 3]
    assert lookup.propose(ids, 2) == []
    ids += [50, 51, 1, 2, 3]
    assert lookup.propose(ids, 2) == [50, 51]
    ids += [60, 1, 2, 3]
    assert lookup.propose(ids, 1) == [60]  # the newest occurrence


def test_draft_tokens_pay_off_where_a_larger_step_costs_little() -> None:
    flat = StepCosts({n: 1.0 + 0.01 * n for n in range(1, 9)})
    steep = StepCosts({n: float(n) for n in range(1, 9)})
    assert choose_draft_length(acceptance=0.8, num_seqs=1, costs=flat).num_tokens == 7
    assert choose_draft_length(acceptance=0.8, num_seqs=1, costs=steep).num_tokens == 0
    assert "pays off" in choose_draft_length(acceptance=0.8, num_seqs=1, costs=steep).reason
    assert choose_draft_length(acceptance=0.01, num_seqs=1, costs=flat).num_tokens <= 1


def test_an_unmeasured_step_size_is_tried_once() -> None:
    costs = StepCosts({1: 1.0})
    assert choose_draft_length(acceptance=0.5, num_seqs=1, costs=costs).num_tokens == 1
    costs.record(2, 5.0)
    costs.record(8, 6.0)
    assert choose_draft_length(acceptance=0.5, num_seqs=1, costs=costs).num_tokens == 0
    assert choose_draft_length(acceptance=0.5, num_seqs=1, costs=StepCosts()).num_tokens == 0
    assert costs.of(5) == pytest.approx(5.5)


def test_the_cost_of_a_step_is_that_of_an_undisturbed_one() -> None:
    costs = StepCosts({1: 1.0})
    for number in range(40):
        costs.record(1, 3.0 if number % 2 else 0.5)  # every other step was disturbed
    assert costs.of(1) == pytest.approx(0.55, abs=0.06)


def test_acceptance_counts_only_verified_draft_tokens() -> None:
    record = AcceptanceRate()
    for _ in range(200):
        record.add(num_drafted=4, num_accepted=1)  # one accepted, one rejected, two not verified
    assert record.acceptance == pytest.approx(0.5, abs=0.1)
    assert (record.num_drafted, record.num_accepted) == (800, 200)
    assert expected_tokens(0.5, 2) == pytest.approx(1.75)


def test_decoding_sequences_go_first_and_prompts_share_the_rest() -> None:
    assert split_token_budget([1, 1, 50], 10).counts == [1, 1, 8]
    assert split_token_budget([50, 50], 10).counts == [10, 0]
    assert split_token_budget([1] * 20, 10).counts == [1] * 20  # a decoding sequence never waits
    assert split_token_budget([5], 0).counts == [1]  # at least one sequence advances
    assert "1 decode" in split_token_budget([1, 50], 10).reason


def test_with_prompts_first_decoding_sequences_wait_while_prompts_fill_a_step() -> None:
    assert split_token_budget([1, 50, 50], 60, prompts_first=True).counts == [0, 50, 10]
    assert split_token_budget([1, 50, 10], 60, prompts_first=True).counts == [0, 50, 10]
    assert split_token_budget([1, 50, 9], 60, prompts_first=True).counts == [1, 50, 9]  # the step has room
    assert split_token_budget([1] * 20, 10, prompts_first=True).counts == [1] * 20
    assert split_token_budget([1, 5], 0, prompts_first=True).counts == [0, 1]


def test_the_number_of_steps_ahead_depends_on_the_batch() -> None:
    rows = (1, 2, 8, 9, 31, 32, 128)
    assert [steps_to_launch([99] * count, 0) for count in rows] == [2, 1, 1, 1, 1, 2, 2]
    assert [steps_to_launch([99] * count, 1) for count in rows] == [2, 1, 1, 1, 1, 2, 2]
    assert [steps_to_launch([99] * count, 2) for count in rows] == [2, 0, 0, 0, 0, 2, 2]
    assert [steps_to_launch([99] * count, 4) for count in rows] == [0] * len(rows)
    assert [steps_between_proposals(count) for count in rows] == [8, 2, 2, 4, 4, 8, 8]


def test_no_step_is_launched_that_no_sequence_needs() -> None:
    assert [steps_to_launch([left], 0) for left in (0, 1, 2, 3)] == [0, 1, 2, 2]
    assert [steps_to_launch([3], unread) for unread in (2, 3)] == [1, 0]
    assert steps_to_launch([5, 1], 1) == 0  # a single sequence is faster alone
    assert steps_to_launch([0, 0], 0) == 0


def test_steps_may_exceed_the_end_of_some_sequences_but_not_of_most() -> None:
    assert steps_to_launch([1] * 20 + [50] * 44, 0) == 2
    assert steps_to_launch([1] * 40 + [50] * 24, 0) == 1  # needed by all
    assert steps_to_launch([0] * 31 + [50] * 33, 0) == 2
    assert steps_to_launch([0] * 32 + [50] * 32, 0) == 0


@pytest.mark.parametrize("seed", range(5))
def test_prompt_lookup_prefers_four_tokens_to_three_and_two(seed: int) -> None:
    numbers = random.Random(seed)
    lookup, ids = PromptLookup(), [0xD800, 0xDFFF]  # ids that are no characters of a text
    for _ in range(300):
        ids += [numbers.choice([1, 2, 3, 0xD800, 300_000]) for _ in range(numbers.randrange(1, 4))]
        expected: list[int] = []
        for size in (4, 3, 2):
            starts = [at for at in range(len(ids) - size) if ids[at : at + size] == ids[-size:]]
            if starts:
                expected = ids[starts[-1] + size :][:1]
                break
        assert lookup.propose(ids, 1) == expected


def test_a_draft_length_is_the_best_of_all() -> None:
    costs = StepCosts({1: 0.7, 2: 1.1, 8: 1.33, 15: 1.63, 32: 2.0, 64: 2.56})
    for acceptance in (0.3, 0.6, 0.9, 1.0):
        for num_seqs in (1, 2, 6, 8):
            rates = [expected_tokens(acceptance, n) / (costs.of(num_seqs * (n + 1)) or 1) for n in range(8)]
            found = choose_draft_length(acceptance=acceptance, num_seqs=num_seqs, costs=costs)
            assert rates[found.num_tokens] == pytest.approx(max(rates))
    costs.record(16, 9.0)
    assert costs.of(24) == pytest.approx(5.5)  # interpolated again after a record
