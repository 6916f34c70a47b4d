"""Options that plan commands share: which model, on which cluster, by which execution plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from lakh.planner.execution_plan import CUDA_GRAPHS, RECOMPUTE, SCHEDULES
from lakh.planner.memory import OPTIMIZER_BYTES
from lakh.planner.request import PRECISIONS

__all__ = ["plan_options", "request_options"]

_DEGREE = click.IntRange(min=1)
_REQUEST_OPTIONS = [
    click.argument("run", required=False),
    click.option("--model", help="A model of the catalogue, or a .toml file with the settings of [model]."),
    click.option("--cluster", help="A cluster file, or the name of one that ships with lakh."),
    click.option("--gpus", type=_DEGREE, help="Number of GPUs."),
    click.option("--batch", type=_DEGREE, help="Sequences per step  [default: 4M tokens]"),
    click.option("--sequence", type=_DEGREE, help="Tokens per sequence  [default: 8192]"),
    click.option("--tokens", type=float, help="Tokens of the whole run, e.g. 1.4e12: for its days and cost."),
]
_PLAN_OPTIONS = [
    click.option("--tp", type=_DEGREE, help="Tensor parallelism: ranks that split each matrix."),
    click.option("--pp", type=_DEGREE, help="Pipeline stages."),
    click.option("--cp", type=_DEGREE, help="Context parallelism: ranks that split each sequence."),
    click.option("--ep", type=_DEGREE, help="Expert parallelism: ranks that split the experts."),
    click.option("--shard", type=_DEGREE, help="Ranks that shard weights and states (FSDP, ZeRO-3); 1 is ZeRO-1."),
    click.option(
        "--zero",
        type=click.IntRange(0, 2),
        help="ZeRO stage without --shard: 0 none, 1 optimizer states, 2 also gradients.",
    ),
    click.option("--micro-batch", type=_DEGREE, help="Sequences per forward and backward pass."),
    click.option("--chunks", type=_DEGREE, help="Interleaved chunks per pipeline stage."),
    click.option("--recompute", type=click.Choice(RECOMPUTE), help="Activation recomputation."),
    click.option("--precision", type=click.Choice(list(PRECISIONS)), help="Precision of the linear layers."),
    click.option(
        "--attention",
        type=click.Choice(["native", "older"]),
        help="Attention kernels written for this GPU, or FlashAttention-2.",
    ),
    click.option("--optimizer", type=click.Choice(list(OPTIMIZER_BYTES)), help="Optimizer, for its states."),
    click.option(
        "--schedule",
        type=click.Choice(SCHEDULES),
        help="Pipeline schedule; lean is interleaved with the fewest micro-batches in flight.",
    ),
    click.option("--expert-overlap", is_flag=True, default=None, help="Overlap expert exchange with computation."),
    click.option("--graphs", type=click.Choice(CUDA_GRAPHS), help="CUDA graphs, which save kernel launches."),
    click.option("--adapters", is_flag=True, default=None, help="Train low-rank adapters, weights frozen (LoRA)."),
    click.option("--offload", is_flag=True, default=None, help="Keep the optimizer states in host memory."),
]


def request_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """RUN, or --model with --cluster and --gpus."""
    return _add(_REQUEST_OPTIONS, command)


def plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of an execution plan."""
    return _add(_PLAN_OPTIONS, command)


def _add(options: list[Callable[..., Any]], command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(options):
        command = option(command)
    return command
