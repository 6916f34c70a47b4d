"""Greedy steps ahead of what is read: whoever comes, goes or ends meanwhile, answers are those of steps one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lakh.server.engine import Engine, Sampling
from lakh.server.row import Row
from lakh.server.schedule import steps_unguessed

MakeEngine = Callable[..., Engine]
MakeFlying = Callable[..., tuple[Engine, Any]]
AssertSame = Callable[..., None]
BEGINNING = list(range(20, 40))  # of many prompts: more than a block
prompts_st = st.builds(
    lambda shared, own: BEGINNING[:shared] + own,
    st.sampled_from([0, 17, 20]),
    st.lists(st.integers(7, 299), min_size=1, max_size=20),
)
# A prompt with its limit, when it comes (in steps of the engine), and when it is given up, if ever.
visits = st.tuples(prompts_st, st.integers(1, 40), st.integers(0, 12), st.sampled_from([None, None, 1, 3, 6]))
few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def submit(engine: Engine, prompt: list[int], limit: int) -> Row:
    row = engine.row(tuple(prompt), Sampling(max_tokens=limit))
    engine.submit(row)
    return row


def until_done(engine: Engine, *rows: Row) -> None:
    while any(row.finish_reason is None for row in rows):
        engine.step()


@pytest.mark.parametrize("num_rows", [1, 3, 12, 40])
def test_flights_change_no_answer(
    engine: Engine, make_flying: MakeFlying, assert_same: AssertSame, num_rows: int
) -> None:
    flying, decoder = make_flying()
    flying.max_rows = 64
    prompts = [[7 + row, *range(20, 20 + row % 12 * 3)] for row in range(num_rows)]
    sampling = Sampling(max_tokens=29)
    done = flying.generate(prompts, sampling)
    assert_same(prompts, sampling, done, engine.generate(prompts, sampling))
    assert flying.counts.drawn_tokens == sum(len(one.tokens) for one in done)
    assert sum(decoder.launches) > 15
    assert flying.pool.num_held == 0


@few
@given(coming=st.lists(visits, min_size=1, max_size=9), room=st.sampled_from([None, 1, 200]))
def test_whoever_comes_and_goes(
    engine: Engine, make_flying: MakeFlying, assert_same: AssertSame, coming: list[Any], room: int | None
) -> None:
    flying, _ = make_flying(options={"cache_tokens": room})
    rows: dict[int, Row] = {}
    for now in range(400):
        for number, (prompt, limit, arrives, stays) in enumerate(coming):
            if arrives == now:
                rows[number] = submit(flying, prompt, limit)
            elif stays is not None and now == arrives + stays:
                flying.abort(rows[number])
        flying.step()
        if len(rows) == len(coming) and all(row.finish_reason is not None for row in rows.values()):
            break
    for number, (prompt, limit, _, _) in enumerate(coming):
        found, sampling = rows[number].tokens, Sampling(max_tokens=limit)
        expected = engine.generate([prompt], sampling)[0].tokens
        if rows[number].finish_reason == "abort":
            expected = expected[: len(found)]
        assert_same([prompt], sampling, [tuple(found)], [expected])
    assert flying.pool.num_held == 0
    # What they left behind is what it says it is: read on where each ended.
    again, sampling = [[*prompt, *rows[at].tokens] for at, (prompt, *_) in enumerate(coming)], Sampling(max_tokens=6)
    for ids in again:
        assert_same([ids], sampling, flying.generate([ids], sampling), engine.generate([ids], sampling))


def test_a_newcomer_waits_for_what_is_launched_and_no_more(make_flying: MakeFlying) -> None:
    flying, decoder = make_flying()
    first = submit(flying, [30, 31, 32], 40)
    while sum(decoder.launches) < 8:
        flying.step()
    launched, drawn = sum(decoder.launches), len(first.tokens)
    assert launched > drawn - 1  # its first token is that of its prompt
    second = submit(flying, [50, 51], 4)
    while not second.tokens:
        flying.step()
    assert sum(decoder.launches) == launched
    assert len(first.tokens) == launched + 2  # all of them were of use
    until_done(flying, first, second)
    assert flying.pool.num_held == 0


def test_a_row_that_ends_leaves_while_the_others_go_on(make_flying: MakeFlying) -> None:
    flying, decoder = make_flying()
    rows = [submit(flying, [30 + row, 31], 3 if row == 0 else 20) for row in range(5)]
    until_done(flying, rows[0])
    assert decoder.num_bursts == 1
    assert rows[0].lease is None
    held = flying.pool.num_held
    assert flying.num_running == 4
    until_done(flying, *rows)
    assert decoder.num_bursts == 1  # one landing less than rows that ended
    assert held > flying.pool.num_held == 0


def test_rows_that_are_left_alone_are_seated_anew(make_flying: MakeFlying) -> None:
    flying, decoder = make_flying()
    rows = [submit(flying, [30 + row, 31], 4 if row < 3 else 16) for row in range(4)]
    until_done(flying, *rows)
    assert decoder.num_bursts == 2
    rows = [submit(flying, [40 + row, 31], 18) for row in range(4)]
    while decoder.num_bursts == 2:
        flying.step()
    flying.abort(*rows[:3])
    until_done(flying, *rows)
    assert decoder.num_bursts == 4


def test_when_all_have_gone_nothing_is_waited_for(make_flying: MakeFlying, engine: Engine) -> None:
    flying, decoder = make_flying()
    rows = [submit(flying, [30 + row, 31], 30) for row in range(2)]
    while not decoder.launches:
        flying.step()
    flying.abort(*rows)
    assert flying.pool.num_held == flying.num_running == 0
    reads = decoder.num_reads
    assert flying.step() == []
    assert decoder.num_reads == reads
    assert flying.generate([[60, 61]], Sampling(max_tokens=5)) == engine.generate([[60, 61]], Sampling(max_tokens=5))


def test_new_weights_in_flight(make_flying: MakeFlying, make_engine: MakeEngine) -> None:
    flying, decoder = make_flying()
    row = submit(flying, [30, 31, 32], 20)
    while len(row.tokens) < 5:
        flying.step()
    assert sum(decoder.launches) > len(row.tokens) - 1
    before = list(row.tokens)
    other = make_engine(seed=2)
    flying.swap(other.network)
    until_done(flying, row)
    rest = make_engine(seed=2).generate([[30, 31, 32, *before]], Sampling(max_tokens=20 - len(before)))[0]
    assert row.tokens == [*before, *rest.tokens]


def test_guesses_are_looked_for_between_short_flights(make_flying: MakeFlying, monkeypatch: pytest.MonkeyPatch) -> None:
    flying, decoder = make_flying(options={"speculation": "lookup"})
    asked = []
    monkeypatch.setattr(flying._guesser, "guess", lambda rows: asked.append(len(rows)) or {})
    row = submit(flying, [30, 31], 33)
    until_done(flying, row)
    assert decoder.num_bursts == 32 // steps_unguessed(1)
    assert sum(decoder.launches) == 32
    assert len(asked) == 1 + decoder.num_bursts


def test_a_flight_ends_with_the_context(make_flying: MakeFlying, engine: Engine) -> None:
    flying, decoder = make_flying()  # which asserts that no step goes past it
    long, short = list(range(20, 20 + flying.spec.context - 7)), [30, 31]
    rows = [submit(flying, long, 50), submit(flying, short, 40), submit(flying, [40, 41], 40)]
    until_done(flying, *rows)
    assert len(rows[0].tokens) == 7
    assert decoder.num_bursts > 1
    assert tuple(rows[1].tokens) == engine.generate([short], Sampling(max_tokens=40))[0].tokens
