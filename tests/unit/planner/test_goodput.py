"""The Monte Carlo agrees with the closed form where there is one, and its time adds up."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakh.errors import ConfigError, UserError
from lakh.planner.reliability.failures import load_failures
from lakh.planner.reliability.goodput import (
    FailureScenario,
    RecoveryPolicy,
    best_interval_s,
    daly_efficiency,
    joining_s,
    simulate,
    young_efficiency,
)

LLAMA3 = load_failures("llama3")
SCENARIO = FailureScenario(gpus=16384, days=54.0, mtbf_s=LLAMA3.mtbf_s(16384), replacing_share=LLAMA3.replacing_share)


def test_the_llama_3_table_adds_up() -> None:
    assert LLAMA3.count == 419
    assert LLAMA3.per_gpu_hour == pytest.approx(1.973e-5, rel=1e-3)
    assert 86400 / LLAMA3.mtbf_s(100_000) == pytest.approx(47.4, abs=0.1)
    assert load_failures("rsc-1").count > 0


def test_ten_minute_checkpoints_and_seven_minute_restarts_give_over_90_percent_goodput() -> None:
    found = simulate(SCENARIO, RecoveryPolicy(interval_s=600, stall_s=5, detect_s=60, restart_s=360), runs=2000)
    assert 0.92 < found.goodput < 0.94
    assert found.failures_per_day == pytest.approx(419 / 54, rel=0.02)


@pytest.mark.parametrize(
    ("stall_s", "restart_s", "goodput"), [(30, 300, 0.70), (5, 300, 0.79), (5, 900, 0.57), (1, 60, 0.94)]
)
def test_goodput_of_100k_gpus_follows_the_exponential_form(stall_s: float, restart_s: float, goodput: float) -> None:
    mtbf_s = LLAMA3.mtbf_s(100_000)
    interval_s = best_interval_s(mtbf_s, stall_s, restart_s)
    exact = float(daly_efficiency(mtbf_s, interval_s, stall_s, restart_s))
    assert exact == pytest.approx(goodput, abs=0.006)
    scenario = FailureScenario(gpus=100_000, days=20.0, mtbf_s=mtbf_s)
    policy = RecoveryPolicy(interval_s=interval_s, stall_s=stall_s, detect_s=0, restart_s=restart_s)
    # 400 runs of some 900 failures: the standard error is below a tenth of a point
    assert simulate(scenario, policy, runs=400).goodput == pytest.approx(exact, abs=0.004)
    assert float(young_efficiency(mtbf_s, interval_s, stall_s, restart_s)) < exact


policies = st.builds(
    RecoveryPolicy,
    interval_s=st.floats(60, 3600),
    stall_s=st.floats(0, 60),
    detect_s=st.floats(0, 300),
    restart_s=st.floats(0, 1200),
    near_interval_s=st.sampled_from([0.0, 30.0, 60.0]),
    near_stall_s=st.floats(0, 2),
    partial_share=st.sampled_from([0.0, 0.3, 1.0]),
    spares=st.sampled_from([0, 1, 8, 4096]),
    repair_hours=st.floats(0, 48),
)


@settings(max_examples=30)
@given(policy=policies, lemons=st.sampled_from([0, 20]))
def test_goodput_and_badput_sum_to_one(policy: RecoveryPolicy, lemons: int) -> None:
    found = simulate(replace(SCENARIO, days=5.0, lemon_nodes=lemons), policy, runs=50)
    assert found.goodput + sum(found.badput.values()) == pytest.approx(1.0)
    assert min(found.badput.values()) >= 0
    assert 0 <= found.low <= found.high <= 1  # of single runs; their mean may lie outside where one run is a disaster


def test_the_same_seed_gives_the_same_answer() -> None:
    assert simulate(SCENARIO, RecoveryPolicy(), runs=50, seed=3) == simulate(
        SCENARIO, RecoveryPolicy(), runs=50, seed=3
    )
    assert simulate(SCENARIO, RecoveryPolicy(), runs=50, seed=3) != simulate(
        SCENARIO, RecoveryPolicy(), runs=50, seed=4
    )


def test_better_recovery_raises_goodput_and_lemon_nodes_lower_it() -> None:
    plain = simulate(SCENARIO, RecoveryPolicy(), runs=300).goodput
    assert (
        simulate(SCENARIO, RecoveryPolicy(near_interval_s=60, near_stall_s=0.2, near_restart_s=60), runs=300).goodput
        > plain
    )
    assert simulate(SCENARIO, RecoveryPolicy(partial_share=0.8), runs=300).goodput > plain
    assert simulate(replace(SCENARIO, lemon_nodes=60), RecoveryPolicy(), runs=300).goodput < plain
    few, many = (simulate(SCENARIO, RecoveryPolicy(spares=n, repair_hours=48), runs=300).goodput for n in (4, 64))
    assert few < many <= plain + 0.005


def test_the_best_interval_beats_its_neighbours() -> None:
    best = best_interval_s(SCENARIO.mtbf_s, 5, 420)
    at = [float(daly_efficiency(SCENARIO.mtbf_s, best * f, 5, 420)) for f in (0.8, 1.0, 1.25)]
    assert at[1] == max(at)


def test_impossible_values_are_refused() -> None:
    with pytest.raises(ConfigError):
        RecoveryPolicy(interval_s=0)
    with pytest.raises(ConfigError):
        FailureScenario(gpus=8, days=1, mtbf_s=1e4, lemon_nodes=2)
    with pytest.raises(UserError, match="did you mean llama3"):
        load_failures("llama-3")
    with pytest.raises(UserError, match="runs"):
        simulate(SCENARIO, RecoveryPolicy(), runs=0)


def test_joining_time_is_small_and_grows_with_the_ranks() -> None:
    assert joining_s(8) < joining_s(512) < joining_s(16_384) < RecoveryPolicy(interval_s=600).restart_s / 100
