"""The options that plans share: which model, on which cluster, in which layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import click

from lakh.errors import UserError
from lakh.planner.catalogue import Architecture, architecture
from lakh.planner.estimate import layout_of
from lakh.planner.execution_plan import GRAPHS, RECOMPUTE, SCHEDULES, Layout
from lakh.planner.memory import OPTIMIZER_BYTES
from lakh.planner.shape import Shape, shape_of
from lakh.spec import Cluster, Run, load_run
from lakh.spec.cluster import load_cluster

__all__ = ["PRECISIONS", "Question", "ask", "layout_options", "numbers", "question_options"]

PRECISIONS = {"bf16": 0.0, "fp8": 1.0, "nvfp4": 2.0}


@dataclass(frozen=True)
class Question:
    shape: Shape
    cluster: Cluster
    gpus: int
    batch: int
    sequence: int
    tokens: float | None
    run: Run | None
    model: Architecture | None


def question_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """RUN, or --model with --cluster and --gpus."""
    for option in reversed(
        [
            click.argument("run", required=False),
            click.option("--model", help="A model of the catalogue, or a .toml file with the same keys."),
            click.option("--cluster", help="A cluster file, or the name of one that ships with lakh."),
            click.option("--gpus", type=click.IntRange(min=1), help="How many GPUs."),
            click.option("--batch", type=click.IntRange(min=1), help="Sequences per step  [default: 4M tokens]"),
            click.option("--sequence", type=click.IntRange(min=1), help="Tokens per sequence  [default: 8192]"),
            click.option("--tokens", type=float, help="Tokens of the whole run, e.g. 1.4e12: for its days and cost."),
        ]
    ):
        command = option(command)
    return command


def layout_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The layout of an estimate."""
    degree = click.IntRange(min=1)
    for option in reversed(
        [
            click.option("--tp", type=degree, help="Ranks that share each matrix."),
            click.option("--pp", type=degree, help="Pipeline stages."),
            click.option("--cp", type=degree, help="Ranks that share each sequence."),
            click.option("--ep", type=degree, help="Ranks that share the experts."),
            click.option(
                "--shard", type=degree, help="Ranks that share weights and states (FSDP, ZeRO-3); 1 is ZeRO-1."
            ),
            click.option(
                "--zero", type=click.IntRange(0, 2), help="Without --shard: cut up nothing, states, gradients too."
            ),
            click.option("--micro-batch", type=degree, help="Sequences at a time."),
            click.option("--chunks", type=degree, help="Interleaved chunks per pipeline stage."),
            click.option("--recompute", type=click.Choice(RECOMPUTE), help="What the backward pass computes again."),
            click.option("--precision", type=click.Choice(list(PRECISIONS)), help="Of the linear layers."),
            click.option(
                "--attention", type=click.Choice(["native", "older"]), help="Kernels for this GPU, or FlashAttention-2."
            ),
            click.option("--optimizer", type=click.Choice(list(OPTIMIZER_BYTES)), help="Whose states are kept."),
            click.option(
                "--schedule",
                type=click.Choice(SCHEDULES),
                help="Of the pipeline; lean is interleaved with the least in flight.",
            ),
            click.option(
                "--expert-overlap", is_flag=True, default=None, help="Exchange tokens of experts behind computation."
            ),
            click.option("--graphs", type=click.Choice(GRAPHS), help="CUDA graphs, which spare the host its launches."),
            click.option(
                "--adapters", is_flag=True, default=None, help="Train low-rank adapters beside frozen weights (LoRA)."
            ),
            click.option("--offload", is_flag=True, default=None, help="Keep the optimizer states in host memory."),
        ]
    ):
        command = option(command)
    return command


def ask(
    run: str | None,
    model: str | None,
    cluster: str | None,
    gpus: int | None,
    batch: int | None,
    sequence: int | None,
    tokens: float | None,
) -> Question:
    """What is asked, from a run or from names."""
    if tokens is not None and tokens <= 0:
        raise UserError("--tokens", f"{tokens:g} is not positive", "give e.g. 1.4e12")
    if run and model:
        raise UserError("lakh plan", "got a run and --model", "give one of them")
    if run:
        loaded = load_run(run)
        place = load_cluster(cluster) if cluster else loaded.cluster
        if batch or sequence:
            data = replace(loaded.data, batch=batch or loaded.data.batch, sequence=sequence or loaded.data.sequence)
            loaded = replace(loaded, data=data)
        return Question(
            shape_of(loaded.model), place, gpus or loaded.mesh.ranks, loaded.data.batch, loaded.data.sequence,
            tokens or float(loaded.tokens), loaded, None,
        )  # fmt: skip
    if not (model and cluster and gpus):
        raise UserError("lakh plan", "is not told what to plan", "give a run, or --model, --cluster and --gpus")
    length = sequence or 8192
    known = architecture(model)
    return Question(
        known.shape, load_cluster(cluster), gpus, batch or max(2**22 // length, 1), length, tokens, None, known
    )


DEGREES = {"tp", "pp", "cp", "ep", "shard"}  # any of them given, the run's mesh is no longer meant


def with_options(question: Question, changes: dict[str, Any]) -> Layout:
    """The layout asked for: the run's own, or a modern fused program's, with the options on top."""
    given = {name: value for name, value in changes.items() if value is not None}
    if question.run is not None:
        own = replace(question.run, cluster=question.cluster)
        base = _loose(question) if DEGREES & given.keys() else layout_of(own, question.gpus)
    else:
        base = Layout(
            gpus=float(question.gpus), sequence=float(question.sequence), batch=float(question.batch), zero1=1.0,
            gradient_bytes=4.0, tensor_overlap=1.0,
        )  # fmt: skip
    if "recompute" in given:
        given["recompute"] = RECOMPUTE.index(given["recompute"])
    if "graphs" in given:
        given["graphed"] = GRAPHS.index(given.pop("graphs"))
    if "precision" in given:
        given["low_precision"] = PRECISIONS[given.pop("precision")]
    if "attention" in given:
        given["native_attention"] = given.pop("attention") == "native"
    if "optimizer" in given:
        given["optimizer_bytes"] = OPTIMIZER_BYTES[given.pop("optimizer")]
    schedule = given.pop("schedule", None)
    if schedule:
        chunks = given.get("chunks", 1)
        if (chunks > 1) != (schedule in ("interleaved", "lean")):
            todo = "give --chunks 2 or more" if chunks == 1 else "leave --chunks away, or take interleaved or lean"
            raise UserError(f"--schedule {schedule}", f"has {chunks} chunks per stage", todo)
        given |= {
            "zero_bubble": schedule == "zb-h1",
            "gpipe": schedule == "gpipe",
            "run_ahead": 1 if schedule == "lean" else 2,
        }
    zero = given.pop("zero", None)
    if zero is not None:
        if given.get("shard", 1) > 1:
            raise UserError(f"--zero {zero}", "goes with whole weights", "leave --shard away, it is ZeRO-3")
        given |= {"zero1": zero >= 1, "zero2": zero == 2, "shard": 1}
    layout = replace(base, **{name: float(value) for name, value in given.items()})
    if int(layout.shard) > 1:
        layout = replace(layout, zero1=0.0, zero2=0.0)
    return replace(layout, sequence_parallel=float(int(layout.tp) > 1))


def _loose(question: Question) -> Layout:
    """The run's layout without its mesh: the options say what replaces it, shards fill the rest."""
    assert question.run is not None
    mesh = replace(question.run.mesh, dp_replicate=1, dp_shard=1, tp=1, pp=1, cp=1, ep=1)
    batch = replace(question.run.data, micro_batch=1)
    lone = layout_of(replace(question.run, mesh=mesh, data=batch), 1)
    return replace(lone, gpus=float(question.gpus), micro_batch=float(question.run.data.micro_batch))


def numbers(text: str, name: str) -> tuple[int, ...]:
    """ "1024" or "512,1024" as whole numbers."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(name, f"{text!r} is no list of whole numbers", "write e.g. 512,1024") from None
    if not found or min(found) < 1:
        raise UserError(name, f"{text!r} holds a number below 1", "give numbers of GPUs")
    return found
