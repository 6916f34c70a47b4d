"""lakh loadgen: simulated users who type real files against a completion service."""

from __future__ import annotations

import secrets
import sysconfig
from pathlib import Path
from typing import Any

import click

from lakh.cli.bench import bench_module
from lakh.cli.output import CommandResult, console, print_result, table
from lakh.errors import Interrupted, PeerLost, UserError

__all__ = ["loadgen"]

FLOAT = click.FloatRange(min=0, min_open=True)
MUCH_CACHED = 0.25  # typing users repeat themselves less than this
LABELS = {
    "ttft_ms": "time to the first text, ms",
    "e2e_ms": "time to the last text, ms",
    "prefix_hit_rate": "prompt tokens in the prefix cache",
    "text_hit_rate": "answers from the completion cache",
    "prompt_tokens_per_request": "prompt tokens per request",
    "prefilled_tokens_per_request": "of these computed",
    "draft_acceptance": "accepted draft tokens",
    "server_cpu_ms_per_request": "server CPU per request, ms",
    "superseded": "superseded by typing on",
    "tok_per_s": "generated tokens per second",
    "completions_per_s": "completions per second",
    "cost_per_1k": "cost of 1,000 completions, USD",
    "wall_s": "seconds",
    "blocks_held_most": "KV-cache blocks held, most",
    "blocks_held_after": "KV-cache blocks held, at the end",
    "waiting_most": "waiting requests, most",
    "memory_bytes_early": "server memory early, bytes",
    "memory_bytes_after": "server memory at the end, bytes",
}


@click.command(context_settings={"show_default": True})
@click.argument("url")
@click.option("--rate", type=FLOAT, default=10.0, help="Requests per second, open loop.")
@click.option("--seconds", type=FLOAT, default=30.0)
@click.option("--users", type=click.IntRange(1), default=50, help="Simulated users.")
@click.option("--clients", type=click.IntRange(1), help="Closed loop: this many clients that wait for each response.")
@click.option("--burst", type=click.FloatRange(1), default=1.0, help="Rate of busy phases over quiet ones.")
@click.option(
    "--files",
    type=click.Path(exists=True, file_okay=False),
    help="Folder of Python files to type; default the standard library.",
)
@click.option(
    "--order", type=click.Choice(["spm", "psm", "none"]), default="spm", help="Order of the fill-in-the-middle prompt."
)
@click.option("--max-tokens", type=click.IntRange(1), default=32)
@click.option("--timeout-ms", type=click.IntRange(1), default=2000)
@click.option("--prefix-chars", type=click.IntRange(16), default=6000, help="Characters sent before the cursor.")
@click.option("--suffix-chars", type=click.IntRange(0), default=2000, help="Characters sent after the cursor.")
@click.option("--stop-rule", type=click.Choice(["line", "block", "dedent"]), help="Where completions end.")
@click.option(
    "--before-after", is_flag=True, help="Ablation, in a checkout: serve the MODEL with one more technique each time."
)
@click.option("--draft", type=click.Path(), help="With --before-after: a draft model for the last row.")
@click.option("--threads", type=click.IntRange(1), help="With --before-after: CPU threads of the server.")
@click.option("--metrics", "metrics_url", metavar="URL", help="The HTTP address, if URL is grpc://HOST:PORT.")
@click.option("--gpu", help="Price of the machine: this GPU's rent in the price list, e.g. H200.")
@click.option("--price-per-hour", type=click.FloatRange(0), help="Price of the machine, in US dollars.")
@click.option("--plot", "plot_file", type=click.Path(dir_okay=False), help="Plot latencies to this file (.png, .svg).")
@click.option("--key", help="An API key of the service.")
@click.option("--seed", type=int, help="What is typed where; default a new one each time, shown in the report.")
@print_result
def loadgen(url: str, **options: Any) -> CommandResult:
    """Send a completion service the load of typing users, and measure it.

    URL is http://HOST:PORT or grpc://HOST:PORT; with --before-after it is a MODEL that is served for the measurement.
    """
    from lakh.server.loadgen.generator import LoadConfig, run_load
    from lakh.server.loadgen.report import check_image, plot

    price, source = _price(options.pop("gpu"), options.pop("price_per_hour"))
    files = Path(options.pop("files") or sysconfig.get_path("stdlib"))
    before_after, draft, threads, plot_file, metrics_url = (
        options.pop(name) for name in ("before_after", "draft", "threads", "plot_file", "metrics_url")
    )
    image = None if plot_file is None else check_image(Path(plot_file))
    if options["seed"] is None:  # the same load twice would find the first run's completions in the cache
        options["seed"] = secrets.randbelow(1 << 31)
    load = LoadConfig(timeout_s=options.pop("timeout_ms") / 1000, **options)
    if before_after:
        if metrics_url:
            raise UserError("--metrics", "cannot be combined with --before-after", "remove it")
        ablation = bench_module("serve.ablation", "lakh loadgen --before-after")
        result: CommandResult = ablation.before_after(url, files, load, draft, threads, (price, source), image)
        return result
    if draft or threads:
        raise UserError("--draft, --threads", "need --before-after", "give them to lakh serve")
    with console().status("typing") as status:
        report = run_load(
            url, files, load, metrics_url=metrics_url, progress=lambda sent: status.update(f"{sent} requests sent")
        )
    if image is not None:
        asked = f"{load.clients} clients" if load.clients else f"{load.rate:g} requests/s"
        plot(report, image, f"{url}: {asked}")
    data = {**report.as_dict(price), "price": source, "seed": load.seed}
    shown = table(["figure", "value"], [[LABELS.get(name, name), _shown(value)] for name, value in data.items()])
    if (data["text_hit_rate"] or 0) > MUCH_CACHED:
        console().print(
            f"{data['text_hit_rate']:.0%} of the answers came from the completion cache and cost the model nothing: "
            "use another --seed, or serve with --cache off, to measure the model",
            style="yellow",
        )
    if report.is_interrupted:
        console().print(f"interrupted after {report.wall_s:.1f} s: showing what was measured")
        return CommandResult(data, shown, exit_code=Interrupted.exit_code)
    return CommandResult(
        data, shown, exit_code=PeerLost.exit_code if report.sent and report.sent == data["failed"] else 0
    )


def _price(gpu: str | None, per_hour: float | None) -> tuple[float | None, str]:
    """US dollars per hour of the machine, and the source of that price; None if neither is given."""
    from lakh.planner.cost.prices import gpu_hour, load_prices

    if per_hour is not None:
        return per_hour, f"{per_hour:g} USD/h, as given"
    if gpu is None:
        return None, "unknown: give --gpu NAME or --price-per-hour USD for the cost"
    hour = gpu_hour(load_prices(), gpu)
    return hour.usd, f"{hour.usd:g} USD/h ({gpu}, {'; '.join(hour.assumptions)})"


def _shown(value: Any) -> Any:
    if isinstance(value, dict):
        return ", ".join(f"{name} {round(one, 1) if isinstance(one, float) else one}" for name, one in value.items())
    return value
