"""Predictions of collectives between buildings: closed forms on links whose speed is given."""

from __future__ import annotations

import pytest
from bench.plan.buildings import LinkSpeed, buildings, predict_s, schedules_of

SPEEDS = {"host": LinkSpeed(0.001, 50e6), "rack": LinkSpeed(0.010, 10e6)}
SIZE = 4_000_000


def predicted_s(op: str, algorithm: str = "flat") -> float:
    topology = buildings(0.0)
    return predict_s(topology, schedules_of(topology, op, SIZE, algorithm), SPEEDS)


def test_a_flat_all_to_all_crosses_with_half_of_the_traffic() -> None:
    # Each of two hosts sends a quarter of its buffer to each of two hosts of the other building: 4 x 1 MB over a trunk.
    assert predicted_s("all_to_all") == pytest.approx(0.010 + 4 * SIZE / 4 / 10e6)


def test_a_ring_crosses_once_in_each_step() -> None:
    # 2 (4 - 1) steps of a quarter, with one flow over each trunk.
    assert predicted_s("all_reduce", "ring") == pytest.approx(6 * (0.010 + SIZE / 4 / 10e6))


def test_reducing_inside_the_buildings_first_sends_less_between_them() -> None:
    # Inside: halves over host links, twice. Between: each host exchanges half of its half, twice, two hosts per trunk.
    inside, between = 2 * (0.001 + SIZE / 2 / 50e6), 2 * (0.010 + 2 * SIZE / 4 / 10e6)
    assert predicted_s("all_reduce", "hierarchical") == pytest.approx(inside + between)
    assert predicted_s("all_reduce", "hierarchical") < predicted_s("all_reduce", "flat")
