"""Schedules are right for any number of ranks and any size, and cost what they say."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakh.c3.verify import Symbols, leaves, play
from lakh.errors import UserError
from lakh.spec import collectives
from lakh.spec.collectives import Buffer, Kind, Step

RANKS = st.integers(1, 64)
COUNTS = st.integers(0, 200)
FLAT = ("flat", "halving_doubling", "ring")


def total(size: int, count: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        return sum((leaves(rank, count).total for rank in range(size)), np.zeros(count, np.uint64))


def play_all_reduce(size: int, count: int, make, hosts=None) -> list[Symbols]:
    outputs = [leaves(rank, count) for rank in range(size)]
    play([make(rank) for rank in range(size)], outputs, [leaves(rank, count) for rank in range(size)], hosts)
    return outputs


def is_all_reduced(outputs: list[Symbols], count: int) -> None:
    for output in outputs:
        assert np.array_equal(output.total, total(len(outputs), count))  # every input once
        assert output == outputs[0]  # in the same order of additions: the same bits


@settings(max_examples=60)
@given(RANKS, COUNTS, st.sampled_from(FLAT), st.randoms())
def test_all_reduce_is_right_for_any_ranks_sizes_and_order(size, count, algorithm, dice) -> None:
    order = list(range(size))
    dice.shuffle(order)
    outputs = play_all_reduce(
        size, count, lambda rank: collectives.all_reduce(algorithm, rank, size, count, order=order)
    )
    is_all_reduced(outputs, count)


RATES = st.lists(st.floats(0.01, 100), min_size=1, max_size=24)


@settings(max_examples=60)
@given(RATES, COUNTS)
def test_all_reduce_with_unequal_parts_is_right_for_any_rates(rates, count) -> None:
    size = len(rates)
    outputs = play_all_reduce(size, count, lambda rank: collectives.all_reduce("flat", rank, size, count, rates=rates))
    is_all_reduced(outputs, count)


@given(RATES)
def test_no_other_parts_let_the_slowest_rank_end_earlier(rates) -> None:
    size, count = len(rates), 1_000_000
    at = collectives.cuts(count, size, rates)
    assert (at[0], at[-1], len(at)) == (0, count, size + 1)
    assert at == sorted(at)
    if size > 2:
        parts = [(end - begin) / count for begin, end in itertools.pairwise(at)]
        ends = [(1 + (size - 2) * part) / rate for part, rate in zip(parts, rates, strict=True)]
        # Who owns something ends with the last one, so taking from any owner only moves the load to another one; who
        # owns nothing cannot be helped. (Rounding moves a part by an element at most.)
        slack = 2 * size / count / min(rates)
        owners = [end for end, part in zip(ends, parts, strict=True) if part > 2 / count]
        assert max(owners) - min(owners) <= slack
        helpless = [end for end, part in zip(ends, parts, strict=True) if part <= 2 / count]
        assert not helpless or min(helpless) >= min(owners) - slack


def test_a_slow_rank_sends_what_it_must_and_no_more() -> None:
    size, count = 4, 3000
    slow, fast = (
        collectives.all_reduce("flat", rank, size, count, rates=[1, 4, 4, 4]).bytes_sent(4) for rank in (0, 1)
    )
    assert slow == count * 4  # its own input, once; equal parts would take 1.5 times as much
    assert fast == pytest.approx(count * 4 * (1 + 2 / 3), rel=0.02)


def test_the_slowest_ranks_of_an_order_are_leaves_of_the_tree() -> None:
    order = [2, 0, 3, 1, 5, 4, 7, 6]
    for rank in order[4:]:
        assert collectives.broadcast(rank, 8, 10, 2, order).bytes_sent(4) == 0
        assert all(step.kind != Kind.RECV_REDUCE for step in collectives.reduce(rank, 8, 10, 2, order).steps)


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), COUNTS, st.sampled_from(["none", "int4"]), st.randoms())
def test_hierarchical_all_reduce_is_right_for_any_tiers_and_placement(zones, racks, hosts, count, codec, dice) -> None:
    places = [
        (f"h{host}", f"r{rack}", f"z{zone}")
        for zone in range(zones)
        for rack in range(racks)
        for host in range(hosts)
        for _ in range(2)
    ]
    if len(places) > 64:
        return
    dice.shuffle(places)
    size = len(places)
    outputs = play_all_reduce(
        size,
        count,
        lambda rank: collectives.all_reduce("hierarchical", rank, size, count, places=places, codec=codec),
        ["/".join(place) for place in places],
    )
    is_all_reduced(outputs, count)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), COUNTS)
def test_hosts_of_unequal_size_are_summed_up_by_their_first_rank(hosts, count) -> None:
    places = [(f"h{host}",) for host in hosts]
    size = len(places)
    outputs = play_all_reduce(
        size,
        count,
        lambda rank: collectives.all_reduce("hierarchical", rank, size, count, places=places),
        [place[0] for place in places],
    )
    is_all_reduced(outputs, count)


@settings(max_examples=30)
@given(RANKS, st.integers(0, 20), st.sampled_from(["flat", "ring"]))
def test_gather_and_scatter_of_sums_are_right(size, count, algorithm) -> None:
    outputs = [Symbols.empty(size * count) for _ in range(size)]
    play(
        [collectives.all_gather(algorithm, rank, size, count) for rank in range(size)],
        outputs,
        [leaves(rank, count) for rank in range(size)],
    )
    gathered = np.concatenate([leaves(rank, count).total for rank in range(size)])
    assert all(np.array_equal(output.total, gathered) for output in outputs)
    outputs = [Symbols.empty(count) for _ in range(size)]
    play(
        [collectives.reduce_scatter(algorithm, rank, size, count) for rank in range(size)],
        outputs,
        [leaves(rank, size * count) for rank in range(size)],
    )
    expected = total(size, size * count)
    for rank, output in enumerate(outputs):
        assert np.array_equal(output.total, expected[rank * count : (rank + 1) * count])


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 20), st.randoms())
def test_gather_and_scatter_of_sums_by_host_are_right_for_any_placement(hosts, inside, count, dice) -> None:
    places = [(f"h{number % hosts}",) for number in range(hosts * inside)]
    dice.shuffle(places)
    size, names = len(places), [place[0] for place in places]
    outputs = [Symbols.empty(size * count) for _ in range(size)]
    schedules = [collectives.all_gather("hierarchical", rank, size, count, places=places) for rank in range(size)]
    play(schedules, outputs, [leaves(rank, count) for rank in range(size)], names)
    gathered = np.concatenate([leaves(rank, count).total for rank in range(size)])
    assert all(np.array_equal(output.total, gathered) for output in outputs)
    assert all(schedule.bytes_sent(4) == (hosts - 1) * count * 4 for schedule in schedules)
    outputs = [Symbols.empty(count) for _ in range(size)]
    schedules = [collectives.reduce_scatter("hierarchical", rank, size, count, places=places) for rank in range(size)]
    play(schedules, outputs, [leaves(rank, size * count) for rank in range(size)], names)
    expected = total(size, size * count)
    for rank, output in enumerate(outputs):
        assert np.array_equal(output.total, expected[rank * count : (rank + 1) * count])
    assert all(schedule.bytes_sent(4) == (hosts - 1) * count * 4 for schedule in schedules)


@settings(max_examples=30)
@given(RANKS, st.integers(0, 20), st.data())
def test_operations_with_a_root_are_right(size, count, data) -> None:
    root = data.draw(st.integers(0, size - 1))
    ranks = range(size)
    order = data.draw(st.none() | st.permutations(ranks))
    outputs = [leaves(rank, count) for rank in ranks]
    play([collectives.broadcast(rank, size, count, root, order) for rank in ranks], outputs, outputs)
    assert all(output == leaves(root, count) for output in outputs)
    outputs = [Symbols.empty(count) for _ in ranks]
    inputs = [leaves(rank, count) for rank in ranks]
    play([collectives.reduce(rank, size, count, root, order) for rank in ranks], outputs, inputs)
    assert np.array_equal(outputs[root].total, total(size, count))
    assert all(inputs[rank] == leaves(rank, count) for rank in ranks)
    outputs = [Symbols.empty(size * count) for _ in ranks]
    play([collectives.gather(rank, size, count, root) for rank in ranks], outputs, inputs)
    assert np.array_equal(outputs[root].total, np.concatenate([one.total for one in inputs]))
    outputs, whole = [Symbols.empty(count) for _ in ranks], [leaves(rank, size * count) for rank in ranks]
    play([collectives.scatter(rank, size, count, root) for rank in ranks], outputs, whole)
    for rank in ranks:
        assert np.array_equal(outputs[rank].total, whole[root].total[rank * count : (rank + 1) * count])


@settings(max_examples=30)
@given(st.integers(1, 12), st.data())
def test_all_to_all_with_any_splits_is_right(size, data) -> None:
    splits = [data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size)) for _ in range(size)]
    inputs = [leaves(rank, sum(splits[rank])) for rank in range(size)]
    outputs = [Symbols.empty(sum(row[rank] for row in splits)) for rank in range(size)]
    schedules = [
        collectives.all_to_all(rank, size, splits[rank], [row[rank] for row in splits]) for rank in range(size)
    ]
    play(schedules, outputs, inputs)
    for rank in range(size):
        begins = [sum(splits[source][:rank]) for source in range(size)]
        expected = [inputs[s].total[begins[s] : begins[s] + splits[s][rank]] for s in range(size)]
        assert np.array_equal(outputs[rank].total, np.concatenate(expected))


@given(RANKS)
def test_a_barrier_ends_when_everybody_came(size) -> None:
    one = [leaves(rank, 2) for rank in range(size)]
    schedules = [collectives.barrier(rank, size) for rank in range(size)]
    filled = [
        dataclasses.replace(s, steps=(Step(-1, Kind.COPY, src=Buffer.INPUT, dst=Buffer.SCRATCH, count=1), *s.steps))
        for s in schedules
    ]
    play(filled, one, one)
    assert all(s.num_stages == (size - 1).bit_length() for s in schedules)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 64])
def test_costs_are_what_the_header_says(size) -> None:
    count, width = 64 * size, 4
    whole = 2 * (size - 1) * count * width // size
    flat, halving, ring = (collectives.all_reduce(name, 1, size, count) for name in FLAT)
    assert [s.bytes_sent(width) for s in (flat, halving, ring)] == [whole] * 3
    assert flat.num_stages == 2
    assert halving.num_stages == 2 * (size.bit_length() - 1)
    assert ring.num_stages == 2 * (size - 1)


def test_tiers_keep_bytes_inside() -> None:
    places = [(f"h{rank % 8}", f"r{rank % 2}") for rank in range(16)]
    count = 1600
    other_rack = [[peer for peer in range(16) if peer % 2 != rank % 2] for rank in range(16)]
    crossing = sum(
        collectives.all_reduce("hierarchical", rank, 16, count, places=places).bytes_sent(4, other_rack[rank])
        for rank in range(16)
    )
    ring = sum(collectives.all_reduce("ring", rank, 16, count).bytes_sent(4, other_rack[rank]) for rank in range(16))
    assert crossing == 2 * count * 4  # the buffer once in each direction
    assert ring == 16 * 2 * 15 * count * 4 // 16


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_bytes_on_the_wire_hold_the_scales(codec) -> None:
    bits = {"bf16": 16, "int8": 8.5, "int4": 4.5}[codec]
    assert collectives.codec_bytes(codec, 3200) == bits * 3200 / 8


WRONG = {
    "a receive that nobody sends": lambda s: [s[0], dataclasses.replace(s[1], steps=s[1].steps[:0])],
    "a share that is added twice": lambda s: [
        dataclasses.replace(
            s[0],
            steps=tuple(
                dataclasses.replace(x, kind=Kind.RECV_REDUCE) if x.kind == Kind.RECV and x.dst == Buffer.OUTPUT else x
                for x in s[0].steps
            ),
        ),
        s[1],
    ],
    "a message of another length": lambda s: [
        dataclasses.replace(s[0], steps=(dataclasses.replace(s[0].steps[0], count=1), *s[0].steps[1:])),
        s[1],
    ],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_verifier_finds(wrong) -> None:
    schedules = WRONG[wrong]([collectives.all_reduce("flat", rank, 2, 10) for rank in range(2)])
    outputs = [leaves(rank, 10) for rank in range(2)]
    try:
        play(schedules, outputs, outputs)
    except UserError:
        return
    with pytest.raises(AssertionError):
        is_all_reduced(outputs, 10)
