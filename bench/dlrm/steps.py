"""Whole training steps on two CPU ranks, beside TorchRec (step_rank.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.dlrm.bars import WHOLE_STEP, with_bar
from bench.harness import BenchRow, log

__all__ = ["bench_steps"]

RANKS = 2
TIMEOUT_S = 600
SHAPES = (
    {"tables": 8, "rows": 100_000, "width": 64, "batch": 1024, "pooling": 10},
    {"tables": 26, "rows": 20_000, "width": 32, "batch": 512, "pooling": 4},
)


def bench_steps(rounds: int, with_torchrec: bool) -> list[BenchRow]:
    """One row for each system and shape; `ratio` is TorchRec's best time over lakh's."""
    rows: list[BenchRow] = []
    for shape in SHAPES:
        log(f"steps on {RANKS} ranks: {shape}")
        times = _measure(shape, rounds, with_torchrec)
        what = f"{shape['tables']} x {shape['rows']} x {shape['width']}, batch {shape['batch']} x {RANKS} ranks, "
        what += f"pooling {shape['pooling']}: ms per step"
        ours = min(wall for wall, _ in times["lakh"])
        for system, found in times.items():
            wall, cpu = min(wall for wall, _ in found), min(cpu for _, cpu in found)
            ratio = wall / ours if system != "lakh" else None
            row: BenchRow = {"system": system, "what": what, "value": 1e3 * wall, "ratio": ratio, "cpu_ms": 1e3 * cpu}
            rows.append(with_bar(row, WHOLE_STEP))
    return rows


def _measure(shape: dict[str, int], rounds: int, with_torchrec: bool) -> dict[str, list[tuple[float, float]]]:
    peers = ["torchrec"] if with_torchrec else []
    with tempfile.TemporaryDirectory(prefix="lakh-bench-") as folder:
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "RANK": "",
            "LOCAL_WORLD_SIZE": str(RANKS),
        }
        processes = []
        for rank in range(RANKS):
            arguments = [str(rank), str(RANKS), f"{folder}/store", str(rounds), json.dumps(shape), *peers]
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "bench.dlrm.step_rank", *arguments],
                    stdout=subprocess.PIPE,
                    stderr=(Path(folder) / f"{rank}.err").open("w"),
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)},
                    text=True,
                )
            )
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
        for rank, process in enumerate(processes):
            if process.returncode:
                error = (Path(folder) / f"{rank}.err").read_text()[-2000:]
                raise RuntimeError(f"rank {rank} of the step benchmark failed:\n{error}")
    found: dict[str, list[tuple[float, float]]] = json.loads(outputs[0].splitlines()[-1])
    return found
