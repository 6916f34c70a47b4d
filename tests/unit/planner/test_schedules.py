"""Pipeline schedules: closed forms, the operation order of torch.distributed.pipelining, and slow boundaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lakh.errors import UserError
from lakh.planner.schedules.operations import BACKWARD, FORWARD, INPUT, WEIGHT, Operation, PipelineSchedule
from lakh.planner.schedules.orders import LOOPED, SCHEDULE_NAMES, build_schedule, extra_warm_up
from lakh.planner.schedules.timeline import OperationSeconds, PipelineTimeline, simulate_schedule

Lakh = Callable[..., tuple[int, str, str]]
Json = Callable[[str], Any]
EVEN = OperationSeconds(forward=1.0, input=1.0, weight=1.0)
UNEVEN = OperationSeconds(forward=1.0, input=1.1, weight=0.9)
SHAPES = [(1, 4), (2, 4), (4, 8), (4, 16), (8, 16)]


def chunks_of(name: str) -> int:
    return 2 if name in LOOPED else 1


def timeline(name: str, p: int, m: int, seconds: OperationSeconds = EVEN, chunks: int = 0) -> PipelineTimeline:
    return simulate_schedule(build_schedule(name, p, m, chunks or chunks_of(name)), seconds)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (6, 24), (8, 16)])
def test_every_micro_batch_passes_every_stage_once(name: str, p: int, m: int) -> None:
    schedule = build_schedule(name, p, m, chunks_of(name))
    done = Counter(
        (kind, operation.stage, operation.micro_batch)
        for rank, order in enumerate(schedule.operations)
        for operation in order
        for kind in ((INPUT, WEIGHT) if operation.kind == BACKWARD else (operation.kind,))
        if schedule.stage_ranks[operation.stage] == rank
    )
    numbers = range(m // schedule.copies)
    stages = range(len(schedule.stage_ranks))
    assert done == Counter((kind, s, i) for kind in (FORWARD, INPUT, WEIGHT) for s in stages for i in numbers)
    assert simulate_schedule(schedule, EVEN).total_s >= 3 * m


@pytest.mark.parametrize(("p", "m"), SHAPES)
@pytest.mark.parametrize("seconds", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_gpipe_and_1f1b_have_the_published_bubble(p: int, m: int, seconds: OperationSeconds) -> None:
    for name in ("gpipe", "1f1b"):
        found = timeline(name, p, m, seconds)
        assert found.total_s == pytest.approx((m + p - 1) * seconds.total)
        assert found.bubble_share == pytest.approx((p - 1) / (m + p - 1))
    assert [timeline("gpipe", p, m).peak_in_flight(r) for r in range(p)] == [m] * p
    assert [timeline("1f1b", p, m).peak_in_flight(r) for r in range(p)] == [min(p - r, m) for r in range(p)]


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 8, 3), (8, 16, 4)])
def test_chunks_divide_the_bubble(p: int, m: int, v: int) -> None:
    for name in LOOPED:
        found = timeline(name, p, m, UNEVEN, chunks=v)
        assert found.total_s == pytest.approx((m + (p - 1) / v) * UNEVEN.total)
    assert timeline("interleaved", p, m, chunks=v).peak_in_flight(0) == pytest.approx(p + (p - 1) / v)
    assert timeline("breadth-first", p, m, chunks=v).peak_in_flight(0) == m
    assert timeline("lean", p, m, chunks=v).peak_in_flight(0) == p


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 16), (8, 32)])
@pytest.mark.parametrize(
    "seconds", [EVEN, OperationSeconds(forward=1.0, input=1.2, weight=0.7)], ids=["even", "uneven"]
)
def test_zero_bubble_h1_and_h2(p: int, m: int, seconds: OperationSeconds) -> None:
    f, i, w = seconds.forward, seconds.input, seconds.weight
    h1, h2 = timeline("zb-h1", p, m, seconds), timeline("zb-h2", p, m, seconds)
    assert h1.idle_s(0) == pytest.approx((p - 1) * (f + i - w))
    assert h2.idle_s(0) == pytest.approx((p - 1) * (f + i - 2 * w))
    assert [h1.peak_in_flight(r) for r in range(p)] == [p] * p
    assert [h2.peak_in_flight(r) for r in range(p)] == [2 * p - 1] * p


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 16), (8, 32)])
def test_zero_bubble_v_is_idle_nowhere_with_the_memory_of_1f1b(p: int, m: int) -> None:
    found = timeline("zb-v", p, m)
    assert [found.idle_s(r) for r in range(p)] == pytest.approx([0.0] * p)
    assert max(found.peak_in_flight(r) for r in range(p)) == p
    assert found.total_s == pytest.approx(
        3 * m + (p - 1) / 2
    )  # the last rank starts half a forward pass later for each


@pytest.mark.parametrize(("p", "m"), [(4, 16), (8, 32)])
def test_dual_pipe_idles_less_than_published_and_holds_one_micro_batch_more(p: int, m: int) -> None:
    dual, folded = timeline("dualpipe", p, m), timeline("dualpipe-v", p, m)
    # DeepSeek-V3, table 2: (p / 2 - 1)(F&B + B - 3W), activations of p + 1; here F&B is a forward and a backward pass
    assert dual.total_s - dual.ideal_s <= (p / 2 - 1) * (3 + 2 - 3)
    assert [dual.peak_in_flight(r) for r in range(p)] == [p + 1] * p
    assert dual.schedule.copies == 2
    assert folded.schedule.copies == 1
    assert folded.total_s < timeline("zb-h1", p, m).total_s


# --- torch's own order ---


def torch_order(name: str, p: int, m: int, v: int) -> list[list[Operation]]:
    """What torch.distributed.pipelining computes, without idle steps."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    known = {
        "gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
        "breadth-first": "ScheduleLoopedBFS", "zb-v": "ScheduleZBVZeroBubble", "dualpipe-v": "ScheduleDualPipeV",
    }  # fmt: skip
    kind = getattr(schedules, known[name], None)
    if kind is None or (name in ("gpipe", "1f1b") and not hasattr(kind, "_get_pipeline_order")):
        pytest.skip(f"this release of torch does not tell the order of {name}")
    itself = SimpleNamespace(
        pp_group_size=p, _n_microbatches=m, _num_stages=p * v, num_stages=p * v, n_local_stages=v, _stages=[None] * v,
        number_of_rounds=m // p, microbatches_per_round=p,
    )  # fmt: skip
    if name in ("gpipe", "1f1b"):
        found = kind._get_pipeline_order(itself)
    else:
        found = {rank: kind._calculate_single_rank_operations(itself, rank) for rank in range(p)}
    flat = []
    for rank in range(p):
        actions = [
            part for action in found[rank] if action for part in (getattr(action, "sub_actions", None) or (action,))
        ]
        steps = [Operation(a.computation_type.value, a.stage_index, a.microbatch_index) for a in actions]
        flat.append([step for step in steps if step.kind in (FORWARD, BACKWARD, INPUT, WEIGHT)])
    if name == "1f1b":  # torch 2.13 lists forward passes of the last rank from 1 on; it executes them from 0 on
        flat[-1] = [step._replace(micro_batch=step.micro_batch - (step.kind == FORWARD)) for step in flat[-1]]
    return flat


@pytest.mark.slow  # imports torch
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (3, 9)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "breadth-first", "zb-v", "dualpipe-v"])
def test_the_order_is_that_of_torch(name: str, p: int, m: int) -> None:
    v = 1 if name in ("gpipe", "1f1b") else 2
    ours = build_schedule(name, p, m, chunks_of(name))
    assert [list(order) for order in ours.operations] == torch_order(name, p, m, v)


# --- slow boundaries ---


@pytest.mark.parametrize(("delay", "slowdown"), [(0.1, 1.02), (0.5, 1.12), (1, 1.25), (2, 1.49), (4, 1.98), (8, 2.96)])
def test_a_slow_boundary_slows_1f1b_and_a_deeper_warm_up_recovers_it(delay: float, slowdown: float) -> None:
    delays = [0.0] * 15
    delays[7] = delay
    plain = build_schedule("1f1b", 16, 64)
    fast = simulate_schedule(plain, EVEN).total_s
    assert simulate_schedule(plain, EVEN, delays).total_s / fast == pytest.approx(slowdown, abs=0.006)
    deeper = build_schedule("1f1b", 16, 64, warm_up=extra_warm_up(delays, EVEN.total))
    found = simulate_schedule(deeper, EVEN, delays)
    assert found.total_s == pytest.approx(fast + 2 * delay)  # only the first and the last crossing remain
    assert found.peak_in_flight(0) == 16 + extra_warm_up(delays, EVEN.total)[0]


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_a_longer_delay_never_makes_a_step_shorter(name: str) -> None:
    schedule = build_schedule(name, 4, 16, chunks_of(name))
    times = [simulate_schedule(schedule, EVEN, [0, delay, 0]).total_s for delay in (0.0, 0.5, 1.0, 4.0)]
    assert times == sorted(times)


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("m", range(1, 12))
def test_interleaved_takes_any_number_of_micro_batches(p: int, m: int) -> None:
    found = simulate_schedule(build_schedule("interleaved", p, m, chunks=2), EVEN)
    assert sum(map(len, found.ranks)) == p * m * 2 * 2
    whole = simulate_schedule(build_schedule("interleaved", p, -(-m // p) * p, chunks=2), EVEN)
    assert found.total_s <= whole.total_s + 1e-9


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("1f1c", 2, 2), "is not known"),
        (("1f1b", 0, 2), "at least one rank"),
        (("1f1b", 2, 2, 2), "2 chunks per rank"),
        (("dualpipe", 3, 8), "even numbers"),
        (("dualpipe-v", 4, 4), "at least 8"),
        (("gpipe", 2, 2, 1, (1, 0)), "warm-up of its own"),
        (("1f1b", 2, 2, 1, (0, 1)), "do not rise"),
    ],
)
def test_impossible_schedules_are_refused(arguments: tuple[Any, ...], told: str) -> None:
    with pytest.raises(UserError, match=told):
        build_schedule(*arguments)


def test_an_order_that_waits_for_ever_is_reported() -> None:
    orders = ((Operation(BACKWARD, 0, 0), Operation(FORWARD, 0, 0)),)
    with pytest.raises(UserError, match="waits for ever before 0B0"):
        simulate_schedule(PipelineSchedule("made", 1, 1, 1, (0,), orders), EVEN)


def test_delays_and_durations_are_checked() -> None:
    with pytest.raises(UserError, match="give 3 numbers"):
        simulate_schedule(build_schedule("1f1b", 4, 8), EVEN, [1.0])
    with pytest.raises(UserError, match="not a positive time"):
        OperationSeconds(forward=-1, input=1, weight=1)


# --- the command ---


def test_schedules_are_compared(lakh: Lakh, last_line: Json, tmp_path: Path) -> None:
    words = ["plan", "schedule", "--stages", "4", "--micro-batches", "16"]
    code, out, _ = lakh(*words, "--json")
    assert code == 0
    rows = {row["schedule"]: row for row in last_line(out)["schedules"]}
    assert set(SCHEDULE_NAMES) == set(rows)
    assert rows["1f1b"]["time_s"] == pytest.approx(57 / 3)
    assert rows["zb-v"]["bubble"] < rows["zb-h1"]["bubble"] < rows["1f1b"]["bubble"]
    picture = tmp_path / "timeline.svg"
    code, out, _ = lakh(*words, "--kind", "zb-h1", "--delay", "2:0.5", "--plot", str(picture), "--json")
    assert code == 0
    assert [row["schedule"] for row in last_line(out)["schedules"]] == ["zb-h1"]
    assert picture.read_text().count("<rect") > 4 * 16 * 3
    code, out, _ = lakh(*words)
    assert code == 0
    assert "1f1b, deeper warm-up" not in out
    code, out, _ = lakh(*words, "--delay", "2:0.5")
    assert "deeper warm-up" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--delay", "9:1"], "boundary 9"),
        (["--delay", "x"], "BOUNDARY:SECONDS"),
        (["--kind", "zb-v", "--chunks", "3"], "omit the chunks"),
        (["--plot", "t.svg"], "--kind"),
    ],
)
def test_wrong_options_are_refused(words: list[str], told: str, lakh: Lakh) -> None:
    code, _, err = lakh("plan", "schedule", "--stages", "4", "--micro-batches", "16", *words)
    assert code == 2
    assert told in err
