"""The closed-form costs equal what built schedules count."""

import math

import numpy as np
import pytest

from lakh.errors import UserError
from lakh.spec import collectives
from lakh.spec.collective_cost import collective_cost

TIERS = [(4, 2), (2, 4), (2, 2, 2), (8, 1), (1, 4), (2, 1, 4)]


def place_ranks(tiers: tuple[int, ...]) -> list[tuple[str, ...]]:
    """For each rank, the numbers of the groups that hold it, innermost first."""
    places = []
    for rank in range(math.prod(tiers)):
        groups, inside = [], 1
        for size in tiers[:-1]:
            inside *= size
            groups.append(str(rank // inside))
        places.append(tuple(groups))
    return places


def count_bytes(schedules, tiers: tuple[int, ...], width: int) -> list[float]:
    """Mean bytes that a rank sends within each tier, counted on the steps."""
    totals = [0.0] * len(tiers)
    for rank, schedule in enumerate(schedules):
        for tier in range(len(tiers)):
            inner, outer = math.prod(tiers[:tier]), math.prod(tiers[: tier + 1])
            peers = [p for p in range(len(schedules)) if p // outer == rank // outer and p // inner != rank // inner]
            totals[tier] += schedule.bytes_sent(width, to=peers)
    return [total / len(schedules) for total in totals]


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("algorithm", ["flat", "ring", "halving_doubling"])
def test_all_reduce_costs_what_its_schedule_sends(algorithm: str, tiers: tuple[int, ...]) -> None:
    size, count, width = math.prod(tiers), 840, 4
    schedules = [collectives.all_reduce(algorithm, rank, size, count) for rank in range(size)]
    cost = collective_cost("all_reduce", algorithm, count * width, tiers)
    assert [tier.bytes_sent for tier in cost.tiers] == pytest.approx(count_bytes(schedules, tiers, width))
    assert cost.stages == schedules[0].num_stages


@pytest.mark.parametrize("tiers", [(4, 2), (2, 2, 2), (2, 4)])
def test_hierarchical_all_reduce_costs_what_its_schedule_sends_between_nodes(tiers: tuple[int, ...]) -> None:
    size, count, width = math.prod(tiers), 840, 4
    places = place_ranks(tiers)
    schedules = [collectives.all_reduce("hierarchical", rank, size, count, places=places) for rank in range(size)]
    cost = collective_cost("all_reduce", "hierarchical", count * width, tiers)
    sent = [tier.bytes_sent for tier in cost.tiers]
    assert sent[1:] == pytest.approx(count_bytes(schedules, tiers, width)[1:])  # inside a node no message is sent
    assert sent[0] == pytest.approx(2 * (tiers[0] - 1) / tiers[0] * count * width)
    assert cost.stages == 2 * len(tiers)


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("algorithm", ["flat", "ring"])
def test_all_gather_and_reduce_scatter_cost_half_of_all_reduce(algorithm: str, operation: str) -> None:
    tiers, count, width = (4, 2), 105, 4
    make = getattr(collectives, operation)
    schedules = [make(algorithm, rank, 8, count) for rank in range(8)]
    cost = collective_cost(operation, algorithm, 8 * count * width, tiers)
    assert [tier.bytes_sent for tier in cost.tiers] == pytest.approx(count_bytes(schedules, tiers, width))
    assert cost.stages == schedules[0].num_stages


def test_a_broadcast_sends_the_buffer_once_to_each_rank() -> None:
    schedules = [collectives.broadcast(rank, 8, 840, 0) for rank in range(8)]
    cost = collective_cost("broadcast", "tree", 840 * 4, (4, 2))
    assert [tier.bytes_sent for tier in cost.tiers] == pytest.approx(count_bytes(schedules, (4, 2), 4))
    assert cost.stages == max(schedule.num_stages for schedule in schedules) == 3


def test_arrays_give_the_costs_of_single_layouts() -> None:
    in_node, nodes = np.array([8.0, 4.0, 8.0, 1.0]), np.array([1.0, 16.0, 12_500.0, 1.0])
    for algorithm in ("flat", "ring", "halving_doubling", "hierarchical"):
        together = collective_cost("all_reduce", algorithm, 1e9, (in_node, nodes))
        apart = [collective_cost("all_reduce", algorithm, 1e9, pair) for pair in zip(in_node, nodes, strict=True)]
        assert np.allclose(together.bytes_sent, [cost.bytes_sent for cost in apart])
        assert np.allclose(together.stages, [cost.stages for cost in apart])
    assert together.bytes_sent[3] == 0  # one rank alone sends nothing
    tiers = zip(together.tiers, (1e-6, 1e-5), (400e9, 50e9), strict=True)
    seconds = sum(tier.stages * latency_s + tier.bytes_sent / rate for tier, latency_s, rate in tiers)
    assert seconds[2] == pytest.approx(2e-6 + 2e-5 + 2 * 7 / 8 * 1e9 / 400e9 + 2 * 12_499 / 12_500 / 8 * 1e9 / 50e9)


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(UserError, match="butterfly"):
        collective_cost("all_reduce", "butterfly", 1e6, (8,))
