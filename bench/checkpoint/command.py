"""lakh bench checkpoint: size, stall, write and restore times, and the loss after a resume, beside torch DCP."""

from __future__ import annotations

import logging
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bench.harness import BenchRow, alternate, medians, out_option, result
from lakh.cli.output import CommandResult, console, print_result

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["bench_checkpoint", "checkpoint"]

COLUMNS = {
    "system": "system",
    "mode": "mode",
    "bytes": "bytes",
    "smaller": "smaller",
    "stall_s": "stall_s",
    "write_s": "write_s",
    "restore_s": "restore_s",
    "restored_loss_gap": "restored_loss_gap",
    "resumed_loss_gap": "resumed_loss_gap",
    "spread": "spread",
}
NOISE = 1e-6  # relative, on the weights of the row "noise"


@click.command("checkpoint")
@click.option("--width", type=click.IntRange(min=64), default=256, show_default=True, help="Width of the model.")
@click.option("--layers", type=click.IntRange(min=1), default=4, show_default=True, help="Blocks of the model.")
@click.option("--warm-up", type=click.IntRange(min=1), default=120, show_default=True, help="Steps before the base.")
@click.option("--gap", type=click.IntRange(min=1), default=50, show_default=True, help="Steps from base to save.")
@click.option("--resume", type=click.IntRange(min=1), default=50, show_default=True, help="Steps after the restore.")
@click.option("--orders", type=click.IntRange(min=1), default=1, show_default=True, help="Resumed jobs of each row.")
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Sequences of a step.")
@click.option("--sequence", type=click.IntRange(min=8), default=128, show_default=True, help="Bytes of a sequence.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Rounds; medians are shown.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option("--folder", type=click.Path(file_okay=False), help="Where to write; a temporary folder by default.")
@out_option
@print_result
def checkpoint(repeats: int, folder: str | None, out: str | None, **job: Any) -> CommandResult:
    """Compare checkpoints of a real training state with torch's distributed checkpoint.

    `restored_loss_gap` is the difference of the held-out loss right after the restore, `resumed_loss_gap` after the
    resumed steps: the mean of the jobs on several orders of sequences, each beside a job that continues from the state
    in memory. The row "noise" continues from that state with weights that are changed by a millionth: a gap of that
    size says nothing about the checkpoint.
    """
    with console().status("training") as status, tempfile.TemporaryDirectory(dir=folder) as where:
        rows, facts = bench_checkpoint(Path(where), repeats=repeats, progress=status.update, **job)
    return result("checkpoint", rows, out, columns=COLUMNS, **facts)


def bench_checkpoint(
    folder: Path,
    *,
    width: int,
    layers: int,
    warm_up: int,
    gap: int,
    resume: int,
    orders: int,
    batch: int,
    sequence: int,
    repeats: int,
    device: str,
    progress: Callable[[str], object],
) -> tuple[list[BenchRow], dict[str, Any]]:
    """One row per system and mode, and facts of the job."""
    import torch

    from bench.checkpoint.systems import LAKH_MODES, SaveTimes, save_with_dcp, save_with_lakh
    from bench.checkpoint.training_job import JobSettings, TrainingJob, standard_library
    from lakh.trainer.optim.optimizer import role_of

    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    settings = JobSettings(width, layers, sequence, batch, warm_up + gap + resume, device)
    text = standard_library()
    job = TrainingJob(settings, text)
    job.train(warm_up)
    before = {name: tensor.clone() for name, tensor in job.state.items()}
    job.train(gap)
    after = {name: tensor.clone() for name, tensor in job.state.items()}
    raw_bytes = sum(tensor.nbytes for tensor in after.values())
    restored_loss = job.heldout_loss()

    def resumed_losses(state: Mapping[str, Tensor] | None) -> list[float]:
        """Held-out losses before and after the resumed steps, of all orders; None: of the state in memory."""
        losses: list[float] = []
        for order in range(orders):
            resumed = TrainingJob(settings, text, order)
            resumed.restore(after if state is None else state, warm_up + gap)
            if not losses:
                losses.append(resumed.heldout_loss())
            resumed.train(resume)
            losses.append(resumed.heldout_loss())
        return losses

    exact_losses = resumed_losses(None)

    kept: dict[tuple[str, str], SaveTimes] = {}

    def measure(system: str, mode: str, call: Callable[[], SaveTimes]) -> Callable[[], list[float]]:
        def run() -> list[float]:
            times = kept[system, mode] = call()
            return [times.stall_s, times.write_s, times.restore_s]

        return run

    systems = {
        ("lakh", mode): measure("lakh", mode, lambda mode=mode: save_with_lakh(mode, before, after, folder / mode))  # type: ignore[misc]
        for mode in LAKH_MODES
    }
    systems["torch DCP", "full"] = measure("torch DCP", "full", lambda: save_with_dcp(before, after, folder / "dcp"))
    names = {" ".join(key): key for key in systems}
    with _single_process_group(folder):
        rounds = alternate({name: systems[key] for name, key in names.items()}, repeats, progress=progress)
    rows: list[BenchRow] = []
    for name, (system, mode) in names.items():
        times = kept[system, mode]
        gaps: dict[str, float | None] = {"restored_loss_gap": None, "resumed_loss_gap": None}
        if times.restored is not None:
            progress(f"{name}: training on")
            gaps = _gaps(resumed_losses(times.restored), exact_losses)
        stall_s, write_s, restore_s = medians(rounds[name].measured)
        rows.append(
            {
                "system": system,
                "mode": mode,
                "bytes": times.bytes,
                "raw_bytes": raw_bytes,
                "smaller": 1 - times.bytes / raw_bytes,
                "stall_s": stall_s,
                "write_s": write_s,
                "restore_s": restore_s,
                **gaps,
                **{f"relative_rms_{kind}": drift for kind, drift in times.drift.items()},
            }
        )
    progress("noise: training on")
    noise = torch.Generator().manual_seed(0)
    noisy = {
        name: tensor * (1 + NOISE * torch.randn(tensor.shape, generator=noise).to(tensor.device))
        if role_of(name) == "weight"
        else tensor
        for name, tensor in after.items()
    }
    nothing = dict.fromkeys(("bytes", "raw_bytes", "smaller", "stall_s", "write_s", "restore_s"))
    rows.append({"system": "noise", "mode": f"{NOISE:g}", **nothing, **_gaps(resumed_losses(noisy), exact_losses)})
    facts = {
        "parameters": sum(p.numel() for p in job.model.parameters()),
        "gap_steps": gap,
        "resumed_steps": resume,
        "orders": orders,
        "restored_loss": restored_loss,
        "heldout_loss": statistics.mean(exact_losses[1:]),
    }
    return rows, facts


def _gaps(losses: Sequence[float], exact: Sequence[float]) -> dict[str, float | None]:
    """Differences of the losses before and after the resumed steps; `spread`: their standard deviation over orders."""
    differences = [loss - other for loss, other in zip(losses, exact, strict=True)]
    after = differences[1:]
    return {
        "restored_loss_gap": differences[0],
        "resumed_loss_gap": statistics.mean(after),
        "spread": statistics.stdev(after) if len(after) > 1 else None,
    }


@contextmanager
def _single_process_group(folder: Path) -> Iterator[None]:
    """DCP's async_save needs a process group, and warns about the single process."""
    import torch.distributed as dist

    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        dist.destroy_process_group()
