"""Greedy steps ahead of what is read: whoever comes, goes or ends meanwhile, answers are those of steps one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lakh.server.engine import Engine, SamplingParams
from lakh.server.model.block_pool import BLOCK_TOKENS
from lakh.server.model.inference import SequenceChunk
from lakh.server.model.kv_cache import PagedCache
from lakh.server.scheduler import steps_between_proposals
from lakh.server.sequence import Sequence

MakeEngine = Callable[..., Engine]
MakeFlying = Callable[..., tuple[Engine, Any]]
AssertSame = Callable[..., None]
BEGINNING = list(range(20, 40))  # of many prompts: more than a block
prompts_st = st.builds(
    lambda shared, own: BEGINNING[:shared] + own,
    st.sampled_from([0, 17, 20]),
    st.lists(st.integers(7, 299), min_size=1, max_size=20),
)
# A prompt with its limit, when it comes (in steps of the engine), when it is given up, if ever, and what token ends it.
visits = st.tuples(
    prompts_st,
    st.integers(1, 40),
    st.integers(0, 12),
    st.sampled_from([None, None, 1, 3, 6]),
    st.sampled_from([0, 66, 164, 200]),
)
few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def submit(engine: Engine, prompt: list[int], limit: int, eot: int = 0) -> Sequence:
    seq = engine.make_sequence(tuple(prompt), SamplingParams(max_tokens=limit))
    seq.eot = eot
    engine.submit(seq)
    return seq


def assert_remembers_what_it_says(found: Engine, engine: Engine) -> None:
    """Every remembered block holds the keys and values of the tokens on its path; no block has two owners or none."""
    owned = [*found.pool._free]
    for seq in found.scheduler.running:
        assert seq.lease is not None
        owned += seq.lease.blocks[len(seq.lease.nodes) :]
    paths = [(root, []) for root in found.pool._roots.values()]
    while paths:
        node, before = paths.pop()
        for child in (child for children in node.children.values() for child in children):
            ids = [*before, *child.tokens]
            fresh = PagedCache(engine.spec, 8, device=engine.device, dtype=torch.float32)
            with torch.inference_mode():
                engine.network.forward([SequenceChunk(ids, 0, list(range(8)), 1)], fresh)
            here, there = child.block * BLOCK_TOKENS, len(before)
            for ours, theirs in (
                (found.cache.keys_LKCD, fresh.keys_LKCD),
                (found.cache.values_LKCD, fresh.values_LKCD),
            ):
                size = len(child.tokens)
                gap = ours[:, :, here : here + size] - theirs[:, :, there : there + size]
                assert gap.abs().max() < 1e-2, ids
            owned.append(child.block)
            paths.append((child, ids))
    assert sorted(owned) == list(range(found.pool.num_blocks))


def until_done(engine: Engine, *seqs: Sequence) -> None:
    while any(seq.finish_reason is None for seq in seqs):
        engine.step()


@pytest.mark.parametrize("num_rows", [1, 3, 12, 40])
def test_flights_change_no_answer(
    engine: Engine, make_flying: MakeFlying, assert_same: AssertSame, num_rows: int
) -> None:
    flying, decoder = make_flying()
    flying.max_seqs = 64
    prompts = [[7 + seq, *range(20, 20 + seq % 12 * 3)] for seq in range(num_rows)]
    sampling = SamplingParams(max_tokens=29)
    done = flying.generate(prompts, sampling)
    assert_same(prompts, sampling, done, engine.generate(prompts, sampling))
    assert flying.counters.generated_tokens == sum(len(one.tokens) for one in done)
    assert sum(decoder.launches) > 15
    assert flying.pool.num_used == 0


@few
@given(coming=st.lists(visits, min_size=1, max_size=9), room=st.sampled_from([None, 1, 200]))
def test_whoever_comes_and_goes(
    engine: Engine, make_flying: MakeFlying, assert_same: AssertSame, coming: list[Any], room: int | None
) -> None:
    flying, _ = make_flying(options={"cache_tokens": room})
    seqs: dict[int, Sequence] = {}
    for now in range(400):
        for number, (prompt, limit, arrives, stays, eot) in enumerate(coming):
            if arrives == now:
                seqs[number] = submit(flying, prompt, limit, eot)
            elif stays is not None and now == arrives + stays:
                flying.abort(seqs[number])
        flying.step()
        if now % 7 == 0:
            assert_remembers_what_it_says(flying, engine)
        if len(seqs) == len(coming) and all(seq.finish_reason is not None for seq in seqs.values()):
            break
    for number, (prompt, limit, _, _, eot) in enumerate(coming):
        found, sampling = seqs[number].tokens, SamplingParams(max_tokens=limit)
        alone = submit(engine, prompt, limit, eot)
        until_done(engine, alone)
        expected = alone.tokens
        if seqs[number].finish_reason == "abort":
            expected = expected[: len(found)]
        assert_same([prompt], sampling, [tuple(found)], [tuple(expected)])
    assert flying.pool.num_used == 0
    assert_remembers_what_it_says(flying, engine)


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
    assert flying.pool.num_used == 0


def test_a_row_that_ends_leaves_while_the_others_go_on(make_flying: MakeFlying) -> None:
    flying, decoder = make_flying()
    seqs = [submit(flying, [30 + seq, 31], 3 if seq == 0 else 20) for seq in range(5)]
    until_done(flying, seqs[0])
    assert decoder.num_bursts == 1
    assert seqs[0].lease is None
    held = flying.pool.num_used
    assert flying.num_running == 4
    until_done(flying, *seqs)
    assert decoder.num_bursts == 1  # one landing less than seqs that ended
    assert held > flying.pool.num_used == 0


def test_rows_that_are_left_alone_are_seated_anew(make_flying: MakeFlying) -> None:
    flying, decoder = make_flying()
    seqs = [submit(flying, [30 + seq, 31], 4 if seq < 3 else 16) for seq in range(4)]
    until_done(flying, *seqs)
    assert decoder.num_bursts == 2
    seqs = [submit(flying, [40 + seq, 31], 18) for seq in range(4)]
    while decoder.num_bursts == 2:
        flying.step()
    flying.abort(*seqs[:3])
    until_done(flying, *seqs)
    assert decoder.num_bursts == 4


def test_when_all_have_gone_nothing_is_waited_for(make_flying: MakeFlying, engine: Engine) -> None:
    flying, decoder = make_flying()
    seqs = [submit(flying, [30 + seq, 31], 30) for seq in range(2)]
    while not decoder.launches:
        flying.step()
    flying.abort(*seqs)
    assert flying.pool.num_used == flying.num_running == 0
    reads = decoder.num_reads
    assert flying.step() == []
    assert decoder.num_reads == reads
    assert flying.generate([[60, 61]], SamplingParams(max_tokens=5)) == engine.generate(
        [[60, 61]], SamplingParams(max_tokens=5)
    )


def test_new_weights_in_flight(make_flying: MakeFlying, make_engine: MakeEngine) -> None:
    flying, decoder = make_flying()
    seq = submit(flying, [30, 31, 32], 20)
    while len(seq.tokens) < 5:
        flying.step()
    assert sum(decoder.launches) > len(seq.tokens) - 1
    before = list(seq.tokens)
    other = make_engine(seed=2)
    flying.swap(other.network)
    until_done(flying, seq)
    rest = make_engine(seed=2).generate([[30, 31, 32, *before]], SamplingParams(max_tokens=20 - len(before)))[0]
    assert seq.tokens == [*before, *rest.tokens]


def test_guesses_are_looked_for_between_short_flights(make_flying: MakeFlying, monkeypatch: pytest.MonkeyPatch) -> None:
    flying, decoder = make_flying(options={"speculation": "lookup"})
    asked = []
    monkeypatch.setattr(flying._proposer, "propose", lambda seqs: asked.append(len(seqs)) or {})
    seq = submit(flying, [30, 31], 33)
    until_done(flying, seq)
    assert decoder.num_bursts == 32 // steps_between_proposals(1)
    assert sum(decoder.launches) == 32
    assert len(asked) == 1 + decoder.num_bursts


def test_a_flight_ends_with_the_context(make_flying: MakeFlying, engine: Engine) -> None:
    flying, decoder = make_flying()  # which asserts that no step goes past it
    long, short = list(range(20, 20 + flying.spec.context - 7)), [30, 31]
    seqs = [submit(flying, long, 50), submit(flying, short, 40), submit(flying, [40, 41], 40)]
    until_done(flying, *seqs)
    assert len(seqs[0].tokens) == 7
    assert decoder.num_bursts > 1
    assert tuple(seqs[1].tokens) == engine.generate([short], SamplingParams(max_tokens=40))[0].tokens


def test_a_stream_says_all_that_it_would_step_by_step(make_flying: MakeFlying, engine: Engine) -> None:
    flying, decoder = make_flying()
    sampling = SamplingParams(max_tokens=13)
    pieces, expected = list(flying.stream([30, 31], sampling)), engine.generate([[30, 31]], sampling)[0]
    assert "".join(piece.text for piece in pieces) == expected.text
    assert sum((piece.tokens for piece in pieces), ()) == expected.tokens
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]
    assert decoder.launches


def test_a_deadline_is_kept_in_flight(make_flying: MakeFlying) -> None:
    now = [0.0]
    flying, decoder = make_flying(options={"clock": lambda: now[0]})
    late = flying.make_sequence((30, 31), SamplingParams(max_tokens=40), deadline_s=5.0)
    flying.submit(late)
    other = submit(flying, [40, 41], 12)
    while not decoder.launches:
        flying.step()
    now[0] = 6.0
    assert late in flying.step()
    assert late.finish_reason == "abort"
    assert late.lease is None
    until_done(flying, other)


def test_what_is_launched_is_counted_and_what_is_drawn(make_flying: MakeFlying) -> None:
    flying, decoder = make_flying()
    sizes: list[int] = []
    flying._observer = type("Sizes", (), {"observe_step": staticmethod(sizes.append)})()
    seqs = [submit(flying, [30 + seq, 31], 4 if seq else 11) for seq in range(3)]
    until_done(flying, *seqs)
    launched = sum(decoder.launches)
    assert flying.counters.steps == launched + 1  # and that of the prompts
    assert flying.counters.generated_tokens == 19
    # Three seqs as long as two of them draw, then one; six tokens of prompts.
    assert flying.counters.computed_tokens == 6 + 3 * 3 + (launched - 3)
    assert (len(sizes), sum(sizes)) == (flying.counters.steps, flying.counters.computed_tokens)


def test_a_first_token_may_come_in_flight(make_flying: MakeFlying) -> None:
    now = [1.0]
    flying, decoder = make_flying(options={"clock": lambda: now[0]})
    seq = submit(flying, [30], 9)
    flying.step()
    assert decoder.launches
    assert seq.tokens
    assert seq.first_token_s == 1.0


def test_a_row_that_may_draw_nothing_more_takes_no_flight(make_flying: MakeFlying) -> None:
    flying, _ = make_flying()
    seqs = [submit(flying, [30 + seq], 5) for seq in range(2)]
    seqs[0].max_new_tokens = 0
    until_done(flying, *seqs)
    assert [len(seq.tokens) for seq in seqs] == [1, 5]


def test_more_rows_than_a_decoder_has_go_step_by_step(make_flying: MakeFlying) -> None:
    flying, decoder = make_flying()
    decoder.max_sequences = 2
    until_done(flying, *[submit(flying, [30 + seq, 31], 5) for seq in range(3)])
    assert not decoder.launches


def test_room_is_left_for_those_who_come(make_flying: MakeFlying) -> None:
    flying, decoder = make_flying(options={"cache_tokens": 100})
    assert flying.pool.num_blocks == 8
    decoder.max_steps = 64
    first = [submit(flying, [30 + seq, 31], 60) for seq in range(2)]
    for _ in range(3):
        flying.step()
    assert decoder.num_bursts == 1
    assert [len(seq.lease.blocks) for seq in first if seq.lease is not None] == [2, 2]
    newcomer = submit(flying, list(range(50, 66)), 3)
    until_done(flying, newcomer)
    assert not any(seq.finish_reason for seq in first)


def test_no_block_is_taken_that_a_row_cannot_fill(make_flying: MakeFlying) -> None:
    flying, decoder = make_flying()
    short, long = submit(flying, [30], 6), submit(flying, [40], 40)
    flying.step()
    assert decoder.launches
    assert [len(seq.lease.blocks) for seq in (short, long) if seq.lease is not None] == [1, 2]


@pytest.mark.parametrize("where", ["read", "append"])
def test_after_an_interrupt_nothing_is_lost(
    make_flying: MakeFlying, engine: Engine, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flying, _ = make_flying()
    seqs = [submit(flying, [30 + seq, 31], 21) for seq in range(3)]
    while len(seqs[0].tokens) < 4:
        flying.step()

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    if where == "read":
        monkeypatch.setattr(flying._decode_ahead._burst, "read", interrupted)
    else:
        monkeypatch.setattr(seqs[1], "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        flying.step()
    flying.abort(seqs[0])
    until_done(flying, *seqs)
    for seq in seqs[1:]:
        assert tuple(seq.tokens) == engine.generate([seq.prompt], SamplingParams(max_tokens=21))[0].tokens
    assert_remembers_what_it_says(flying, engine)


def test_who_ended_before_an_interrupt_has_left(make_flying: MakeFlying, monkeypatch: pytest.MonkeyPatch) -> None:
    flying, _ = make_flying()
    first, second, third = (submit(flying, [30 + seq, 31], 21) for seq in range(3))
    while len(first.tokens) < 4:
        flying.step()

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    first.eot = -1
    first.max_new_tokens = len(first.tokens) + 1  # its next token ends it, before the second gets its own
    monkeypatch.setattr(second, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        flying.step()
    assert first.finish_reason == "length"
    assert flying.num_running == 2
    flying.abort(second)
    until_done(flying, third)
    assert flying.num_running == 0
    assert flying.pool.num_used == 0


def test_a_slow_reader_does_not_make_steps_dear(make_flying: MakeFlying, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    flying, decoder = make_flying(options={"speculation": "lookup", "clock": lambda: now[0]})
    recorded: list[tuple[int, float]] = []
    monkeypatch.setattr(flying._proposer, "propose", lambda seqs: {})
    monkeypatch.setattr(flying._proposer, "record_step", lambda seqs, seconds: recorded.append((seqs, seconds)))
    forward = flying.runner.forward

    def slow(segments: Any) -> Any:
        now[0] += 0.5
        return forward(segments)

    monkeypatch.setattr(flying.runner, "forward", slow)
    seq = submit(flying, [30], 16)
    while seq.finish_reason is None:
        flying.step()
        now[0] += 100.0  # somebody reads
    assert recorded == [(1, 0.5)] * 2
    assert sum(decoder.launches) == 16
