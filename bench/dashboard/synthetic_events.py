"""Events of a large run that was never trained: steps of rank 0, starts of every rank, checkpoints, a few failures.

Times, losses and slow ranks follow from the seed, so two runs of the same size are the same bytes.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from lakh.events.extremes import StepExtremes

__all__ = ["write_run"]

START_S = 1_790_000_000.0
STEP_S = 12.0
CHECKPOINT_EVERY = 1_000
FAILURES = 20
"""Restarts, spread evenly over the run; each loses half of the steps since the last checkpoint."""
SETTINGS = """name = "synthetic"
[mesh]
dp_replicate = 1
pp = 1
dp_shard = -1
cp = 1
tp = 8
[train]
steps = {steps}
[[cluster.tiers]]
name = "node"
size = 8
[[cluster.tiers]]
name = "rack"
size = 72
"""


def write_run(run_dir: Path, *, steps: int, ranks: int, seed: int = 1) -> int:
    """Write run.toml and one event file per rank; returns the number of bytes of events."""
    folder = run_dir / "events"
    folder.mkdir(parents=True)
    (run_dir / "run.toml").write_text(SETTINGS.format(steps=steps))
    started = {"world": ranks, "backend": "nccl", "device": "cuda", "parameters": 70_000_000_000, "sequence_index": 0}
    started |= {"run_sha256": "r", "data_sha256": "d"}
    failures = {steps * (number + 1) // (FAILURES + 1) for number in range(min(FAILURES, steps // CHECKPOINT_EVERY))}
    rng, now_s, attempt = random.Random(seed), START_S, 0
    starts: list[tuple[float, int]] = []
    extremes = StepExtremes(folder)

    with (folder / "rank-00000.jsonl").open("w", encoding="utf-8", buffering=1 << 20) as file:

        def event(kind: str, step: int, **fields: object) -> None:
            row = {"time_s": round(now_s, 3), "rank": 0, "step": step, "kind": kind, **fields}
            line = json.dumps(row, separators=(",", ":")) + "\n"
            file.write(line)
            if kind == "step_done":
                extremes.add(row, line.encode())

        def start(step: int) -> None:
            nonlocal now_s
            now_s += 90.0
            event("initialised", step, seconds=90.0)
            event("run_started", step, attempt=attempt, **started)
            starts.append((now_s, step))

        start(0)
        step = saved = 0
        while step < steps:
            step += 1
            step_s = STEP_S * (1 + 0.02 * rng.random())
            now_s += step_s
            loss = 1.7 + 9.0 * math.exp(-step / (0.02 * steps + 1)) + 0.05 * rng.gauss(0, 1)
            event(
                "step_done",
                step,
                loss=round(loss, 6),
                lr=round(3e-4 * (0.5 + 0.5 * math.cos(math.pi * step / steps)), 9),
                grad_norm=round(0.4 + 0.1 * rng.random(), 6),
                tokens=step * 4_194_304,
                tokens_per_s=round(4_194_304 / step_s, 1),
                step_s=round(step_s, 5),
                data_wait_s=round(0.02 * rng.random(), 5),
                mfu=round(0.42 * STEP_S / step_s, 5),
                compile_s=0.0,
                straggler_s=round(0.05 * rng.random(), 5),
                slowest_rank=rng.randrange(ranks) if rng.random() < 0.9 else ranks - 1,
            )
            if step % CHECKPOINT_EVERY == 0:
                now_s += 2.0
                event("checkpoint_saved", step, path=f"step-{step:08d}", bytes=10**12, seconds=2.0)
                event("evaluated", step, loss=round(loss + 0.03, 6), sequences=1024, seconds=20.0)
                saved = step
            elif step in failures and step - saved >= CHECKPOINT_EVERY // 2:
                failures.discard(step)
                attempt += 1
                now_s += 60.0
                event("restarted", saved, attempt=attempt, reason="rank 17 lost its GPU", detected_s=now_s - 30.0)
                start(saved)
                step = saved
        event("run_ended", steps, reason="last step done", seconds=round(now_s - START_S, 1))

    extremes.flush()
    for rank in range(1, ranks):
        rows = [
            {"time_s": round(time_s, 3), "rank": rank, "step": at, "kind": "run_started", "attempt": number, **started}
            for number, (time_s, at) in enumerate(starts)
        ]
        text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
        (folder / f"rank-{rank:05d}.jsonl").write_text(text, encoding="utf-8")
    return sum(path.stat().st_size for path in folder.iterdir())
