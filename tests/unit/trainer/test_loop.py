"""One rank, in this process: bad batches, spikes and rewinds, hooks, and settings that may not change under a run."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import os
import sys
import threading
from itertools import count
from pathlib import Path

import pytest
import torch

from lakh import checkpoint, events, storage
from lakh.checkpoint.tensor_file import write_tensors
from lakh.compute_threads import ComputeThreads, CoreTimes
from lakh.errors import InfeasiblePlan, LakhError, UserError
from lakh.spec import Checkpoints, Data, Model, Optimizer, Run, Training, load_run
from lakh.spec.model import Experts
from lakh.tokens.loading.digest import StreamDigest, digest_sequences
from lakh.tokens.loading.stream import TokenStream
from lakh.trainer.loop import train
from lakh.workloads.code.data import Batches

TOKENS = Path(__file__).resolve().parents[2] / "golden" / "tokens-1"


@pytest.fixture
def run() -> Run:
    return Run(
        name="tiny",
        model=Model(layers=1, width=16, heads=2, kv_heads=1, ffn=24, vocab=320, context=32),
        data=Data(tokens=str(TOKENS), sequence=16, batch=4, micro_batch=2),
        optim=Optimizer(lr=1e-2, warmup_steps=2, schedule="constant"),
        train=Training(steps=30, eval_every=0, eval_sequences=4, precision="f32", device="cpu", threads=1),
        checkpoint=Checkpoints(every=10),
    )


def changed(run: Run, **settings: object) -> Run:
    return dataclasses.replace(run, train=dataclasses.replace(run.train, **settings))  # type: ignore[arg-type]


class CorruptBatches(Batches):
    """Data whose sequence number BAD is corrupt, as by a bad shard or a flipped bit."""

    BAD = 88  # in step 22, counted from 0
    weight: float | None = None

    def micro_batches(self, step, device):
        batches = super().micro_batches(step, device)
        indexes = [self.skips.index_of(4 * step + i) for i in range(4)]  # data.batch is 4
        if self.BAD in indexes:
            noise = torch.Generator().manual_seed(1)
            targets = torch.randint(300, 320, batches[0].targets.shape, generator=noise)
            batches = [dataclasses.replace(batch, targets=targets, weight=self.weight) for batch in batches]
        return batches


@pytest.mark.slow
def test_a_batch_with_nan_is_skipped_with_an_event(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakh.trainer.workloads.code.Batches", CorruptBatches)
    monkeypatch.setattr(CorruptBatches, "weight", float("nan"))
    outcome = train(run, tmp_path / "run")
    written = events.read(tmp_path / "run")
    skipped = [(e.step, e.reason) for e in written if isinstance(e, events.StepSkipped)]
    assert skipped == [(23, "gradient norm nan is not finite")]
    assert outcome.loss == outcome.loss  # a NaN in the weights would appear in every later loss
    assert outcome.step == 30


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "last"), [(5, 5), (100, 64)])
def test_a_run_whose_updates_are_never_finite_ends_with_an_error(
    run: Run, steps: int, last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoNumbers(Batches):
        def micro_batches(self, step, device):
            return [dataclasses.replace(batch, weight=float("nan")) for batch in super().micro_batches(step, device)]

    monkeypatch.setattr("lakh.trainer.workloads.code.Batches", NoNumbers)
    with pytest.raises(UserError, match=f"steps 1 to {last}: the gradient of each is not finite"):
        train(changed(run, steps=steps), tmp_path / "run")
    skipped = [e for e in events.read(tmp_path / "run") if isinstance(e, events.StepSkipped)]
    assert [e.step for e in skipped] == list(range(1, len(skipped) + 1))


@pytest.mark.slow
def test_on_spike_skip_skips_large_gradients(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakh.trainer.workloads.code.Batches", CorruptBatches)
    monkeypatch.setattr(CorruptBatches, "weight", 1.0)  # a sum instead of a mean: 32 times as large
    train(changed(run, on_spike="skip"), tmp_path / "run")
    skipped = [e for e in events.read(tmp_path / "run") if isinstance(e, events.StepSkipped)]
    assert [e.step for e in skipped] == [23]
    assert "is too large" in skipped[0].reason
    train(run, tmp_path / "other")
    assert not [e for e in events.read(tmp_path / "other") if isinstance(e, events.StepSkipped)]


@pytest.mark.slow
def test_a_spike_rewinds_to_the_checkpoint_and_never_reads_that_batch_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakh.trainer.workloads.code.Batches", CorruptBatches)
    run_dir = tmp_path / "run"
    outcome = train(changed(run, on_spike="rewind"), run_dir)
    written = events.read(run_dir)
    (event,) = [e for e in written if isinstance(e, events.Rewound)]
    assert event.step == 23
    assert event.to_step == 20
    assert event.skipped == [[88, 92]]
    assert "is above" in event.reason
    steps = [e.step for e in written if isinstance(e, events.StepDone)]
    assert steps == [*range(1, 24), *range(21, 31)]
    assert load_run(run_dir).data.skip == ((88, 92),)  # a restart skips them too
    assert outcome.goodput["classes_s"]["lost"] > 0
    # The hash is that of the stream without the skipped sequences, as if they had never been there.
    expected = StreamDigest()
    stream = TokenStream(load_run(run_dir).data, run.seed)
    for step in range(30):
        rows = stream.read_range(4 * step, 4)
        expected += digest_sequences(4 * step, rows.tokens, rows.lengths)
    assert outcome.stream_sha256 == expected.sha256


@pytest.mark.slow
def test_without_a_checkpoint_a_rewind_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakh.trainer.workloads.code.Batches", CorruptBatches)
    run = dataclasses.replace(changed(run, on_spike="rewind"), checkpoint=Checkpoints(every=0))
    assert train(run, tmp_path / "run").step == 30
    (event,) = [e for e in events.read(tmp_path / "run") if isinstance(e, events.RewindRefused)]
    assert "no checkpoint" in event.why


@pytest.mark.slow
@pytest.mark.parametrize("slow", ["saving.write_tensors", "saving.Manifest.write", "prune"])
def test_steps_continue_while_a_checkpoint_is_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    far_on = threading.Event()

    class Watched(Batches):
        def micro_batches(self, step, device):
            if step == 15:
                far_on.set()
            return super().micro_batches(step, device)

    functions = {
        "saving.write_tensors": write_tensors,
        "saving.Manifest.write": checkpoint.Manifest.write,
        "prune": checkpoint.prune,
    }

    def wait_and_call(*args, **kwargs):
        assert far_on.wait(60)  # the disk of step 10 is not done before step 16 has begun
        return functions[slow](*args, **kwargs)

    monkeypatch.setattr("lakh.trainer.workloads.code.Batches", Watched)
    monkeypatch.setattr(f"lakh.checkpoint.{slow}", wait_and_call)
    behind = dataclasses.replace(run, checkpoint=dataclasses.replace(run.checkpoint, background="on"))
    outcome = train(behind, tmp_path / "run")
    written = events.read(tmp_path / "run")
    saved = [event.step for event in written if isinstance(event, events.CheckpointSaved)]
    assert saved == [10, 20, 30]
    before = written[: next(at for at, event in enumerate(written) if isinstance(event, events.CheckpointSaved))]
    assert [event.step for event in before if isinstance(event, events.StepDone)][:15] == list(range(1, 16))
    monkeypatch.undo()
    train(run, tmp_path / "calm")
    for step in saved:  # each holds the state of its own step, not of the one at which it was finished
        ours, calm = (
            checkpoint.read_model(tmp_path / name / "checkpoints" / checkpoint.folder_name(step))[1]
            for name in ("run", "calm")
        )
        assert all(torch.equal(ours[name], calm[name]) for name in calm)
    assert outcome.checkpoint.endswith("step-00000030")


@pytest.mark.slow
def test_without_memory_for_a_copy_checkpoints_block_and_an_event_reports_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "free_host_bytes", lambda: 1000)
    monkeypatch.setattr(checkpoint.HostCopies, "take", None)  # nothing is copied
    train(changed(run, steps=20), tmp_path / "run")
    written = events.read(tmp_path / "run")
    (chosen,) = (event for event in written if isinstance(event, events.AutoChoice) and event.what == "checkpoints")
    assert chosen.choice == "blocking"
    assert "more than 60%" in chosen.reason
    kinds = [(type(event), event.step) for event in written]
    assert kinds.index((events.CheckpointSaved, 10)) < kinds.index((events.StepDone, 11))


@pytest.mark.slow
def test_hooks_are_called_after_each_evaluation(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_hooks.py").write_text(
        "def weights(run, step, model):\n    return {'count': sum(p.numel() for p in model.parameters())}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    run = changed(run, steps=6, eval_every=3, hooks=("my_hooks:weights",))
    train(run, tmp_path / "run")
    measured = [e for e in events.read(tmp_path / "run") if isinstance(e, events.HookMetrics)]
    assert [event.step for event in measured] == [0, 3, 6]
    assert measured[0].values == {"count": run.model.parameters}
    with pytest.raises(UserError, match="my_hooks:nothing"):
        train(changed(run, hooks=("my_hooks:nothing",)), tmp_path / "other")
    sys.modules.pop("my_hooks", None)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('no such table')", r"ValueError: no such table \(.*their_hooks.py, line 2\)"),
        ("return None", "returned None; return numbers by name"),
        ("return {'best': 'north'}", "returned {'best': 'north'}"),
    ],
)
def test_a_hook_that_fails_is_named_with_its_line(
    body: str, message: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_hooks.py").write_text(f"def f(run, step, model):\n    {body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=f"train.hooks: their_hooks:f: {message}"):
        train(changed(run, steps=2, eval_every=1, hooks=("their_hooks:f",)), tmp_path / "run")
    sys.modules.pop("their_hooks", None)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["data.sequence=8", "seed=2", "data.packing=best-fit", "data.fim_rate=0.5"])
def test_settings_that_determine_the_stream_cannot_change_during_a_run(setting: str, run: Run, tmp_path: Path) -> None:
    from lakh import config

    train(changed(run, steps=2), tmp_path / "run")
    other = config.with_sets(changed(run, steps=4), [setting])
    with pytest.raises(UserError, match="start a new run"):
        train(other, tmp_path / "run")
    assert load_run(tmp_path / "run") == changed(run, steps=2)  # what was refused left no trace
    train(changed(run, steps=3), tmp_path / "run")
    assert load_run(tmp_path / "run").train.steps == 3


@pytest.mark.slow
def test_a_restart_with_old_settings_keeps_the_skips_of_a_rewind(run: Run, tmp_path: Path) -> None:
    data = dataclasses.replace(run.data, skip=((2, 5),))
    train(dataclasses.replace(changed(run, steps=2), data=data), tmp_path / "run")
    outcome = train(changed(run, steps=4), tmp_path / "run")
    with_skips = train(dataclasses.replace(changed(run, steps=4), data=data), tmp_path / "calm")
    assert outcome.stream_sha256 == with_skips.stream_sha256
    assert load_run(tmp_path / "run").data.skip == ((2, 5),)
    late = dataclasses.replace(run.data, skip=((2, 5), (8, 9)))
    with pytest.raises(UserError, match="have been read already"):
        train(dataclasses.replace(changed(run, steps=6), data=late), tmp_path / "run")


@pytest.mark.slow
def test_a_run_resumes_after_its_initial_model_was_removed(run: Run, tmp_path: Path) -> None:
    train(changed(run, steps=2), tmp_path / "first")
    second = dataclasses.replace(run, init_from=str(tmp_path / "first"))
    train(changed(second, steps=2), tmp_path / "run")
    (tmp_path / "first").rename(tmp_path / "elsewhere")
    assert train(changed(second, steps=4), tmp_path / "run").step == 4
    with pytest.raises(UserError, match="no such file or folder"):
        train(changed(second, steps=2), tmp_path / "other")


@pytest.mark.parametrize(
    ("code", "background", "reason", "todo"),
    [
        (errno.ENOSPC, "on", "no space left on the disk", "free some space"),
        (errno.ENOSPC, "off", "no space left on the disk", "free some space"),
        (errno.EROFS, "on", "read-only file system", "choose a writable folder"),
        (errno.EACCES, "on", "permission denied", "check its owner and mode"),
    ],
)
def test_a_disk_that_cannot_be_written_leaves_the_run_unprotected_and_fails_its_last_save(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, background: str, reason: str, todo: str
) -> None:
    fails = [True]

    def write(url: str, tensors: object) -> object:
        if fails[0]:
            error = storage.explain(OSError(code, os.strerror(code), url), url)
            assert error is not None
            raise error
        return write_tensors(url, tensors)

    monkeypatch.setattr("lakh.checkpoint.saving.write_tensors", write)
    run = dataclasses.replace(changed(run, steps=4), checkpoint=Checkpoints(every=2, background=background))
    with pytest.raises(LakhError, match=f"{todo}.*then: lakh resume {tmp_path / 'run'}"):
        train(run, tmp_path / "run")
    written = events.read(tmp_path / "run")
    failed = [e for e in written if isinstance(e, events.CheckpointFailed)]
    assert [(e.step, e.reason, e.last) for e in failed] == [(2, reason, ""), (4, reason, "")]
    assert len([e for e in written if isinstance(e, events.StepDone)]) == 4, "training went on"
    fails[0] = False
    assert train(run, tmp_path / "run").step == 4
    assert len(checkpoint.list_complete(tmp_path / "run")) == 2


@pytest.mark.slow
def test_a_run_resumes_exactly_from_an_incremental_checkpoint(run: Run, tmp_path: Path) -> None:
    run = dataclasses.replace(
        changed(run, steps=6), checkpoint=Checkpoints(every=2, keep=1, background="on", incremental="exact")
    )
    train(run, tmp_path / "run")
    modes = [checkpoint.Manifest.read(folder).mode for _, folder in checkpoint.list_complete(tmp_path / "run")]
    assert modes == ["full", "exact", "exact"], "the bases of the kept one stay"
    whole, resumed = train(changed(run, steps=9), tmp_path / "whole"), train(changed(run, steps=9), tmp_path / "run")
    assert resumed.loss == whole.loss
    assert resumed.stream_sha256 == whole.stream_sha256


@pytest.mark.slow
def test_checkpoints_on_another_url_are_found_by_resume_and_tools(run: Run, tmp_path: Path, lakh, last_line) -> None:
    url = str(tmp_path / "elsewhere")
    run = dataclasses.replace(changed(run, steps=2), checkpoint=Checkpoints(url=url))
    done = train(run, tmp_path / "run")
    assert done.checkpoint == f"{url}/checkpoints/step-00000002"
    assert checkpoint.find(tmp_path / "run") == done.checkpoint
    _, out, _ = lakh("checkpoint", "list", str(tmp_path / "run"), "--json")
    assert [row["step"] for row in last_line(out)["checkpoints"]] == [2]
    assert train(changed(run, steps=3), tmp_path / "other").step == 3  # a new machine without the run's folder
    started = [e.step for e in events.read(tmp_path / "other") if isinstance(e, events.RunStarted)]
    assert started == [2]


@pytest.mark.slow
def test_a_larger_batch_continues_at_the_position_of_the_smaller_one(run: Run, tmp_path: Path) -> None:
    train(changed(run, steps=3), tmp_path / "run")
    larger = dataclasses.replace(changed(run, steps=5), data=dataclasses.replace(run.data, batch=8))
    outcome = train(larger, tmp_path / "run")
    assert outcome.tokens == (3 * 4 + 2 * 8) * 16
    started = [e.sequence_index for e in events.read(tmp_path / "run") if isinstance(e, events.RunStarted)]
    assert started == [0, 12]
    stored = json.loads((Path(outcome.checkpoint) / "stream.json").read_text())
    assert stored["rows"] == 28


@pytest.mark.slow
def test_z_loss_best_fit_masks_and_fim_train_together(run: Run, tmp_path: Path) -> None:
    data = dataclasses.replace(run.data, packing="best-fit", document_mask=True, fim_rate=0.5)
    run = dataclasses.replace(changed(run, steps=12, z_loss=1e-4), data=data)
    outcome = train(run, tmp_path / "run")
    losses = [e.loss for e in events.read(tmp_path / "run") if isinstance(e, events.StepDone)]
    assert losses[-1] < losses[0] - 0.3
    assert outcome.stream_sha256


def test_a_batch_that_cannot_be_split_is_refused_before_anything_is_built(run: Run, tmp_path: Path) -> None:
    wide = dataclasses.replace(run, mesh=dataclasses.replace(run.mesh, dp_shard=3))
    with pytest.raises(InfeasiblePlan, match="needs 3 ranks"):
        train(wide, tmp_path / "run")


@pytest.mark.slow
def test_a_mixture_of_experts_reports_its_load(run: Run, tmp_path: Path) -> None:
    experts = Experts(count=4, top_k=2, ffn=32, balance_loss=0.01)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, experts=experts))
    train(changed(run, steps=21), tmp_path / "run")
    loads = [event for event in events.read(tmp_path / "run") if isinstance(event, events.ExpertLoad)]
    assert [event.step for event in loads] == [10, 20]
    assert all(len(event.layers) == run.model.layers and event.busiest == max(event.layers) >= 1 for event in loads)


@pytest.mark.parametrize(("threads", "expected"), [(0, 1), (2, 2)])
def test_a_run_computes_with_fewer_threads_beside_a_busy_process(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, expected: int
) -> None:
    """`train.threads` fixes the number."""
    read_times = (CoreTimes(10.0 * i, waiting_s=7.0 * i, own_s=12.0 * i, busy_s=19.0 * i, idle_s=0.0) for i in count())
    shared = functools.partial(ComputeThreads, read=lambda: next(read_times), clock=lambda: float("inf"))
    monkeypatch.setattr("lakh.trainer.loop.ComputeThreads", shared)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    run = dataclasses.replace(changed(run, steps=2, threads=threads), checkpoint=Checkpoints(every=0))
    before = torch.get_num_threads()
    try:
        train(run, tmp_path / "run")
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)
    choices = [e for e in events.read(tmp_path / "run") if isinstance(e, events.AutoChoice) and e.what == "threads"]
    found = [(e.step, e.choice, e.reason) for e in choices]
    assert found == ([(1, "1 on rank 0", "other processes use 0.7 cores")] if threads == 0 else [])
