"""What failures leave of a run's time: a Monte Carlo over many runs at once, with closed forms to hold it to.

A job of n GPUs is interrupted at random (rates from published runs; lemon nodes fail more often until they are
evicted). Each interruption is noticed after a while, takes a spare if a part broke, restarts, and repeats the work
since the last checkpoint that survives it: a near one (in the memory of peers) or a far one (storage). With partial
restart, some interruptions only stop one replica for a moment and lose nothing.

Time is booked in classes that add up to one: goodput (work that stays), and badput by cause. Clock and randomness are
arguments: the same seed gives the same answer. Costs one step of numpy per interruption, over all runs together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lakh.errors import ConfigError, UserError
from lakh.planner.shape import Array
from lakh.spec.startup import STARTUP

__all__ = [
    "Goodput",
    "Policy",
    "Scene",
    "best_goodput",
    "best_interval_s",
    "daly_efficiency",
    "joining_s",
    "simulate",
    "young_efficiency",
]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The job and its misfortunes."""

    gpus: int
    days: float
    mtbf_s: float
    replacing_share: float = 0.5
    """Of the interruptions, those that take a spare node."""
    lemon_nodes: int = 0
    """Nodes that fail `lemon_factor` times as often as others, until evicted."""
    lemon_factor: float = 30.0
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.days <= 0 or self.mtbf_s <= 0 or not 0 <= self.replacing_share <= 1:
            raise ConfigError("scene", "gpus, days and mtbf_s must be positive, replacing_share 0 to 1", "mend them")
        if self.lemon_nodes < 0 or self.lemon_nodes * self.gpus_per_node > self.gpus or self.lemon_factor < 1:
            raise ConfigError(
                "lemon_nodes", f"{self.lemon_nodes} of {self.gpus} GPUs", "choose fewer, factor 1 or more"
            )


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What the operator does about them."""

    interval_s: float = 600.0
    """Work between far checkpoints."""
    stall_s: float = 5.0
    """How long a far checkpoint stops the job."""
    detect_s: float = 60.0
    restart_s: float = 360.0
    """From noticing to the first new step: reschedule, initialise, load."""
    near_interval_s: float = 0.0
    """Work between near checkpoints; 0 means there are none."""
    near_stall_s: float = 0.0
    near_share: float = 0.9
    """Interruptions that a near checkpoint survives."""
    near_restart_s: float = 0.0
    """Restart from a near checkpoint; 0 means as long as from a far one."""
    partial_share: float = 0.0
    """Interruptions after which only one replica restarts, from its peers, and no work is lost."""
    partial_restart_s: float = 30.0
    spares: int = 4096
    """Nodes that stand ready; a repaired one returns after repair_hours. From 4,096 on there is always one."""
    repair_hours: float = 24.0
    evict_after: int = 3
    """Interruptions by one lemon before it is taken out."""

    def __post_init__(self) -> None:
        times = (
            self.stall_s,
            self.detect_s,
            self.restart_s,
            self.near_interval_s,
            self.near_stall_s,
            self.repair_hours,
        )
        if self.interval_s <= 0 or min(*times, self.near_restart_s, self.partial_restart_s) < 0 or self.evict_after < 1:
            raise ConfigError("policy", "interval_s must be above 0 and no time may be negative", "mend them")
        if not (0 <= self.near_share <= 1 and 0 <= self.partial_share <= 1) or self.spares < 0:
            raise ConfigError("policy", "shares lie between 0 and 1, spares are 0 or more", "mend them")


@dataclass(frozen=True)
class Goodput:
    goodput: float
    low: float
    """5th and 95th percentile of the runs."""
    high: float
    badput: dict[str, float]
    """Shares of the time; with goodput they add up to 1."""
    failures_per_day: float
    interval_s: float
    runs: int


PLENTY = 4096
STORE_ROUND_TRIP_S = 1e-3  # assumed: a busy store in the same cluster
CLASSES = ("checkpoint", "lost_work", "detection", "restart", "waiting_for_spare", "partial_restart")


def simulate(scene: Scene, policy: Policy, *, runs: int = 10_000, seed: int = 1) -> Goodput:
    if runs < 1:
        raise UserError("--runs", f"{runs} runs", "choose 1 or more")
    rng = np.random.default_rng(seed)
    end = scene.days * 86400.0
    now, good, failures = np.zeros(runs), np.zeros(runs), np.zeros(runs)
    bad = {name: np.zeros(runs) for name in CLASSES}
    node_rate = 1 / scene.mtbf_s / (scene.gpus / scene.gpus_per_node)  # of one healthy node
    lemons = np.full(runs, float(scene.lemon_nodes))
    repair_s = policy.repair_hours * 3600
    slots = np.full((runs, policy.spares if policy.spares < PLENTY else 0), -np.inf)
    taken = np.zeros(runs, dtype=int)
    everyone = np.arange(runs)
    pending = np.zeros(runs)  # downtime still to be served before work goes on
    plan: dict[str, Array] = {}  # what it consists of, in order
    nothing, never = np.zeros(runs), np.zeros(runs, dtype=bool)
    active = now < end

    def chance(share: float) -> Array:
        """Which runs are hit; draws nothing for what cannot happen."""
        return rng.random(runs) < share if 0 < share < 1 else np.full(runs, share >= 1)

    while active.any():
        rate = 1 / scene.mtbf_s + lemons * node_rate * (scene.lemon_factor - 1)
        until = rng.standard_exponential(runs) / rate  # next interruption, from now
        ends = until >= end - now  # the run is over before anything happens
        span = np.where(active, np.minimum(until, end - now), 0.0)
        up = np.maximum(span - pending, 0.0)
        is_partial = ~ends & chance(policy.partial_share) & (up > 0)
        is_near = chance(policy.near_share) if policy.near_interval_s > 0 else never
        done, stalled, lost = _booked(policy, up, is_near, keeps=is_partial | ends)
        good += done
        bad["checkpoint"] += stalled
        bad["lost_work"] += lost
        _book_down(bad, np.minimum(pending, span), plan)
        now = now + span
        struck = active & ~ends
        failures += struck
        if scene.lemon_nodes:
            is_lemon = rng.random(runs) < lemons * node_rate * scene.lemon_factor / rate
            lemons = np.maximum(lemons - (is_lemon & struck & chance(1 / policy.evict_after)), 0)
        wait = nothing
        if policy.spares < PLENTY:
            replaces = struck & ~is_partial & chance(scene.replacing_share)
            wait = np.where(replaces, repair_s, 0.0)
            if policy.spares > 0:  # spares come back in the order they were taken
                which = taken % policy.spares
                back = slots[everyone, which]
                wait = np.where(replaces, np.maximum(back - now, 0.0), 0.0)
                slots[everyone, which] = np.where(replaces, now + wait + repair_s, back)
                taken += replaces
        again = np.where(is_near, policy.near_restart_s or policy.restart_s, policy.restart_s)
        plan = {
            "detection": np.where(is_partial, 0.0, policy.detect_s),
            "waiting_for_spare": wait,
            "restart": np.where(is_partial, 0.0, again),
            "partial_restart": np.where(is_partial, policy.partial_restart_s, 0.0),
        }
        pending = sum(plan.values(), nothing)
        active = now < end
    share = good / end
    return Goodput(
        goodput=float(share.mean()),
        low=float(np.quantile(share, 0.05)),
        high=float(np.quantile(share, 0.95)),
        badput={name: float((value / end).mean()) for name, value in bad.items()},
        failures_per_day=float(failures.mean() / scene.days),
        interval_s=policy.interval_s,
        runs=runs,
    )


def _booked(policy: Policy, up: Array, is_near: Array, keeps: Array) -> tuple[Array, Array, Array]:
    """Of so many seconds of running: work that stays, time in checkpoints, work that is lost."""
    near = policy.near_stall_s / policy.near_interval_s if policy.near_interval_s else 0.0
    work_per_cycle = policy.interval_s
    cycle = policy.interval_s * (1 + near) + policy.stall_s
    whole = np.floor(up / cycle)
    rest = up - whole * cycle
    rest_work = np.minimum(rest, policy.interval_s * (1 + near)) / (1 + near)
    rest_stall = rest - rest_work
    near_step = policy.near_interval_s or policy.interval_s
    near_work = np.floor(rest_work / near_step) * near_step
    kept = np.where(keeps, rest_work, np.where(is_near & (policy.near_interval_s > 0), near_work, 0.0))
    return whole * work_per_cycle + kept, whole * (cycle - work_per_cycle) + rest_stall, rest_work - kept


def _book_down(bad: dict[str, Array], cut: Array, plan: dict[str, Array]) -> None:
    """Serve a downtime in order; a new interruption may cut it short."""
    left = cut
    for name, length in plan.items():
        part = np.minimum(left, length)
        bad[name] += part
        left = left - part


# --- closed forms ---


def daly_efficiency(mtbf_s: Array, interval_s: Array, stall_s: Array, restart_s: Array) -> Array:
    """Work over wall time with exponential failures that may also strike checkpoints and restarts (Daly 2006)."""
    m = np.asarray(mtbf_s, dtype=float)
    exponent = np.minimum((np.asarray(interval_s) + stall_s) / m, 700.0)
    return interval_s / (m * np.exp(np.minimum(restart_s / m, 700.0)) * np.expm1(exponent))


def young_efficiency(mtbf_s: Array, interval_s: Array, stall_s: Array, restart_s: Array) -> Array:
    """The first-order form, for comparison only: off by up to 13 points where failures are frequent."""
    return 1 - stall_s / interval_s - (interval_s / 2 + restart_s) / mtbf_s


def best_interval_s(mtbf_s: float, stall_s: float, restart_s: float) -> float:
    """The interval with the highest exponential efficiency, found on a fine grid around Young's."""
    if stall_s == 0:
        return 1.0
    start = math.sqrt(2 * stall_s * mtbf_s)
    grid = start * np.exp(np.linspace(-3, 2, 2001))
    return float(grid[np.argmax(daly_efficiency(mtbf_s, grid, stall_s, restart_s))])


def joining_s(ranks: int) -> float:
    """Of a restart: until a rank has joined its group again over c3, by what a start was measured to cost (up to 512
    ranks; beyond, extrapolated), with a store that answers within STORE_ROUND_TRIP_S."""
    return STARTUP["c3"].rank_wall_s(ranks, STORE_ROUND_TRIP_S)


def best_goodput(mtbf_s: float, *, stall_s: float, restart_s: float) -> float:
    """The exponential efficiency at the best interval."""
    interval_s = best_interval_s(mtbf_s, stall_s, restart_s)
    return float(daly_efficiency(mtbf_s, interval_s, stall_s, restart_s))
