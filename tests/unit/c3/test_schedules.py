"""Schedules are correct for any number of ranks and any size, and have their documented cost."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.c3.schedule_verifier import SymbolicBuffer, rank_input, run_symbolically

from lakh.errors import UserError
from lakh.spec import collectives
from lakh.spec.schedule import Buffer, ScheduleStep, StepKind, codec_bytes, split_points

RANKS = st.integers(1, 64)
COUNTS = st.integers(0, 200)
FLAT = ("flat", "halving_doubling", "ring")


def total(size: int, count: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        return sum((rank_input(rank, count).total for rank in range(size)), np.zeros(count, np.uint64))


def simulate_all_reduce(size: int, count: int, make, hosts=None) -> list[SymbolicBuffer]:
    outputs = [rank_input(rank, count) for rank in range(size)]
    run_symbolically(
        [make(rank) for rank in range(size)], outputs, [rank_input(rank, count) for rank in range(size)], hosts
    )
    return outputs


def check_all_reduced(outputs: list[SymbolicBuffer], count: int) -> None:
    for output in outputs:
        assert np.array_equal(output.total, total(len(outputs), count))  # every input once
        assert output == outputs[0]  # added in the same order: identical bits


@pytest.mark.slow
@settings(max_examples=60)
@given(RANKS, COUNTS, st.sampled_from(FLAT), st.randoms())
def test_all_reduce_is_correct_for_any_ranks_sizes_and_order(size, count, algorithm, rng) -> None:
    order = list(range(size))
    rng.shuffle(order)
    outputs = simulate_all_reduce(
        size, count, lambda rank: collectives.all_reduce(algorithm, rank, size, count, order=order)
    )
    check_all_reduced(outputs, count)


RATES = st.lists(st.floats(0.01, 100), min_size=1, max_size=24)


@pytest.mark.slow
@settings(max_examples=60)
@given(RATES, COUNTS)
def test_all_reduce_with_unequal_parts_is_correct_for_any_rates(rates, count) -> None:
    size = len(rates)
    outputs = simulate_all_reduce(
        size, count, lambda rank: collectives.all_reduce("flat", rank, size, count, rates=rates)
    )
    check_all_reduced(outputs, count)


@given(RATES)
def test_the_parts_minimise_the_time_of_the_slowest_rank(rates) -> None:
    size, count = len(rates), 1_000_000
    at = split_points(count, size, rates)
    assert (at[0], at[-1], len(at)) == (0, count, size + 1)
    assert at == sorted(at)
    if size > 2:
        parts = [(end - begin) / count for begin, end in itertools.pairwise(at)]
        ends = [(1 + (size - 2) * part) / rate for part, rate in zip(parts, rates, strict=True)]
        # All owners finish together, so moving load between owners makes one of them slower; ranks that own nothing
        # cannot finish earlier. (Rounding moves a part by at most one element.)
        slack = 2 * size / count / min(rates)
        owners = [end for end, part in zip(ends, parts, strict=True) if part > 2 / count]
        assert max(owners) - min(owners) <= slack
        idle = [end for end, part in zip(ends, parts, strict=True) if part <= 2 / count]
        assert not idle or min(idle) >= min(owners) - slack


def test_a_slow_rank_sends_its_input_once() -> None:
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
        assert all(step.kind != StepKind.RECV_REDUCE for step in collectives.reduce(rank, 8, 10, 2, order).steps)


@pytest.mark.slow
@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), COUNTS, st.sampled_from(["none", "int4"]), st.randoms())
def test_hierarchical_all_reduce_is_correct_for_any_tiers_and_placement(zones, racks, hosts, count, codec, rng) -> None:
    places = [
        (f"h{host}", f"r{rack}", f"z{zone}")
        for zone in range(zones)
        for rack in range(racks)
        for host in range(hosts)
        for _ in range(2)
    ]
    if len(places) > 64:
        return
    rng.shuffle(places)
    size = len(places)
    outputs = simulate_all_reduce(
        size,
        count,
        lambda rank: collectives.all_reduce("hierarchical", rank, size, count, places=places, codec=codec),
        ["/".join(place) for place in places],
    )
    check_all_reduced(outputs, count)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), COUNTS)
def test_hosts_of_unequal_size_are_reduced_by_their_first_rank(hosts, count) -> None:
    places = [(f"h{host}",) for host in hosts]
    size = len(places)
    outputs = simulate_all_reduce(
        size,
        count,
        lambda rank: collectives.all_reduce("hierarchical", rank, size, count, places=places),
        [place[0] for place in places],
    )
    check_all_reduced(outputs, count)


@pytest.mark.slow
@settings(max_examples=30)
@given(RANKS, st.integers(0, 20), st.sampled_from(["flat", "ring"]))
def test_all_gather_and_reduce_scatter_are_correct(size, count, algorithm) -> None:
    outputs = [SymbolicBuffer.empty(size * count) for _ in range(size)]
    run_symbolically(
        [collectives.all_gather(algorithm, rank, size, count) for rank in range(size)],
        outputs,
        [rank_input(rank, count) for rank in range(size)],
    )
    gathered = np.concatenate([rank_input(rank, count).total for rank in range(size)])
    assert all(np.array_equal(output.total, gathered) for output in outputs)
    outputs = [SymbolicBuffer.empty(count) for _ in range(size)]
    run_symbolically(
        [collectives.reduce_scatter(algorithm, rank, size, count) for rank in range(size)],
        outputs,
        [rank_input(rank, size * count) for rank in range(size)],
    )
    expected = total(size, size * count)
    for rank, output in enumerate(outputs):
        assert np.array_equal(output.total, expected[rank * count : (rank + 1) * count])


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 20), st.randoms())
def test_hierarchical_all_gather_and_reduce_scatter_are_correct_for_any_placement(hosts, inside, count, rng) -> None:
    places = [(f"h{number % hosts}",) for number in range(hosts * inside)]
    rng.shuffle(places)
    size, names = len(places), [place[0] for place in places]
    outputs = [SymbolicBuffer.empty(size * count) for _ in range(size)]
    schedules = [collectives.all_gather("hierarchical", rank, size, count, places=places) for rank in range(size)]
    run_symbolically(schedules, outputs, [rank_input(rank, count) for rank in range(size)], names)
    gathered = np.concatenate([rank_input(rank, count).total for rank in range(size)])
    assert all(np.array_equal(output.total, gathered) for output in outputs)
    assert all(schedule.bytes_sent(4) == (hosts - 1) * count * 4 for schedule in schedules)
    outputs = [SymbolicBuffer.empty(count) for _ in range(size)]
    schedules = [collectives.reduce_scatter("hierarchical", rank, size, count, places=places) for rank in range(size)]
    run_symbolically(schedules, outputs, [rank_input(rank, size * count) for rank in range(size)], names)
    expected = total(size, size * count)
    for rank, output in enumerate(outputs):
        assert np.array_equal(output.total, expected[rank * count : (rank + 1) * count])
    assert all(schedule.bytes_sent(4) == (hosts - 1) * count * 4 for schedule in schedules)


@settings(max_examples=30)
@given(RANKS, st.integers(0, 20), st.data())
def test_operations_with_a_root_are_correct(size, count, data) -> None:
    root = data.draw(st.integers(0, size - 1))
    ranks = range(size)
    order = data.draw(st.none() | st.permutations(ranks))
    outputs = [rank_input(rank, count) for rank in ranks]
    run_symbolically([collectives.broadcast(rank, size, count, root, order) for rank in ranks], outputs, outputs)
    assert all(output == rank_input(root, count) for output in outputs)
    outputs = [SymbolicBuffer.empty(count) for _ in ranks]
    inputs = [rank_input(rank, count) for rank in ranks]
    run_symbolically([collectives.reduce(rank, size, count, root, order) for rank in ranks], outputs, inputs)
    assert np.array_equal(outputs[root].total, total(size, count))
    assert all(inputs[rank] == rank_input(rank, count) for rank in ranks)
    outputs = [SymbolicBuffer.empty(size * count) for _ in ranks]
    run_symbolically([collectives.gather(rank, size, count, root) for rank in ranks], outputs, inputs)
    assert np.array_equal(outputs[root].total, np.concatenate([one.total for one in inputs]))
    outputs, whole = [SymbolicBuffer.empty(count) for _ in ranks], [rank_input(rank, size * count) for rank in ranks]
    run_symbolically([collectives.scatter(rank, size, count, root) for rank in ranks], outputs, whole)
    for rank in ranks:
        assert np.array_equal(outputs[rank].total, whole[root].total[rank * count : (rank + 1) * count])


@settings(max_examples=30)
@given(st.integers(1, 12), st.data())
def test_all_to_all_with_any_splits_is_correct(size, data) -> None:
    splits = [data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size)) for _ in range(size)]
    inputs = [rank_input(rank, sum(splits[rank])) for rank in range(size)]
    outputs = [SymbolicBuffer.empty(sum(row[rank] for row in splits)) for rank in range(size)]
    schedules = [
        collectives.all_to_all(rank, size, splits[rank], [row[rank] for row in splits]) for rank in range(size)
    ]
    run_symbolically(schedules, outputs, inputs)
    for rank in range(size):
        begins = [sum(splits[source][:rank]) for source in range(size)]
        expected = [inputs[s].total[begins[s] : begins[s] + splits[s][rank]] for s in range(size)]
        assert np.array_equal(outputs[rank].total, np.concatenate(expected))


@given(RANKS)
def test_a_barrier_ends_when_all_ranks_have_entered(size) -> None:
    one = [rank_input(rank, 2) for rank in range(size)]
    schedules = [collectives.barrier(rank, size) for rank in range(size)]
    filled = [
        dataclasses.replace(
            s, steps=(ScheduleStep(-1, StepKind.COPY, src=Buffer.INPUT, dst=Buffer.SCRATCH, count=1), *s.steps)
        )
        for s in schedules
    ]
    run_symbolically(filled, one, one)
    assert all(s.num_stages == (size - 1).bit_length() for s in schedules)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 64])
def test_costs_are_as_documented(size) -> None:
    count, width = 64 * size, 4
    whole = 2 * (size - 1) * count * width // size
    flat, halving, ring = (collectives.all_reduce(name, 1, size, count) for name in FLAT)
    assert [s.bytes_sent(width) for s in (flat, halving, ring)] == [whole] * 3
    assert flat.num_stages == 2
    assert halving.num_stages == 2 * (size.bit_length() - 1)
    assert ring.num_stages == 2 * (size - 1)


def test_tiers_keep_traffic_local() -> None:
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
def test_encoded_sizes_include_the_scales(codec) -> None:
    bits = {"bf16": 16, "int8": 8.5, "int4": 4.5}[codec]
    assert codec_bytes(codec, 3200) == bits * 3200 / 8


WRONG = {
    "a receive without a send": lambda s: [s[0], dataclasses.replace(s[1], steps=s[1].steps[:0])],
    "a share that is added twice": lambda s: [
        dataclasses.replace(
            s[0],
            steps=tuple(
                dataclasses.replace(x, kind=StepKind.RECV_REDUCE)
                if x.kind == StepKind.RECV and x.dst == Buffer.OUTPUT
                else x
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
    outputs = [rank_input(rank, 10) for rank in range(2)]
    try:
        run_symbolically(schedules, outputs, outputs)
    except UserError:
        return
    with pytest.raises(AssertionError):
        check_all_reduced(outputs, 10)
