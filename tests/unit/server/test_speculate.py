"""Guesses: looked up in the text so far, and made only where measurement says that they pay."""

from __future__ import annotations

import pytest

from lakh.server.guesses.speculate import Costs, Lookup, Record, decide, expected_tokens
from lakh.server.schedule import burst_steps, share_budget


def test_a_lookup_goes_on_as_the_text_did_before() -> None:
    ids = [1, 2, 3, 4, 5, 6, 9, 2, 3]
    assert Lookup().guess(ids, 3) == [4, 5, 6]
    assert Lookup().guess([1, 2, 3, 4], 3) == []
    assert Lookup().guess([7, 8, 7, 8], 5) == [7, 8, 7, 8, 7]


def test_a_lookup_learns_as_the_text_grows() -> None:
    lookup, ids = Lookup(), [1, 2, 3]
    assert lookup.guess(ids, 2) == []
    ids += [50, 51, 1, 2, 3]
    assert lookup.guess(ids, 2) == [50, 51]
    ids += [60, 1, 2, 3]
    assert lookup.guess(ids, 1) == [60]  # the newest occurrence


def test_guesses_pay_where_a_larger_step_costs_little() -> None:
    flat = Costs({n: 1.0 + 0.01 * n for n in range(1, 9)})
    steep = Costs({n: float(n) for n in range(1, 9)})
    assert decide(acceptance=0.8, num_rows=1, costs=flat).num_guesses == 7
    assert decide(acceptance=0.8, num_rows=1, costs=steep).num_guesses == 0
    assert "pays" in decide(acceptance=0.8, num_rows=1, costs=steep).reason
    assert decide(acceptance=0.01, num_rows=1, costs=flat).num_guesses <= 1


def test_what_was_never_measured_is_tried_once() -> None:
    costs = Costs({1: 1.0})
    assert decide(acceptance=0.5, num_rows=1, costs=costs).num_guesses == 1
    costs.record(2, 5.0)
    costs.record(8, 6.0)
    assert decide(acceptance=0.5, num_rows=1, costs=costs).num_guesses == 0
    assert decide(acceptance=0.5, num_rows=1, costs=Costs()).num_guesses == 0
    assert costs.of(5) == pytest.approx(5.5)


def test_the_cost_of_a_step_is_that_of_an_undisturbed_one() -> None:
    costs = Costs({1: 1.0})
    for number in range(40):
        costs.record(1, 3.0 if number % 2 else 0.5)  # every other step was disturbed
    assert costs.of(1) == pytest.approx(0.55, abs=0.06)


def test_acceptance_counts_only_guesses_that_had_a_chance() -> None:
    record = Record()
    for _ in range(200):
        record.add(drafted=4, kept=1)  # one right, one wrong, two never looked at
    assert record.acceptance == pytest.approx(0.5, abs=0.1)
    assert (record.drafted, record.kept) == (800, 200)
    assert expected_tokens(0.5, 2) == pytest.approx(1.75)


def test_rows_that_draw_go_first_and_prompts_share_the_rest() -> None:
    assert share_budget([1, 1, 50], 10).counts == [1, 1, 8]
    assert share_budget([50, 50], 10).counts == [10, 0]
    assert share_budget([1] * 20, 10).counts == [1] * 20  # a row that draws never waits
    assert share_budget([5], 0).counts == [1]  # and something always moves
    assert "1 rows draw" in share_budget([1, 50], 10).reason


def test_bursts_are_short_where_a_newcomer_would_wait_and_few_share_the_work() -> None:
    assert [burst_steps([99] * rows) for rows in (1, 2, 8, 9, 31, 32, 128)] == [8, 2, 2, 4, 4, 8, 8]
    assert [burst_steps([left]) for left in (1, 3, 9)] == [1, 3, 8]


def test_a_burst_goes_past_the_end_of_some_rows_but_not_of_most() -> None:
    assert burst_steps([1] + [50] * 63) == 8
    assert burst_steps([1] * 38 + [50] * 26) == 2
    assert burst_steps([1] * 63 + [50]) == 1
    assert burst_steps([1, 2]) == 2
    assert burst_steps([1, 1]) == 1
