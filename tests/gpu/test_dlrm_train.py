"""Training with tables on a GPU: the same steps as on a CPU, and checkpoints that continue on the other.

Without a GPU, Triton's interpreter can run the kernels: TRITON_INTERPRET=1, where Triton is installed. Then the tables
of the GPU are on the CPU.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lakh import checkpoint
from lakh.checkpoint.slices import slice_of
from lakh.errors import UserError
from lakh.spec import Data, Optimizer, Run, Training
from lakh.spec.embedding import ClickNetwork, EmbeddingTable, Recommender, TableSlice
from lakh.tokens.loading.skips import SkipRanges
from lakh.trainer.launch.world import World
from lakh.trainer.step import update
from lakh.trainer.workloads.dlrm import DlrmWorkload
from lakh.workloads.dlrm.data import to_batches
from lakh.workloads.dlrm.embedding.bags import EmbeddingBags, SparseSettings
from lakh.workloads.dlrm.embedding.gpu_tables import GpuTables
from lakh.workloads.dlrm.embedding.jagged import JaggedBags
from lakh.workloads.dlrm.samples import open_samples

pytest.importorskip("triton", reason="needs Triton, which comes with torch for NVIDIA GPUs")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
CPU = torch.device("cpu")
RECIPE = Path(__file__).parents[1] / "data" / "clicks.py"
STEPS, BATCH = (3, 8) if INTERPRETED else (30, 64)
TABLES = tuple(
    EmbeddingTable(name=f"t{i}", rows=rows, width=16, pooling=2, optimizer=optimizer)  # type: ignore[arg-type]
    for i, (rows, optimizer) in enumerate([(3, "sgd"), (40, "rowwise-adagrad"), (200, "rowwise-adam"), (9, "sgd")])
)


def run_of(clip_norm: float = 0.0) -> Run:
    network = ClickNetwork(dense_features=4, bottom=(8,), top=(16,))
    return Run(
        name="tiny",
        workload="dlrm",
        dlrm=Recommender(samples=2000, tables=TABLES, network=network),
        data=Data(sequence=1, batch=BATCH, micro_batch=BATCH // 2),
        optim=Optimizer(lr=1e-2, clip_norm=clip_norm, weight_decay=0.0, warmup_steps=0),
        train=Training(steps=STEPS, device=DEVICE.type),
    )


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if INTERPRETED:
        tables = functools.partial(GpuTables, device=DEVICE)
        monkeypatch.setattr("lakh.workloads.dlrm.sharding.tables.EmbeddingBags", tables)
    return DEVICE


def trained(run: Run, device: torch.device, *, steps: int = STEPS, source: Path | None = None) -> dict[str, Any]:
    """The state after some steps, the losses, and the norms of the gradients."""
    workload = DlrmWorkload(run, World(0, 1, device, "none"))
    model = workload.build_model(None, is_new=True)  # type: ignore[arg-type]
    optimizer = workload.build_optimizer(model)
    state = workload.state(model, optimizer)
    if source:
        checkpoint.load(str(source), state)
    run_pass = workload.build_pass(None)  # type: ignore[arg-type]
    split = open_samples(run.dlrm, run.seed)
    losses = []
    for step in range(steps):
        numbers = split.training_numbers(SkipRanges(()), run.seed, step * BATCH, BATCH)
        batches = to_batches(split.clicks.read(numbers), BATCH // 2, model.tables.exchange)  # type: ignore[arg-type,union-attr]
        batches = [batch.to(device) for batch in batches]
        done = update(model, optimizer, batches, lr=1e-2, clip_norm=run.optim.clip_norm, run_pass=run_pass)
        losses.append(float(done.loss))
    return {"state": {name: slice_of(tensor) for name, tensor in state.items()}, "losses": losses}


def assert_close(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    # f32 sums in another order, over a few steps
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-4)
    assert ours["state"].keys() == theirs["state"].keys()
    for name, part in theirs["state"].items():
        assert (ours["state"][name].shape, ours["state"][name].offset) == (part.shape, part.offset), name
        torch.testing.assert_close(ours["state"][name].local.cpu(), part.local.cpu(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("clip_norm", [0.0, 0.05])
def test_training_equals_the_cpu(on_gpu: torch.device, clip_norm: float, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = trained(run_of(clip_norm), on_gpu)
    monkeypatch.undo()
    assert_close(ours, trained(run_of(clip_norm), CPU))


def test_a_checkpoint_of_the_gpu_continues_on_the_cpu(
    on_gpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = trained(run_of(), on_gpu)
    facts = {"step": STEPS, "sequence_index": 0, "run_sha256": "0" * 64, "data_sha256": "0" * 64}
    saving = checkpoint.CheckpointSave(str(tmp_path / "saved"), ours["state"], **facts, attachments={}, rank=0, world=1)
    saving.write_now()
    saving.finish(lambda one: [one], lambda one: one)
    again = trained(run_of(), on_gpu, steps=0, source=tmp_path / "saved")["state"]
    monkeypatch.undo()
    on_cpu = trained(run_of(), CPU, steps=0, source=tmp_path / "saved")["state"]
    for name, part in ours["state"].items():
        assert torch.equal(part.local.cpu(), on_cpu[name].local), name
        assert torch.equal(part.local.cpu(), again[name].local.cpu()), name


def test_slices_of_several_widths_and_optimizers() -> None:
    wide = EmbeddingTable(name="wide", rows=30, width=16, features=2, optimizer="sgd")
    tall = EmbeddingTable(name="tall", rows=50, width=8)
    parts = [
        TableSlice(wide, (0, 30), (0, 8)),
        TableSlice(tall, (10, 50), (0, 8)),
        TableSlice(wide, (0, 30), (8, 12)),
    ]
    settings = SparseSettings(state_width=8)
    ours = GpuTables(parts, seed=1, device=DEVICE, settings=settings)
    theirs = EmbeddingBags(parts, seed=1, settings=settings)
    random = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 3, (5, 4), generator=random)
    bags = JaggedBags.of_lengths(torch.randint(0, 30, (int(lengths.sum()),), generator=random), lengths)
    grad_BC = torch.randn(4, theirs.columns, generator=random)
    there = bags.to(DEVICE)
    for _ in range(2):
        torch.testing.assert_close(ours.lookup(there).cpu(), theirs.lookup(bags), rtol=1e-5, atol=1e-6)
        ours.keep_gradient(there, grad_BC.to(DEVICE))
        theirs.keep_gradient(bags, grad_BC)
        assert ours.gradient_square() == pytest.approx(theirs.gradient_square(), rel=1e-5)
        ours.step(0.1, 0.5)
        theirs.step(0.1, 0.5)
    for key, part in theirs.held_tensors().items():
        found = ours.held_tensors()[key]
        assert (found.shape, found.offset) == (part.shape, part.offset), key
        torch.testing.assert_close(found.local.cpu(), part.local, rtol=1e-4, atol=1e-5)


def test_an_id_out_of_range_changes_no_table() -> None:
    tables = [EmbeddingTable(name="a", rows=30, width=8), EmbeddingTable(name="b", rows=7, width=16)]
    ours = GpuTables([TableSlice.whole(table) for table in tables], seed=1, device=DEVICE)
    before = {key: held.local.clone() for key, held in ours.held_tensors().items()}
    bags = JaggedBags.of_lengths(torch.tensor([1, 2, 3, 7]), torch.tensor([[1, 1], [1, 1]])).to(DEVICE)
    ours.keep_gradient(bags, torch.ones_like(ours.lookup(bags)))
    with pytest.raises(UserError, match=r"feature 1, sample 1: has an id that is not in \[0, 7\)"):
        ours.step(0.1)
    assert all(torch.equal(before[key], held.local) for key, held in ours.held_tensors().items())


def test_a_state_for_several_parts_of_a_row_is_refused() -> None:
    table = EmbeddingTable(name="wide", rows=30, width=16)
    with pytest.raises(UserError, match=r"set dlrm\.state_width to the width of the parts"):
        GpuTables([TableSlice.whole(table)], seed=1, device=DEVICE, settings=SparseSettings(state_width=8))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_command_trains_on_a_gpu_and_resumes_on_the_cpu(tmp_path: Path) -> None:
    def lakh(*arguments: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "lakh", *arguments, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    run_dir = str(tmp_path / "run")
    settings = ("train.device=cuda", "train.precision=f32", "train.steps=20", "optim.clip_norm=1.0")
    words = [word for setting in settings for word in ("--set", setting)]
    on_gpu = lakh("dlrm", "train", str(RECIPE), "--out", run_dir, *words)
    assert on_gpu["steps"] == 20
    assert 0 <= on_gpu["auc"] <= 1
    again = lakh("resume", run_dir, "--set", "train.steps=30", "--set", "train.device=cpu")
    assert again["steps"] == 30
