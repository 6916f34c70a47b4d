"""Costs add up, deadlines and GPU counts are inverses, spares follow the binomial."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.errors import ConfigError, UserError
from lakh.planner.cost.prices import gpu_hour, load_prices
from lakh.planner.cost.training_cost import (
    Reserves,
    TrainingWork,
    _probability_at_least,
    cost_breakdown,
    days_for_gpus,
    gpus_for_days,
    sensitivity,
    spare_nodes,
)

WORK = TrainingWork(
    flops=5.88e23, tokens=1.4e12, tflops_per_gpu=214.0, peak_tflops=989.4, usd_per_gpu_hour=2.0, goodput=1.0,
)  # fmt: skip
NO_FAILURES = Reserves(failures_per_gpu_hour=0.0)
LLAMA3 = Reserves(failures_per_gpu_hour=1.973e-5)


def test_gpus_for_the_seed_article() -> None:
    """70B, 1.4T tokens, 21 days at 214 TFLOP/s: 1,514.4 GPUs, 190 nodes; at 41 % MFU 799."""
    assert gpus_for_days(WORK, 21) == 1520
    assert gpus_for_days(replace(WORK, tflops_per_gpu=0.41 * 989.4), 21) == 800
    found = cost_breakdown(WORK, 1514, NO_FAILURES)
    assert found.days == pytest.approx(21, rel=0.001)
    assert found.usd == pytest.approx(1.53e6, rel=0.01)
    assert found.mfu_step == pytest.approx(0.216, abs=0.001)


@given(days=st.floats(1, 400), goodput=st.floats(0.3, 1), overhead=st.floats(0, 0.3))
def test_the_gpus_for_a_deadline_are_the_fewest_whole_nodes(days: float, goodput: float, overhead: float) -> None:
    work = replace(WORK, goodput=goodput, overhead_share=overhead)
    gpus = gpus_for_days(work, days)
    assert days_for_gpus(work, gpus) <= days * (1 + 1e-9)
    if gpus > 8:
        assert days_for_gpus(work, gpus - 8) > days * (1 - 1e-9)


@given(gpus=st.integers(1, 20000), goodput=st.floats(0.3, 1), overhead=st.floats(0, 0.3), price=st.floats(0, 10))
def test_the_parts_of_a_cost_add_up_to_its_gpu_hours(gpus: int, goodput: float, overhead: float, price: float) -> None:
    work = replace(WORK, goodput=goodput, overhead_share=overhead, usd_per_gpu_hour=price)
    found = cost_breakdown(work, gpus, NO_FAILURES)
    assert found.usd == pytest.approx(math.fsum(found.usd_parts.values()))
    assert found.usd == pytest.approx(found.gpu_hours * price)
    assert min(found.usd_parts.values()) >= -1e-6
    assert found.mfu_run <= found.mfu_step * (1 + 1e-9)


def test_spares_are_the_fewest_that_reach_the_confidence() -> None:
    spares = spare_nodes(2048, LLAMA3)
    down = 1.973e-5 * 8 * 24 / (1 + 1.973e-5 * 8 * 24)
    assert (
        _probability_at_least(2048, 2048 + spares, 1 - down)
        >= 0.99
        > _probability_at_least(2048, 2048 + spares - 1, 1 - down)
    )
    assert spare_nodes(2048, replace(LLAMA3, confidence=0.9999)) > spares
    assert spare_nodes(2048, NO_FAILURES) == 0


def test_the_binomial_by_hand() -> None:
    exact = sum(math.comb(12, k) * 0.9**k * 0.1 ** (12 - k) for k in range(10, 13))
    assert _probability_at_least(10, 12, 0.9) == pytest.approx(exact)


def test_sensitivity_moves_the_right_way() -> None:
    rows = {row["lever"]: row for row in sensitivity(replace(WORK, goodput=0.9), 1514, LLAMA3)}
    assert rows["rate (MFU)"]["usd_less"] > 0 > rows["rate (MFU)"]["usd_more"]
    assert rows["tokens"]["usd_more"] == pytest.approx(-rows["tokens"]["usd_less"])
    assert rows["price per GPU-hour"]["days_more"] == 0


def test_an_owned_gpu_hour_is_the_sum_of_its_parts() -> None:
    prices = load_prices()
    owned = gpu_hour(prices, "H100", owned=True, power_W=700.0)
    assert owned.usd == pytest.approx(math.fsum(owned.parts.values()))
    assert {"gpu", "network", "power", "cooling", "staff"} <= set(owned.parts)
    assert gpu_hour(prices, "H100").usd == 2.0
    with pytest.raises(UserError, match=r"add \[rented.abacus\]"):
        gpu_hour(prices, "abacus")


def test_a_price_book_can_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text('[rented.H100]\nusd_per_gpu_hour = 3.5\nsource = "my contract"\n')
    assert gpu_hour(load_prices(file), "H100").usd == 3.5
    file.write_text('[rented.H100]\nusd_per_gpu_hour = -1\nsource = "x"\n')
    load_prices.cache_clear()
    with pytest.raises(ConfigError, match="is negative"):
        load_prices(file)
    load_prices.cache_clear()
    file.write_text("[rnted.H100]\n")
    with pytest.raises(ConfigError, match="no such setting; did you mean rented"):
        load_prices(file)


def test_impossible_values_are_refused() -> None:
    for bad in ({"goodput": 0.0}, {"flops": 0.0}, {"tflops_per_gpu": -1.0}):
        with pytest.raises(UserError):
            replace(WORK, **bad)
    with pytest.raises(UserError):
        gpus_for_days(WORK, 0)
    with pytest.raises(UserError):
        Reserves(failures_per_gpu_hour=1.0, confidence=1.0)
