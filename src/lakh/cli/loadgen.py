"""lakh loadgen: simulated users who type real files against a completion service."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import click

from lakh.cli.output import CommandResult, console, print_result, table
from lakh.errors import Interrupted, PeerLost, UserError

__all__ = ["loadgen"]

FLOAT = click.FloatRange(min=0, min_open=True)


@click.command()
@click.argument("url")
@click.option("--rate", type=FLOAT, default=10.0, show_default=True, help="Requests per second, open loop.")
@click.option("--seconds", type=FLOAT, default=30.0, show_default=True)
@click.option("--users", type=click.IntRange(1), default=50, show_default=True, help="Simulated users.")
@click.option("--clients", type=click.IntRange(1), help="Closed loop: this many clients that wait for each response.")
@click.option(
    "--burst", type=click.FloatRange(1), default=1.0, show_default=True, help="Rate of busy phases over quiet ones."
)
@click.option(
    "--files",
    type=click.Path(exists=True, file_okay=False),
    help="Folder of Python files to type; default the standard library.",
)
@click.option(
    "--order",
    type=click.Choice(["spm", "psm", "none"]),
    default="spm",
    show_default=True,
    help="Order of the fill-in-the-middle prompt.",
)
@click.option("--max-tokens", type=click.IntRange(1), default=32, show_default=True)
@click.option("--timeout-ms", type=click.IntRange(1), default=2000, show_default=True)
@click.option(
    "--prefix-chars",
    type=click.IntRange(16),
    default=6000,
    show_default=True,
    help="Characters sent before the cursor.",
)
@click.option(
    "--suffix-chars", type=click.IntRange(0), default=2000, show_default=True, help="Characters sent after the cursor."
)
@click.option("--stop-rule", type=click.Choice(["line", "block", "dedent"]), help="Where completions end.")
@click.option(
    "--before-after", is_flag=True, help="Ablation: URL is a MODEL, served with one more technique each time."
)
@click.option("--draft", type=click.Path(), help="With --before-after: a draft model for the last row.")
@click.option("--threads", type=click.IntRange(1), help="With --before-after: CPU threads of the server.")
@click.option("--metrics", "metrics_url", metavar="URL", help="The HTTP address, if URL is grpc://HOST:PORT.")
@click.option("--gpu", help="Price of the machine: this GPU's rent in the price list, e.g. H200.")
@click.option("--price-per-hour", type=click.FloatRange(0), help="Price of the machine, in US dollars.")
@click.option("--plot", "plot_file", type=click.Path(dir_okay=False), help="Plot latencies to this file (.png, .svg).")
@click.option("--key", help="An API key of the service.")
@click.option("--seed", type=int, default=0, show_default=True)
@print_result
def loadgen(url: str, **options: Any) -> CommandResult:
    """Send a completion service the load of typing users, and measure it.

    URL is http://HOST:PORT or grpc://HOST:PORT; with --before-after it is a MODEL that is served for the measurement.
    """
    from lakh.server.loadgen.generator import LoadConfig, run_load
    from lakh.server.loadgen.report import plot

    price, source = _price(options.pop("gpu"), options.pop("price_per_hour"))
    files = Path(options.pop("files") or sysconfig.get_path("stdlib"))
    before_after, draft, threads, plot_file, metrics_url = (
        options.pop(name) for name in ("before_after", "draft", "threads", "plot_file", "metrics_url")
    )
    if plot_file and Path(plot_file).suffix not in (".png", ".svg"):
        raise UserError(f"--plot {plot_file}", "is not a supported image format", "end its name in .png or .svg")
    load = LoadConfig(timeout_s=options.pop("timeout_ms") / 1000, **options)
    if before_after:
        if metrics_url:
            raise UserError("--metrics", "cannot be combined with --before-after", "remove it")
        return _before_after(url, files, load, draft, threads, plot_file, price, source)
    if draft or threads:
        raise UserError("--draft, --threads", "need --before-after", "give them to lakh serve")
    with console().status("typing") as status:
        report = run_load(
            url, files, load, metrics_url=metrics_url, progress=lambda sent: status.update(f"{sent} requests sent")
        )
    if plot_file:
        asked = f"{load.clients} clients" if load.clients else f"{load.rate:g} requests/s"
        plot(report, Path(plot_file), f"{url}: {asked}")
    data = {**report.as_dict(price), "price": source}
    shown = table(["figure", "value"], [[name, _shown(value)] for name, value in data.items()])
    if report.is_interrupted:
        console().print(f"interrupted after {report.wall_s:.1f} s: showing what was measured")
        return CommandResult(data, shown, exit_code=Interrupted.exit_code)
    return CommandResult(
        data, shown, exit_code=PeerLost.exit_code if report.sent and report.sent == data["failed"] else 0
    )


def _before_after(
    model: str,
    files: Path,
    load: Any,
    draft: str | None,
    threads: int | None,
    plot_file: str | None,
    price: float,
    source: str,
) -> CommandResult:
    from lakh.server.loadgen.ablation import ablation_rows, run_ablation
    from lakh.server.loadgen.report import plot_rows

    rows: list[dict[str, Any]] = []
    is_interrupted = False
    with console().status("starting the server") as status:
        measured = run_ablation(
            model,
            ablation_rows(load.order, draft),
            files,
            load,
            options=[] if threads is None else ["--threads", str(threads)],
            progress=lambda name, sent: status.update(f"{name}: {sent} requests sent"),
        )
        try:
            for row, report in measured:
                rows.append({"row": row.name, **report.as_dict(price)})
                p50, p99 = (_whole(rows[-1]["e2e_ms"][mark]) for mark in ("p50", "p99"))
                status.console.print(f"{row.name}: p50 {p50} ms, p99 {p99} ms", highlight=False)
                if report.is_interrupted:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:  # in a load, or while a server starts
            if not rows:
                raise
            is_interrupted = True
            status.console.print("interrupted: showing what was measured; the rest did not run")
        finally:
            measured.close()  # stops the server
    title = f"{model}: {load.rate:g} requests/s for {load.seconds:g} s; price {source}"
    if plot_file:
        plot_rows(rows, Path(plot_file), title)
    indent_width = ["technique", "first ms", "p50 ms", "p99 ms", "late", "done", "prefilled", "CPU ms"]
    indent_width += ["prefix hits", "text hits", "drafts accepted", "$ per 1k"]
    data = {"rows": rows, "price": source, **({"interrupted": True} if is_interrupted else {})}
    shown = table(indent_width, [_line(row) for row in rows], title=title)
    return CommandResult(data, shown, exit_code=Interrupted.exit_code if is_interrupted else 0)


def _line(row: dict[str, Any]) -> list[Any]:
    """A row of the ablation table."""

    def share(name: str) -> str:
        return "" if row[name] is None else f"{row[name]:.0%}"

    late = (row["timeouts"] + row["rejected"] + row["failed"]) / max(row["sent"], 1)
    return [
        row["row"],
        _whole(row["ttft_ms"]["p50"]),
        _whole(row["e2e_ms"]["p50"]),
        _whole(row["e2e_ms"]["p99"]),
        f"{late:.1%}",
        row["completed"],
        _whole(row["prefilled_tokens_per_request"]),
        _whole(row["server_cpu_ms_per_request"]),
        share("prefix_hit_rate"),
        share("text_hit_rate"),
        share("draft_acceptance"),
        "" if row["cost_per_1k"] is None else f"{row['cost_per_1k']:.3f}",
    ]


def _price(gpu: str | None, per_hour: float | None) -> tuple[float, str]:
    """US dollars per hour of the machine, and the source of that price."""
    from lakh.planner.cost.prices import gpu_hour, load_prices

    if per_hour is not None:
        return per_hour, f"{per_hour:g} USD/h, as given"
    hour = gpu_hour(load_prices(), gpu or "H200")
    why = "; ".join(hour.assumptions)
    return hour.usd, f"{hour.usd:g} USD/h ({gpu or 'H200'}, {why})" + ("" if gpu else "; not this machine's")


def _whole(value: float | None) -> str:
    """Milliseconds or tokens, rounded."""
    return "" if value is None else f"{value:.0f}"


def _shown(value: Any) -> Any:
    if isinstance(value, dict):
        return ", ".join(f"{name} {round(one, 1) if isinstance(one, float) else one}" for name, one in value.items())
    return value
