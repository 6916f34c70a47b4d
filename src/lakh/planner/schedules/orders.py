"""The order of operations of each pipeline schedule.

p ranks, m micro-batches, v stages per rank. Bubble is the idle time of the first rank between its first and last
operation, in the time of a forward pass (f), the input half (i) and the weight half (w) of a backward pass of a whole
rank; peak is the number of micro-batches whose activations the fullest rank holds.

    name             bubble                  peak                 source
    gpipe            (p-1)(f+i+w)            m                    Huang et al. 2019
    1f1b             (p-1)(f+i+w)            p                    Narayanan et al. 2021
    interleaved      (p-1)(f+i+w)/v          p + (p-1)/v          Narayanan et al. 2021
    lean             (p-1)(f+i+w)/v          p                    interleaved with half of its warm-up
    breadth-first    (p-1)(f+i+w)/v          m                    Lamy-Poirier 2023
    zb-h1            (p-1)(f+i-w)            p                    Qi et al. 2024
    zb-h2            (p-1)(f+i-2w)           2p-1                 Qi et al. 2024
    zb-v             0 where f = i = w       p                    Qi et al. 2024
    dualpipe         see DeepSeek-V3 (2024), section 3.2.1; two copies of the weights
    dualpipe-v       the same folded onto half of the ranks; one copy
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

from lakh.errors import UserError
from lakh.planner.schedules.operations import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Operation,
    PipelineSchedule,
    number_micro_batches,
)

__all__ = ["LOOPED", "SCHEDULE_NAMES", "build_schedule", "extra_warm_up"]

Order = list[tuple[str, int]]
SCHEDULE_NAMES = (
    "gpipe", "1f1b", "interleaved", "lean", "breadth-first", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v",
)  # fmt: skip
LOOPED = ("interleaved", "lean", "breadth-first")
"""Schedules with several stages per rank."""


def build_schedule(
    name: str, ranks: int, micro_batches: int, chunks: int = 1, warm_up: Sequence[int] = ()
) -> PipelineSchedule:
    """A schedule by name. `chunks` are stages per rank of a looped one; `warm_up` are additional
    forward passes of each rank before its first backward pass, of 1f1b."""
    _check(name, ranks, micro_batches, chunks, warm_up)
    p, m = ranks, micro_batches
    extra = list(warm_up) or [0] * p
    loop = tuple(range(p)) * chunks
    fold = (*range(p), *reversed(range(p)))
    one = tuple(range(p))
    orders: dict[str, tuple[int, tuple[int, ...], Callable[[int], Order]]] = {
        "gpipe": (p, one, lambda r: [(FORWARD, r)] * m + [(BACKWARD, r)] * m),
        "1f1b": (p, one, lambda r: _one_f_one_b(r, p, m, extra[r])),
        "interleaved": (p * chunks, loop, lambda r: _interleaved(r, p, m, chunks, 2)),
        "lean": (p * chunks, loop, lambda r: _interleaved(r, p, m, chunks, 1)),
        "zb-h1": (p, one, lambda r: _split_backward(r, p, m, ahead=1)),
        "zb-h2": (p, one, lambda r: _split_backward(r, p, m, ahead=2)),
        "zb-v": (2 * p, fold, lambda r: _zero_bubble_v(r, p, m)),
        "dualpipe-v": (2 * p, fold, lambda r: _dual_pipe(r, p, m, r, 2 * p - 1 - r)),
        "dualpipe": (p, fold, lambda r: _two_directions(r, p, m)),
    }
    if name == "breadth-first":
        operations = tuple(_breadth_first(r, p, m, chunks) for r in range(p))
        return PipelineSchedule(name, p, m, p * chunks, loop, operations)
    stages, stage_ranks, order = orders[name]
    per_copy = m // 2 if name == "dualpipe" else m
    operations = tuple(number_micro_batches(order(r), per_copy) for r in range(p))
    return PipelineSchedule(name, p, m, stages, stage_ranks, operations)


def extra_warm_up(delays: Sequence[float], micro_batch_s: float) -> list[int]:
    """Additional forward passes of each rank of 1f1b that hide slow boundaries.

    A gradient returns over a slow boundary two delays later than over a fast one. Every rank before the boundary needs
    work for that time: two delays over the time of one micro-batch on a rank, rounded up.
    """
    ranks = len(delays) + 1
    return [int(-(-2 * sum(delays[r:]) // micro_batch_s)) for r in range(ranks)]


def _check(name: str, ranks: int, micro_batches: int, chunks: int, warm_up: Sequence[int]) -> None:
    where = f"schedule {name}"
    if name not in SCHEDULE_NAMES:
        raise UserError(where, "is not known", f"choose from: {', '.join(SCHEDULE_NAMES)}")
    if ranks < 1 or micro_batches < 1 or chunks < 1:
        raise UserError(where, "needs at least one rank, micro-batch and chunk", "give positive numbers")
    if chunks > 1 and name not in LOOPED:
        raise UserError(
            where, f"has {chunks} chunks per rank", f"omit the chunks, or choose one of: {', '.join(LOOPED)}"
        )
    if warm_up and name != "1f1b":
        raise UserError(where, "has a warm-up of its own", "choose 1f1b")
    if warm_up and (len(warm_up) != ranks or any(a < b for a, b in pairwise(warm_up))):
        raise UserError(where, f"cannot warm up by {list(warm_up)}", f"give {ranks} numbers that do not rise")
    if name.startswith("dualpipe"):
        if name == "dualpipe" and (ranks % 2 or micro_batches % 2):
            raise UserError(where, f"{ranks} ranks, {micro_batches} micro-batches", "give even numbers")
        if micro_batches < 2 * ranks:
            raise UserError(where, f"{micro_batches} micro-batches on {ranks} ranks", f"give at least {2 * ranks}")


def _breadth_first(r: int, p: int, m: int, chunks: int) -> tuple[Operation, ...]:
    """All forward passes, chunk by chunk, then all backward passes, last first."""
    stages = [chunk * p + r for chunk in range(chunks)]
    forward = [Operation(FORWARD, stage, i) for stage in stages for i in range(m)]
    backward = [Operation(BACKWARD, stage, i) for stage in reversed(stages) for i in reversed(range(m))]
    return (*forward, *backward)


def _one_f_one_b(r: int, p: int, m: int, extra: int) -> Order:
    ahead = min(p - 1 - r + extra, m)
    steady: Order = [(FORWARD, r), (BACKWARD, r)]
    return [(FORWARD, r)] * ahead + steady * (m - ahead) + [(BACKWARD, r)] * ahead


def _interleaved(r: int, p: int, m: int, v: int, ahead_of_next: int) -> Order:
    """Rounds of p micro-batches through all chunks of the rank; backward passes take the chunks in reverse.

    A rank runs `ahead_of_next` chunks ahead of the next one: 1 is the least that adds no bubble, 2 hides transfers.

    Where m is not a multiple of p the rounds are a little larger: a smaller one would wait for itself. Fewer than p
    micro-batches are one round whose forward passes all come first.
    """
    rounds = max(m // p, 1)
    sizes = [m // rounds + (n < m % rounds) for n in range(rounds)]
    chunk = [c for size in sizes for c in range(v) for _ in range(size)]
    forward: Order = [(FORWARD, c * p + r) for c in chunk]
    backward: Order = [(BACKWARD, (v - 1 - c) * p + r) for c in chunk]
    ahead = min((v - 1) * sizes[0] + ahead_of_next * (p - 1 - r), m * v) if m >= p else m * v
    steady = [step for pair in zip(forward[ahead:], backward, strict=False) for step in pair]
    return forward[:ahead] + steady + backward[m * v - ahead :]


def _split_backward(r: int, p: int, m: int, ahead: int) -> Order:
    """1F1B whose weight halves wait: `ahead` x r of them are left for the end, where ranks would be idle."""
    start, late = min(ahead * (p - 1 - r), m), min(ahead * r, m)
    order: Order = [(FORWARD, r)] * start
    for n in range(m):
        order += [(FORWARD, r)] * (n < m - start) + [(INPUT, r)] + [(WEIGHT, r)] * (n >= late)
    return order + [(WEIGHT, r)] * late


def _zero_bubble_v(r: int, p: int, m: int) -> Order:
    """Two stages per rank, folded: the first rank has the first and the last one."""
    n = max(m, 2 * p - 1)  # fewer do not fill the pipeline; what is too much is left out by its number
    a, b = r, 2 * p - 1 - r
    order: Order = [(FORWARD, a)] * (2 * (p - r) - 1) + [(FORWARD, b), (FORWARD, a)] * r
    order += [(FORWARD, b), (INPUT, b), (WEIGHT, b)] * (p - r)
    for step in range(n - p):
        order += [(FORWARD, a)] * (2 * p - 1 - r + step < n) + [(INPUT, a), (WEIGHT, a)]
        order += [(FORWARD, b), (INPUT, b), (WEIGHT, b)]
    order += [(INPUT, a), (INPUT, b)] * r + [(INPUT, a), (WEIGHT, a)] * (p - r)
    return order + [(WEIGHT, b)] * r + [(WEIGHT, a)] * r


def _two_directions(r: int, p: int, m: int) -> Order:
    """DualPipe: half of the micro-batches enter at each end, and each half of the ranks mirrors the other.

    Stage s of the second direction is numbered p + s and is on rank p - 1 - s.
    """
    towards, back = r, p + (p - 1 - r)
    if r < p // 2:
        return _dual_pipe(r, p // 2, m // 2, towards, back)
    return _dual_pipe(p - 1 - r, p // 2, m // 2, back, towards)


def _dual_pipe(r: int, p: int, m: int, a: int, b: int) -> Order:
    """The eight phases of DualPipe on a rank with a stage of the near half (a) and one of the far half (b)."""
    order: Order = []
    waiting: deque[int] = deque()  # stages whose weight half has not run yet

    def add(kind: str, stage: int) -> None:
        order.append((kind, stage))
        if kind == INPUT:
            waiting.append(stage)

    def add_waiting_weight() -> None:
        if waiting:
            order.append((WEIGHT, waiting.popleft()))

    rest = p - 1 - r
    order += [(FORWARD, a)] * (2 * rest) + [(FORWARD, a), (FORWARD, b)] * (r + 1)
    for _ in range(rest):
        add(INPUT, b)
        add_waiting_weight()
        add(FORWARD, b)
    order += [(FORWARD, a), (BACKWARD, b), (FORWARD, b), (BACKWARD, a)] * (m - 2 * p + r + 1)
    order += [(BACKWARD, b), (FORWARD, b), (BACKWARD, a)] * rest
    for n in range(2 * (r + 1)):  # the second half leaves its weight halves for the end
        add(INPUT if n > r else BACKWARD, a if n % 2 else b)
    for _ in range(rest):
        add_waiting_weight()
        add(INPUT, a)
    while waiting:
        add_waiting_weight()
    return order
