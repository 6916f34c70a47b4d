"""Goodput under failures: a Monte Carlo over many runs at once, with closed forms to check it.

A job of n GPUs is interrupted at random, at published rates; lemon nodes fail more often until they are evicted. Each
interruption is detected after a while, takes a spare node if hardware broke, restarts, and repeats the work since the
last checkpoint that survives it: an in-memory one (near) or one in storage (far). With partial restart, some
interruptions stop only one replica for a moment and lose nothing.

The classes of time add up to one: goodput (work that is retained), and badput by cause. The same seed gives the same
answer. Costs one numpy step per interruption, over all runs together.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from lakh import config
from lakh.errors import UserError
from lakh.planner.stacked import Array
from lakh.spec.startup import STARTUP

__all__ = ["FailureScenario", "RecoveryPolicy", "best_goodput", "best_interval_s", "goodput_report", "simulate"]

UNLIMITED_SPARES = 4096
STORE_ROUND_TRIP_S = 1e-3  # assumed: a busy store in the same cluster
BADPUT = ("checkpoint", "lost_work", "detection", "restart", "waiting_for_spare", "partial_restart")


MOST_INTERRUPTIONS = 5_000
"""Of one simulated run."""
MOST_EVENTS = 5e7
"""Interruptions of all simulated runs: some seconds."""


@dataclass(frozen=True, kw_only=True)
class FailureScenario:
    """A job and how often it is interrupted."""

    gpus: int
    days: float
    mtbf_s: float
    replacing_share: float = 0.5
    """Share of the interruptions that take a spare node."""
    lemon_nodes: int = 0
    """Nodes that fail `lemon_factor` times as often as others, until evicted."""
    lemon_factor: float = 30.0
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        config.require(self, ("gpus", "days", "mtbf_s"), lambda value: value > 0, "is not positive")
        config.require(self, "replacing_share", lambda share: 0 <= share <= 1, "is not a share", "choose 0 to 1")
        config.require(self, "lemon_factor", lambda factor: factor >= 1, "is below 1", "choose 1 or more")
        nodes = self.gpus / self.gpus_per_node
        limits = f"is not between 0 and the {nodes:g} nodes of the job"
        config.require(self, "lemon_nodes", lambda count: 0 <= count <= nodes, limits, "choose fewer")


@dataclass(frozen=True, kw_only=True)
class RecoveryPolicy:
    """Checkpoints, detection, restart and spares."""

    interval_s: float = 600.0
    """Work between far checkpoints."""
    stall_s: float = 5.0
    """How long a far checkpoint stops the job."""
    detect_s: float = 60.0
    restart_s: float = 360.0
    """From detection to the first new step: reschedule, initialise, load."""
    near_interval_s: float = 0.0
    """Work between near checkpoints; 0 disables them."""
    near_stall_s: float = 0.0
    near_share: float = 0.9
    """Share of the interruptions that a near checkpoint survives."""
    near_restart_s: float = 0.0
    """Restart from a near checkpoint; 0 means as long as from a far one."""
    partial_share: float = 0.0
    """Share of the interruptions after which only one replica restarts, from its peers, and no work is lost."""
    partial_restart_s: float = 30.0
    spares: int = UNLIMITED_SPARES
    """Spare nodes; a repaired one returns after repair_hours. From 4,096 on there is always one."""
    repair_hours: float = 24.0
    evict_after: int = 3
    """Interruptions by one lemon node before it is evicted."""

    def __post_init__(self) -> None:
        seconds = [f.name for f in fields(self) if f.name.endswith("_s") and f.name != "interval_s"]
        config.require_not_negative(self, *seconds, "repair_hours", "spares")
        config.require(self, "interval_s", lambda value: value > 0, "is not positive", "give seconds of work")
        config.require_positive(self, "evict_after")
        shares = ("near_share", "partial_share")
        config.require(self, shares, lambda share: 0 <= share <= 1, "is not a share", "choose 0 to 1")

    @property
    def down_s(self) -> float:
        return self.detect_s + self.restart_s


@dataclass(frozen=True)
class GoodputResult:
    goodput: float
    low: float
    """5th and 95th percentile of the runs."""
    high: float
    badput: dict[str, float]
    """Shares of the time; with goodput they add up to 1."""
    failures_per_day: float
    interval_s: float
    runs: int
    simulated_days: float
    """Days of each simulated run; fewer than the job's where interruptions are very frequent."""


def simulated_span(scenario: FailureScenario, policy: RecoveryPolicy, runs: int) -> tuple[float, int]:
    """Seconds to simulate, and runs: fewer than asked for where frequent interruptions would take minutes.

    Goodput is stationary, so a part of the job shows it; the part covers several repairs if spares are limited.
    """
    end, enough = scenario.days * 86400.0, MOST_INTERRUPTIONS * scenario.mtbf_s
    if policy.spares < UNLIMITED_SPARES or scenario.lemon_nodes:
        enough = max(enough, 3 * policy.repair_hours * 3600)
    span = min(end, enough)
    return span, min(runs, max(int(MOST_EVENTS * scenario.mtbf_s / span), 100))


def simulate(scenario: FailureScenario, policy: RecoveryPolicy, *, runs: int = 10_000, seed: int = 1) -> GoodputResult:
    if runs < 1:
        raise UserError("--runs", f"{runs} runs", "choose 1 or more")
    rng = np.random.default_rng(seed)
    end, runs = simulated_span(scenario, policy, runs)
    narrower = math.sqrt(end / (scenario.days * 86400.0))  # the spread of a mean over a longer time
    now, good, failures = np.zeros(runs), np.zeros(runs), np.zeros(runs)
    bad = {name: np.zeros(runs) for name in BADPUT}
    node_rate = 1 / scenario.mtbf_s / (scenario.gpus / scenario.gpus_per_node)  # of one healthy node
    lemons = np.full(runs, float(scenario.lemon_nodes))
    spares = _SparePool(runs, policy) if policy.spares < UNLIMITED_SPARES else None
    pending = np.zeros(runs)  # downtime that remains before work continues
    downtime: dict[str, Array] = {}  # its parts, in order
    none, never = np.zeros(runs), np.zeros(runs, dtype=bool)
    active = now < end

    def chance(share: float) -> Array:
        """Runs that are affected; uses no random numbers for what is certain or impossible."""
        return rng.random(runs) < share if 0 < share < 1 else np.full(runs, share >= 1)

    while active.any():
        rate = 1 / scenario.mtbf_s + lemons * node_rate * (scenario.lemon_factor - 1)
        until = rng.standard_exponential(runs) / rate  # next interruption, from now
        ends = until >= end - now  # the run is over before the next interruption
        span = np.where(active, np.minimum(until, end - now), 0.0)
        up = np.maximum(span - pending, 0.0)
        is_partial = ~ends & chance(policy.partial_share) & (up > 0)
        is_near = chance(policy.near_share) if policy.near_interval_s > 0 else never
        done, stalled, lost = _split_uptime(policy, up, is_near, keeps=is_partial | ends)
        good += done
        bad["checkpoint"] += stalled
        bad["lost_work"] += lost
        _add_downtime(bad, np.minimum(pending, span), downtime)
        now = now + span
        interrupted = active & ~ends
        failures += interrupted
        if scenario.lemon_nodes:
            is_lemon = rng.random(runs) < lemons * node_rate * scenario.lemon_factor / rate
            lemons = np.maximum(lemons - (is_lemon & interrupted & chance(1 / policy.evict_after)), 0)
        wait = none
        if spares:
            wait = spares.take(interrupted & ~is_partial & chance(scenario.replacing_share), now)
        restart = np.where(is_near, policy.near_restart_s or policy.restart_s, policy.restart_s)
        downtime = {
            "detection": np.where(is_partial, 0.0, policy.detect_s),
            "waiting_for_spare": wait,
            "restart": np.where(is_partial, 0.0, restart),
            "partial_restart": np.where(is_partial, policy.partial_restart_s, 0.0),
        }
        pending = sum(downtime.values(), none)
        active = now < end
    share = good / end
    return GoodputResult(
        goodput=float(share.mean()),
        low=float(share.mean() + narrower * (np.quantile(share, 0.05) - share.mean())),
        high=float(share.mean() + narrower * (np.quantile(share, 0.95) - share.mean())),
        badput={name: float((value / end).mean()) for name, value in bad.items()},
        failures_per_day=float(failures.mean() / (end / 86400.0)),
        interval_s=policy.interval_s,
        runs=runs,
        simulated_days=end / 86400.0,
    )


class _SparePool:
    """Spare nodes of every run; they return from repair in the order they were taken."""

    def __init__(self, runs: int, policy: RecoveryPolicy) -> None:
        self.repair_s, self.spares = policy.repair_hours * 3600, policy.spares
        self.back_at = np.full((runs, policy.spares), -np.inf)
        self.taken = np.zeros(runs, dtype=int)
        self.all_runs = np.arange(runs)

    def take(self, needs: Array, now: Array) -> Array:
        """Seconds that each run waits for a spare."""
        if self.spares == 0:
            return np.where(needs, self.repair_s, 0.0)
        slot = self.taken % self.spares
        back = self.back_at[self.all_runs, slot]
        wait = np.where(needs, np.maximum(back - now, 0.0), 0.0)
        self.back_at[self.all_runs, slot] = np.where(needs, now + wait + self.repair_s, back)
        self.taken += needs
        return wait


def _split_uptime(policy: RecoveryPolicy, up: Array, is_near: Array, keeps: Array) -> tuple[Array, Array, Array]:
    """Seconds of running as retained work, time in checkpoints, and lost work."""
    near = policy.near_stall_s / policy.near_interval_s if policy.near_interval_s else 0.0
    cycle = policy.interval_s * (1 + near) + policy.stall_s
    whole = np.floor(up / cycle)
    rest = up - whole * cycle
    rest_work = np.minimum(rest, policy.interval_s * (1 + near)) / (1 + near)
    near_step = policy.near_interval_s or policy.interval_s
    near_work = np.floor(rest_work / near_step) * near_step
    kept = np.where(keeps, rest_work, np.where(is_near & (policy.near_interval_s > 0), near_work, 0.0))
    stalled = whole * (cycle - policy.interval_s) + rest - rest_work
    return whole * policy.interval_s + kept, stalled, rest_work - kept


def _add_downtime(bad: dict[str, Array], elapsed: Array, downtime: dict[str, Array]) -> None:
    """Attribute elapsed downtime to its parts in order; a new interruption may cut it short."""
    left = elapsed
    for name, length in downtime.items():
        part = np.minimum(left, length)
        bad[name] += part
        left = left - part


# --- closed forms ---


def daly_efficiency(mtbf_s: Array, interval_s: Array, stall_s: Array, restart_s: Array) -> Array:
    """Work over wall time with exponential failures, also during checkpoints and restarts (Daly 2006)."""
    m = np.asarray(mtbf_s, dtype=float)
    exponent = np.minimum((np.asarray(interval_s) + stall_s) / m, 700.0)
    return interval_s / (m * np.exp(np.minimum(restart_s / m, 700.0)) * np.expm1(exponent))


def young_efficiency(mtbf_s: Array, interval_s: Array, stall_s: Array, restart_s: Array) -> Array:
    """First-order form, for comparison only: off by up to 13 points where failures are frequent."""
    return 1 - stall_s / interval_s - (interval_s / 2 + restart_s) / mtbf_s


def best_interval_s(mtbf_s: float, stall_s: float, restart_s: float) -> float:
    """The interval with the highest exponential efficiency, on a fine grid around Young's."""
    if stall_s == 0:
        return 1.0
    start = math.sqrt(2 * stall_s * mtbf_s)
    grid = start * np.exp(np.linspace(-3, 2, 2001))
    return float(grid[np.argmax(daly_efficiency(mtbf_s, grid, stall_s, restart_s))])


def best_goodput(mtbf_s: float, stall_s: float, restart_s: float) -> float:
    """The exponential efficiency at the best interval."""
    interval_s = best_interval_s(mtbf_s, stall_s, restart_s)
    return float(daly_efficiency(mtbf_s, interval_s, stall_s, restart_s))


def joining_s(ranks: int) -> float:
    """Part of a restart until a rank has joined its group over c3, from measured startup costs (up to 512 ranks;
    beyond, extrapolated), with a store that answers within STORE_ROUND_TRIP_S."""
    return STARTUP["c3"].rank_wall_s(ranks, STORE_ROUND_TRIP_S)


def goodput_report(
    scenario: FailureScenario, policy: RecoveryPolicy, *, runs: int = 10_000, seed: int = 1
) -> dict[str, Any]:
    """The simulated goodput beside the closed forms and the best checkpoint interval."""
    mtbf_s, interval_s, stall_s = scenario.mtbf_s, policy.interval_s, policy.stall_s
    return asdict(simulate(scenario, policy, runs=runs, seed=seed)) | {
        "simulated": True,
        "mtbf_s": mtbf_s,
        "best_interval_s": best_interval_s(mtbf_s, stall_s, policy.down_s),
        "closed_forms": {
            "daly": float(daly_efficiency(mtbf_s, interval_s, stall_s, policy.down_s)),
            "young_first_order": float(young_efficiency(mtbf_s, interval_s, stall_s, policy.down_s)),
        },
        "joining_s": joining_s(scenario.gpus),
    }
