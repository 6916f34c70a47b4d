"""Decode-ahead: completions equal those of single steps, whatever arrives, leaves or finishes meanwhile."""

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
MakeAheadEngine = Callable[..., tuple[Engine, Any]]
AssertSame = Callable[..., None]
BEGINNING = list(range(20, 40))  # shared by many prompts: more than a block
prompts_st = st.builds(
    lambda shared, own: BEGINNING[:shared] + own,
    st.sampled_from([0, 17, 20]),
    st.lists(st.integers(7, 299), min_size=1, max_size=20),
)
# A prompt with max_tokens, the step in which it arrives, the step in which it is aborted, if any, and its end token.
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
    seq.end_ids = (eot,)
    engine.submit(seq)
    return seq


def assert_cached_blocks_are_correct(found: Engine, engine: Engine) -> None:
    """Every cached block holds the keys and values of the tokens on its path; every block has exactly one owner."""
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
def test_decode_ahead_changes_no_completion(
    engine: Engine, make_ahead_engine: MakeAheadEngine, assert_same: AssertSame, num_rows: int
) -> None:
    ahead_engine, decoder = make_ahead_engine()
    ahead_engine.max_seqs = 64
    prompts = [[7 + seq, *range(20, 20 + seq % 12 * 3)] for seq in range(num_rows)]
    sampling = SamplingParams(max_tokens=29)
    done = ahead_engine.generate(prompts, sampling)
    assert_same(prompts, sampling, done, engine.generate(prompts, sampling))
    assert ahead_engine.counters.generated_tokens == sum(len(one.tokens) for one in done)
    assert sum(decoder.launches) > 15
    assert ahead_engine.pool.num_used == 0


@pytest.mark.slow
@few
@given(coming=st.lists(visits, min_size=1, max_size=9), room=st.sampled_from([None, 1, 200]))
def test_sequences_that_arrive_and_leave_during_decode_ahead(
    engine: Engine, make_ahead_engine: MakeAheadEngine, assert_same: AssertSame, coming: list[Any], room: int | None
) -> None:
    ahead_engine, _ = make_ahead_engine(options={"cache_tokens": room})
    seqs: dict[int, Sequence] = {}
    for now in range(400):
        for number, (prompt, limit, arrives, stays, eot) in enumerate(coming):
            if arrives == now:
                seqs[number] = submit(ahead_engine, prompt, limit, eot)
            elif stays is not None and now == arrives + stays:
                ahead_engine.abort(seqs[number])
        ahead_engine.step()
        if now % 7 == 0:
            assert_cached_blocks_are_correct(ahead_engine, engine)
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
    assert ahead_engine.pool.num_used == 0
    assert_cached_blocks_are_correct(ahead_engine, engine)


def test_a_new_request_waits_only_for_launched_steps(make_ahead_engine: MakeAheadEngine) -> None:
    ahead_engine, decoder = make_ahead_engine()
    first = submit(ahead_engine, [30, 31, 32], 40)
    while sum(decoder.launches) < 8:
        ahead_engine.step()
    launched, generated = sum(decoder.launches), len(first.tokens)
    assert launched > generated - 1  # the first token comes from the prompt's step
    second = submit(ahead_engine, [50, 51], 4)
    while not second.tokens:
        ahead_engine.step()
    assert sum(decoder.launches) == launched
    assert len(first.tokens) == launched + 2  # none was wasted
    until_done(ahead_engine, first, second)
    assert ahead_engine.pool.num_used == 0


def test_a_finished_sequence_leaves_while_others_continue(make_ahead_engine: MakeAheadEngine) -> None:
    ahead_engine, decoder = make_ahead_engine()
    seqs = [submit(ahead_engine, [30 + seq, 31], 3 if seq == 0 else 20) for seq in range(5)]
    until_done(ahead_engine, seqs[0])
    assert decoder.num_bursts == 1
    assert seqs[0].lease is None
    held = ahead_engine.pool.num_used
    assert ahead_engine.num_running == 4
    until_done(ahead_engine, *seqs)
    assert decoder.num_bursts == 1  # one burst for sequences that finish at different steps
    assert held > ahead_engine.pool.num_used == 0


def test_remaining_sequences_get_a_new_batch(make_ahead_engine: MakeAheadEngine) -> None:
    ahead_engine, decoder = make_ahead_engine()
    seqs = [submit(ahead_engine, [30 + seq, 31], 4 if seq < 3 else 16) for seq in range(4)]
    until_done(ahead_engine, *seqs)
    assert decoder.num_bursts == 2
    seqs = [submit(ahead_engine, [40 + seq, 31], 18) for seq in range(4)]
    while decoder.num_bursts == 2:
        ahead_engine.step()
    ahead_engine.abort(*seqs[:3])
    until_done(ahead_engine, *seqs)
    assert decoder.num_bursts == 4


def test_nothing_is_read_after_all_sequences_were_aborted(make_ahead_engine: MakeAheadEngine, engine: Engine) -> None:
    ahead_engine, decoder = make_ahead_engine()
    seqs = [submit(ahead_engine, [30 + seq, 31], 30) for seq in range(2)]
    while not decoder.launches:
        ahead_engine.step()
    ahead_engine.abort(*seqs)
    assert ahead_engine.pool.num_used == ahead_engine.num_running == 0
    reads = decoder.num_reads
    assert ahead_engine.step() == []
    assert decoder.num_reads == reads
    assert ahead_engine.generate([[60, 61]], SamplingParams(max_tokens=5)) == engine.generate(
        [[60, 61]], SamplingParams(max_tokens=5)
    )


def test_new_weights_during_decode_ahead(make_ahead_engine: MakeAheadEngine, make_engine: MakeEngine) -> None:
    ahead_engine, decoder = make_ahead_engine()
    seq = submit(ahead_engine, [30, 31, 32], 20)
    while len(seq.tokens) < 5:
        ahead_engine.step()
    assert sum(decoder.launches) > len(seq.tokens) - 1
    before = list(seq.tokens)
    other = make_engine(seed=2)
    ahead_engine.swap(other.network)
    until_done(ahead_engine, seq)
    rest = make_engine(seed=2).generate([[30, 31, 32, *before]], SamplingParams(max_tokens=20 - len(before)))[0]
    assert seq.tokens == [*before, *rest.tokens]


def test_draft_tokens_are_proposed_between_short_bursts(
    make_ahead_engine: MakeAheadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead_engine, decoder = make_ahead_engine(options={"speculation": "lookup"})
    asked = []
    monkeypatch.setattr(ahead_engine._proposer, "propose", lambda seqs: asked.append(len(seqs)) or {})
    seq = submit(ahead_engine, [30, 31], 33)
    until_done(ahead_engine, seq)
    assert decoder.num_bursts == 32 // steps_between_proposals(1)
    assert sum(decoder.launches) == 32
    assert len(asked) == 1 + decoder.num_bursts


def test_decode_ahead_ends_with_the_context(make_ahead_engine: MakeAheadEngine, engine: Engine) -> None:
    ahead_engine, decoder = make_ahead_engine()  # asserts that no step exceeds the context
    long, short = list(range(20, 20 + ahead_engine.spec.context - 7)), [30, 31]
    seqs = [submit(ahead_engine, long, 50), submit(ahead_engine, short, 40), submit(ahead_engine, [40, 41], 40)]
    until_done(ahead_engine, *seqs)
    assert len(seqs[0].tokens) == 7
    assert decoder.num_bursts > 1
    assert tuple(seqs[1].tokens) == engine.generate([short], SamplingParams(max_tokens=40))[0].tokens


def test_a_stream_has_the_same_text_as_step_by_step(make_ahead_engine: MakeAheadEngine, engine: Engine) -> None:
    ahead_engine, decoder = make_ahead_engine()
    sampling = SamplingParams(max_tokens=13)
    pieces, expected = list(ahead_engine.stream([30, 31], sampling)), engine.generate([[30, 31]], sampling)[0]
    assert "".join(piece.text for piece in pieces) == expected.text
    assert sum((piece.tokens for piece in pieces), ()) == expected.tokens
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]
    assert decoder.launches


def test_a_deadline_holds_during_decode_ahead(make_ahead_engine: MakeAheadEngine) -> None:
    now = [0.0]
    ahead_engine, decoder = make_ahead_engine(options={"clock": lambda: now[0]})
    late = ahead_engine.make_sequence((30, 31), SamplingParams(max_tokens=40), deadline_s=5.0)
    ahead_engine.submit(late)
    other = submit(ahead_engine, [40, 41], 12)
    while not decoder.launches:
        ahead_engine.step()
    now[0] = 6.0
    assert late in ahead_engine.step()
    assert late.finish_reason == "abort"
    assert late.lease is None
    until_done(ahead_engine, other)


def test_counters_count_launched_steps_and_generated_tokens(make_ahead_engine: MakeAheadEngine) -> None:
    ahead_engine, decoder = make_ahead_engine()
    sizes: list[int] = []
    methods = {"observe_step": staticmethod(sizes.append), "observe_completion": lambda *_: None}
    ahead_engine.observe(type("Sizes", (), methods)())
    seqs = [submit(ahead_engine, [30 + seq, 31], 4 if seq else 11) for seq in range(3)]
    until_done(ahead_engine, *seqs)
    launched = sum(decoder.launches)
    assert ahead_engine.counters.steps == launched + 1  # and the prompts' step
    assert ahead_engine.counters.generated_tokens == 19
    # Three sequences while two of them decode, then one; six prompt tokens.
    assert ahead_engine.counters.computed_tokens == 6 + 3 * 3 + (launched - 3)
    assert (len(sizes), sum(sizes)) == (ahead_engine.counters.steps, ahead_engine.counters.computed_tokens)


def test_a_first_token_may_come_from_decode_ahead(make_ahead_engine: MakeAheadEngine) -> None:
    now = [1.0]
    ahead_engine, decoder = make_ahead_engine(options={"clock": lambda: now[0]})
    seq = submit(ahead_engine, [30], 9)
    ahead_engine.step()
    assert decoder.launches
    assert seq.tokens
    assert seq.first_token_s == 1.0


def test_a_sequence_without_tokens_left_starts_no_decode_ahead(make_ahead_engine: MakeAheadEngine) -> None:
    ahead_engine, _ = make_ahead_engine()
    seqs = [submit(ahead_engine, [30 + seq], 5) for seq in range(2)]
    seqs[0].max_new_tokens = 0
    until_done(ahead_engine, *seqs)
    assert [len(seq.tokens) for seq in seqs] == [1, 5]


def test_more_sequences_than_the_decoder_holds_decode_step_by_step(make_ahead_engine: MakeAheadEngine) -> None:
    ahead_engine, decoder = make_ahead_engine()
    decoder.max_sequences = 2
    until_done(ahead_engine, *[submit(ahead_engine, [30 + seq, 31], 5) for seq in range(3)])
    assert not decoder.launches


def test_blocks_are_left_for_new_requests(make_ahead_engine: MakeAheadEngine) -> None:
    ahead_engine, decoder = make_ahead_engine(options={"cache_tokens": 100})
    assert ahead_engine.pool.num_blocks == 8
    decoder.max_steps = 64
    first = [submit(ahead_engine, [30 + seq, 31], 60) for seq in range(2)]
    for _ in range(3):
        ahead_engine.step()
    assert decoder.num_bursts == 1
    assert [len(seq.lease.blocks) for seq in first if seq.lease is not None] == [2, 2]
    newcomer = submit(ahead_engine, list(range(50, 66)), 3)
    until_done(ahead_engine, newcomer)
    assert not any(seq.finish_reason for seq in first)


@pytest.mark.parametrize(("num_seqs", "bursts"), [(1, 1), (3, 2)])
def test_a_decode_ahead_of_few_sequences_is_longer(
    num_seqs: int, bursts: int, make_ahead_engine: MakeAheadEngine
) -> None:
    ahead_engine, decoder = make_ahead_engine()
    decoder.max_steps = 128
    until_done(ahead_engine, *[submit(ahead_engine, [30 + seq, 31], 100) for seq in range(num_seqs)])
    assert decoder.num_bursts == bursts


def test_no_block_is_reserved_beyond_max_tokens(make_ahead_engine: MakeAheadEngine) -> None:
    ahead_engine, decoder = make_ahead_engine()
    short, long = submit(ahead_engine, [30], 6), submit(ahead_engine, [40], 40)
    ahead_engine.step()
    assert decoder.launches
    assert [len(seq.lease.blocks) for seq in (short, long) if seq.lease is not None] == [1, 2]


def test_an_asynchronous_step_calls_meanwhile_before_tokens_are_read(
    make_ahead_engine: MakeAheadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead_engine, decoder = make_ahead_engine()
    seq, seen = submit(ahead_engine, [30, 31], 9), []
    launch = ahead_engine.runner.launch

    def launched(chunks: Any) -> Any:
        seen.append("launch")
        return launch(chunks)

    def meanwhile() -> None:
        seen.append((len(seq.tokens), sum(decoder.launches), decoder.num_reads))

    monkeypatch.setattr(ahead_engine.runner, "launch", launched)
    ahead_engine.step(meanwhile)
    assert seen == ["launch"]  # on a CPU the step is done when it is launched
    ahead_engine.is_asynchronous = True
    other = submit(ahead_engine, [40, 41], 9)
    ahead_engine.step(meanwhile)
    assert seen[1:] == ["launch", (1, 0, 0)]
    ahead_engine.step(meanwhile)
    assert seen[3:] == [(2, 2, 0)]
    until_done(ahead_engine, seq, other)
    ahead_engine.step(meanwhile)
    assert len(seen) == 4  # nothing to compute


@pytest.mark.parametrize("where", ["read", "append"])
def test_an_interrupt_loses_no_tokens(
    make_ahead_engine: MakeAheadEngine, engine: Engine, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead_engine, _ = make_ahead_engine()
    seqs = [submit(ahead_engine, [30 + seq, 31], 21) for seq in range(3)]
    while len(seqs[0].tokens) < 4:
        ahead_engine.step()

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    if where == "read":
        monkeypatch.setattr(ahead_engine._decode_ahead._burst, "read", interrupted)
    else:
        monkeypatch.setattr(seqs[1], "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ahead_engine.step()
    ahead_engine.abort(seqs[0])
    until_done(ahead_engine, *seqs)
    for seq in seqs[1:]:
        assert tuple(seq.tokens) == engine.generate([seq.prompt], SamplingParams(max_tokens=21))[0].tokens
    assert_cached_blocks_are_correct(ahead_engine, engine)


def test_sequences_finished_before_an_interrupt_have_left(
    make_ahead_engine: MakeAheadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead_engine, _ = make_ahead_engine()
    first, second, third = (submit(ahead_engine, [30 + seq, 31], 21) for seq in range(3))
    while len(first.tokens) < 4:
        ahead_engine.step()

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    first.end_ids = ()
    first.max_new_tokens = len(first.tokens) + 1  # its next token finishes it, before the second gets its token
    monkeypatch.setattr(second, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ahead_engine.step()
    assert first.finish_reason == "length"
    assert ahead_engine.num_running == 2
    ahead_engine.abort(second)
    until_done(ahead_engine, third)
    assert ahead_engine.num_running == 0
    assert ahead_engine.pool.num_used == 0


def test_a_slow_reader_does_not_increase_the_measured_step_cost(
    make_ahead_engine: MakeAheadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    ahead_engine, decoder = make_ahead_engine(options={"speculation": "lookup", "clock": lambda: now[0]})
    recorded: list[tuple[int, float]] = []
    monkeypatch.setattr(ahead_engine._proposer, "propose", lambda seqs: {})
    monkeypatch.setattr(ahead_engine._proposer, "record_step", lambda seqs, seconds: recorded.append((seqs, seconds)))
    forward = ahead_engine.runner.forward

    def slow(segments: Any) -> Any:
        now[0] += 0.5
        return forward(segments)

    monkeypatch.setattr(ahead_engine.runner, "forward", slow)
    seq = submit(ahead_engine, [30], 16)
    while seq.finish_reason is None:
        ahead_engine.step()
        now[0] += 100.0  # the reader is slow
    assert recorded == [(1, 0.5)] * 2
    assert sum(decoder.launches) == 16
