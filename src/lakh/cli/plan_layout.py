"""lakh plan estimate and search: one layout of a model on a cluster, or the best of all layouts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from lakh.cli.complete import complete_clusters, complete_plan_models, complete_recipes
from lakh.cli.output import CommandResult, print_result, table
from lakh.cli.plan import FILE, MODEL_HELP, NUMBER, add_options, owned_option, plot_option, prices_option
from lakh.cli.plan_model import planned_model
from lakh.planner.execution_plan import CUDA_GRAPHS, RECOMPUTE, SCHEDULES
from lakh.planner.memory import OPTIMIZER_BYTES
from lakh.planner.request import PRECISIONS, PlanRequest

__all__ = ["estimate", "search"]

COSTS = {
    "usd_per_gpu_hour": "USD per GPU-hour",
    "usd_per_step": "USD per step",
    "usd_per_million_tokens": "USD per million tokens",
    "run_days": "days for the run",
    "run_gpu_hours": "GPU-hours",
    "run_usd": "USD for the run",
}
REQUEST_OPTIONS = [
    click.argument("run", required=False, shell_complete=complete_recipes),
    click.option("--model", shell_complete=complete_plan_models, help=MODEL_HELP),
    click.option(
        "--cluster", shell_complete=complete_clusters, help="Cluster file, or the name of one that ships with lakh."
    ),
    click.option("--gpus", type=NUMBER, help="Number of GPUs."),
    click.option("--batch", type=NUMBER, help="Sequences per step  [default: 4M tokens]"),
    click.option("--sequence", type=NUMBER, help="Tokens per sequence  [default: 8192]"),
    click.option("--tokens", type=float, help="Tokens of the whole run, e.g. 1.4e12: for its days and cost."),
]
# option -> type, help
PLAN_OPTIONS: dict[str, tuple[click.ParamType, str]] = {
    "--tp": (NUMBER, "Tensor parallelism: ranks that split each matrix."),
    "--pp": (NUMBER, "Pipeline stages."),
    "--cp": (NUMBER, "Context parallelism: ranks that split each sequence."),
    "--ep": (NUMBER, "Expert parallelism: ranks that split the experts."),
    "--shard": (NUMBER, "Ranks that shard weights and states (FSDP, ZeRO-3); 1 is ZeRO-1."),
    "--zero": (click.IntRange(0, 2), "ZeRO stage without --shard: 0 none, 1 optimizer states, 2 also gradients."),
    "--micro-batch": (NUMBER, "Sequences per forward and backward pass."),
    "--chunks": (NUMBER, "Interleaved chunks per pipeline stage."),
    "--recompute": (click.Choice(RECOMPUTE), "Activation recomputation."),
    "--precision": (click.Choice(list(PRECISIONS)), "Precision of the linear layers."),
    "--attention": (click.Choice(["native", "older"]), "Attention kernels for this GPU, or FlashAttention-2."),
    "--optimizer": (click.Choice(list(OPTIMIZER_BYTES)), "Optimizer, for its states."),
    "--schedule": (click.Choice(SCHEDULES), "Pipeline schedule; lean is interleaved with the fewest activations."),
    "--graphs": (click.Choice(CUDA_GRAPHS), "CUDA graphs, which save kernel launches."),
}


@click.command()
@add_options(REQUEST_OPTIONS)
@add_options([click.option(name, type=kind, help=text) for name, (kind, text) in PLAN_OPTIONS.items()])
@click.option(
    "--stages-inside",
    is_flag=True,
    default=None,
    help="Number ranks so that pipeline stages are nearer than data ranks.",
)
@click.option("--expert-overlap", is_flag=True, default=None, help="Overlap expert exchange with computation.")
@click.option("--adapters", is_flag=True, default=None, help="Train low-rank adapters, weights frozen (LoRA).")
@click.option("--offload", is_flag=True, default=None, help="Keep the optimizer states in host memory.")
@click.option(
    "--program",
    default="lakh",
    show_default=True,
    help="Program that trains: lakh, or one with published measurements, e.g. nemo or torchtitan.",
)
@click.option("--factors", type=FILE, help="Factors of your own runs, from `lakh plan calibrate --from`.")
@owned_option
@prices_option
@plot_option("the roofline")
@print_result
def estimate(
    program: str, factors: str | None, owned: bool, prices: str | None, plot: str | None, **options: Any
) -> CommandResult:
    """Estimate memory, step time and cost of one layout."""
    from lakh.planner.calibration.program_factor import load_own_factors
    from lakh.planner.cost.prices import cluster_price
    from lakh.planner.estimate import estimate_plan

    request = PlanRequest.of(options, planned_model)
    plan = request.execution_plan(program, **options)
    own = load_own_factors(factors) if factors else None
    price = cluster_price(request.cluster, prices, owned=owned) if owned or prices else None
    found = estimate_plan(
        request.model, plan, request.cluster, tokens=request.tokens, price=price, program=program, own=own
    )
    data = asdict(found)
    if plot:
        from lakh.planner.plots import roofline

        roofline(request.model, plan, request.cluster, Path(plot))
        data["plot"] = plot
    return CommandResult(data, _estimate_page(data), exit_code=0 if found.fits else 2)


def _estimate_page(data: dict[str, Any]) -> Any:
    from rich.console import Group

    bar, layout = data["error_bar"], data["layout"]
    band = f"80 %: {bar['low_s']:.4g} to {bar['high_s']:.4g} s, from {bar['rows']} held-out rows, {bar['kind']}"
    rows: list[tuple[str, Any]] = [
        ("fits", data["fits"]),
        ("bottleneck", data["binds"]),
        ("GPUs", layout["tp"] * layout["pp"] * layout["cp"] * layout["dp"]),
        ("layout", _layout(layout)),
        ("step", f"{data['step_s']:.4g} s  ({band})"),
        ("model FLOP/s per GPU", f"{data['tflops_per_gpu']:.0f} TFLOP/s"),
        ("MFU, causal (PaLM-style)", f"{data['mfu']:.1%}  ({data['mfu_palm']:.1%})"),
        ("tokens per second", f"{data['tok_per_s']:,.0f}"),
        ("stalls per step", ", ".join(f"{name.removesuffix('_s')} {s:.3g} s" for name, s in data["stalls"].items())),
        ("cost", ", ".join(f"{value:,.4g} {COSTS[name]}" for name, value in data["cost"].items())),
    ]
    if data["nearest"]:
        change = ", ".join(f"{name} {value}" for name, value in data["nearest"]["change"].items())
        rows.append(("nearest that fits", f"{change} ({data['nearest']['memory_bytes'] / 2**30:.1f} GiB)"))
    elif not data["fits"]:
        rows.append(("nearest that fits", "nothing with this number of GPUs: use more"))
    rows += [("note", note) for note in data["notes"]]
    memory = [(name, f"{size / 2**30:.2f}") for name, size in data["memory_bytes"].items()]
    seconds = {name.removesuffix("_s"): s for name, s in data["step_parts_s"].items() if s > 0}
    total = sum(data["step_parts_s"].values())
    return Group(
        table(["simulated", "value"], rows),
        table(["memory of the fullest GPU", "GiB"], memory),
        table(
            ["part of the step", "seconds", "share"], [(n, f"{s:.4g}", f"{s / total:.1%}") for n, s in seconds.items()]
        ),
    )


def _layout(layout: dict[str, Any]) -> str:
    """Degrees above 1 and settings that are not off."""
    axes = ("tp", "pp", "cp", "ep", "dp", "shard", "chunks")
    degrees = [f"{name} {layout[name]}" for name in axes if layout[name] > 1]
    others = {name: value for name, value in layout.items() if name not in axes and value not in (False, "none")}
    return ", ".join(degrees + [name if value is True else f"{name} {value}" for name, value in others.items()])


@click.command()
@add_options(REQUEST_OPTIONS)
@click.option("--also-gpus", help="Further numbers of GPUs to try, e.g. 512,1024.")
@click.option("--days", type=click.FloatRange(min=0, min_open=True), help="Deadline of the run.")
@click.option("--precision", type=click.Choice(list(PRECISIONS)), default="bf16", show_default=True)
@click.option("--graphs", type=click.Choice(CUDA_GRAPHS), default="none", show_default=True, help="CUDA graphs.")
@click.option("--trainable", is_flag=True, help="Only layouts that `lakh train` runs; implied by RUN.")
@click.option(
    "--no-offload", "offload", is_flag=True, flag_value=False, default=True, help="Keep optimizer states in GPU memory."
)
@prices_option
@click.option("--out", type=FILE, help="Write the best plan as a run for `lakh train`.")
@plot_option("the Pareto front")
@print_result
def search(out: str | None, plot: str | None, **options: Any) -> CommandResult:
    """Find the best of all layouts of a model on a cluster."""
    request = PlanRequest.of(options, planned_model)
    options["trainable"] |= bool(out)
    found = request.search(**options)
    data = {**vars(found), "simulated": True}
    best_plan = data.pop("best_plan")
    if best_plan is not None and request.run is None and not options["trainable"]:
        data["command"] = request.estimate_command(best_plan)
    if plot and found.pareto:
        from lakh.planner.plots import pareto

        pareto(found.pareto, Path(plot))
        data["plot"] = plot
    if out and best_plan is not None:
        from lakh import config, storage

        storage.write_bytes(out, config.to_toml(request.run_of(best_plan)).encode())
        data["run"] = out
    return CommandResult(data, _search_page(data))


def _search_page(data: dict[str, Any]) -> Any:
    from rich.console import Group

    lines = [f"searched {data['searched']:,} layouts in {data['seconds']:.2f} s (simulated)", data["why"]]
    lines += [f"excluded, {why}: {n:,}" for why, n in data["refused"].items() if n]
    if data["hint"]:
        lines.append(f"hint: {data['hint']}")
    if data["best"] is None:
        return "\n".join(lines)
    bar = data["best"]["error_bar"]
    lines.append(f"80 % of such held-out rows ({bar['kind']}): {bar['low_s']:.4g} to {bar['high_s']:.4g} s")
    rows = [
        [row["gpus"], row["name"], row["step_s"], row["usd_per_step"], round(row["memory_bytes"] / 2**30, 1)]
        + ([row["run_days"], f"{row['run_usd']:,.0f}"] if "run_days" in row else [])
        for row in data["pareto"]
    ]
    head = ["GPUs", "layout", "step s", "USD/step", "GiB"] + (["days", "USD"] if "run_days" in data["best"] else [])
    if "command" in data:
        lines.append(f"estimate the best one: {data['command']}")
    if "run" in data:
        lines.append(f"wrote {data['run']}: lakh train {data['run']}")
    return Group("\n".join(lines), table(head, rows, "Pareto front of time, cost and memory"))
