"""Sizes of incremental checkpoints of a recommendation model: full, then after some steps on MovieLens or Zipf ids."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace

import torch

from bench.harness import BenchRow, log
from lakh import checkpoint
from lakh.spec import Run, load_run
from lakh.tokens.loading.skips import SkipRanges
from lakh.trainer.launch.world import World
from lakh.trainer.optim.optimizer import role_of
from lakh.trainer.step import update
from lakh.trainer.workloads.dlrm import DlrmWorkload
from lakh.workloads.dlrm.data import to_batches
from lakh.workloads.dlrm.model import ClickModel
from lakh.workloads.dlrm.samples import open_samples
from lakh.workloads.dlrm.sharding.tables import ShardedTables

__all__ = ["bench_checkpoints"]

ROWS = 1_000_000
STEPS = (1, 10, 100)


def bench_checkpoints(movielens: str | None) -> list[BenchRow]:
    """The full checkpoint and an exact incremental one after each number of steps; `ratio` is full over incremental."""
    tables = [replace(load_run("dlrm.py:mlperf").dlrm.tables[0], name=f"t{i}", rows=ROWS, pooling=4.0) for i in (0, 1)]
    large = load_run("dlrm.py:mlperf")
    runs = {f"2 tables of {ROWS:,} rows, synthetic": replace(large, dlrm=replace(large.dlrm, tables=tuple(tables)))}
    if movielens:
        runs["MovieLens-100k"] = load_run("dlrm.py:movielens", (f"dlrm.dataset={movielens}",))
    return [row for name, run in runs.items() for row in _measure(name, run)]


def _measure(name: str, run: Run) -> list[BenchRow]:
    log(f"checkpoints: {name}")
    workload = DlrmWorkload(run, World(0, 1, torch.device("cpu"), "none"))
    model = workload.build_model(None, is_new=True)  # type: ignore[arg-type]
    assert isinstance(model, ClickModel)
    assert isinstance(model.tables, ShardedTables)
    optimizer, run_pass = workload.build_optimizer(model), workload.build_pass(None)  # type: ignore[arg-type]
    split, exchange = open_samples(run.dlrm, run.seed), model.tables.exchange
    rows: list[BenchRow] = []
    position = 0
    with tempfile.TemporaryDirectory(prefix="lakh-bench-") as folder:
        chain = checkpoint.DeltaChain("exact", role_of)
        for steps in (0, *STEPS):
            for _ in range(steps):
                numbers = split.training_numbers(SkipRanges(()), run.seed, position, run.data.batch)
                batches = to_batches(split.clicks.read(numbers), run.data.batch, exchange)
                update(model, optimizer, batches, lr=run.optim.lr, run_pass=run_pass)
                position += run.data.batch
            began = time.perf_counter()
            manifest = checkpoint.save(
                f"{folder}/step-{position:08d}",
                workload.state(model, optimizer),
                step=position,
                sequence_index=position,
                run_sha256="0" * 64,
                data_sha256="0" * 64,
                attachments={},
                chain=chain,
            )
            seconds = time.perf_counter() - began
            size_MB = manifest.bytes / 1e6
            what = f"{name}: MB of a checkpoint " + (f"after {steps} more steps" if steps else "in full")
            ratio = float(rows[0]["value"]) / size_MB if rows else None
            rows.append({"system": "lakh", "what": what, "value": size_MB, "ratio": ratio, "seconds": seconds})
    return rows
