"""lakh loadgen: developers typing real files against a completion service."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import click

from lakh.cli.face import Answer, answers, console, table
from lakh.errors import Interrupted, PeerLost, UserError

__all__ = ["loadgen"]

FLOAT = click.FloatRange(min=0, min_open=True)


@click.command()
@click.argument("url")
@click.option("--rate", type=FLOAT, default=10.0, show_default=True, help="Requests per second, open loop.")
@click.option("--seconds", type=FLOAT, default=30.0, show_default=True)
@click.option("--users", type=click.IntRange(1), default=50, show_default=True, help="Who type, each in a file.")
@click.option("--clients", type=click.IntRange(1), help="Closed loop instead: so many clients, each waits and thinks.")
@click.option("--burst", type=click.FloatRange(1), default=1.0, show_default=True, help="Busy spells over quiet ones.")
@click.option("--files", type=click.Path(exists=True, file_okay=False), help="Python files; the standard library's.")
@click.option(
    "--order", type=click.RouteDecision(["spm", "psm", "none"]), default="spm", show_default=True, help="Of the prompt."
)
@click.option("--max-tokens", type=click.IntRange(1), default=32, show_default=True)
@click.option("--timeout-ms", type=click.IntRange(1), default=2000, show_default=True)
@click.option(
    "--prefix-chars", type=click.IntRange(16), default=6000, show_default=True, help="Sent before the cursor."
)
@click.option("--suffix-chars", type=click.IntRange(0), default=2000, show_default=True, help="Sent after it.")
@click.option("--stop-rule", type=click.RouteDecision(["line", "block", "dedent"]), help="Where a completion ends by itself.")
@click.option("--before-after", is_flag=True, help="URL is a MODEL: serve it with one technique more each time.")
@click.option("--draft", type=click.Path(), help="With --before-after: a draft model for the last row.")
@click.option("--threads", type=click.IntRange(1), help="With --before-after: CPU threads of the server.")
@click.option("--metrics", "metrics_url", metavar="URL", help="The HTTP face, where URL is grpc://HOST:PORT.")
@click.option("--gpu", help="Price of the machine: this GPU's rent in the price book, e.g. H200.")
@click.option("--price-per-hour", type=click.FloatRange(0), help="Price of the machine, in US dollars.")
@click.option("--plot", "plot_file", type=click.Path(dir_okay=False), help="Draw latencies there (.png, .svg).")
@click.option("--key", help="An API key of the service.")
@click.option("--seed", type=int, default=0, show_default=True)
@answers
def loadgen(url: str, **options: Any) -> Answer:
    """LoadConfig a completion service as developers who type do, and measure it.

    URL is http://HOST:PORT or grpc://HOST:PORT; with --before-after it is a MODEL, which is then served here.
    """
    from lakh.server.loadgen.generator import LoadConfig, run_load
    from lakh.server.loadgen.report import plot

    price, source = _price(options.pop("gpu"), options.pop("price_per_hour"))
    files = Path(options.pop("files") or sysconfig.get_path("stdlib"))
    before_after, draft, threads, plot_file, metrics_url = (
        options.pop(name) for name in ("before_after", "draft", "threads", "plot_file", "metrics_url")
    )
    if plot_file and Path(plot_file).suffix not in (".png", ".svg"):
        raise UserError(f"--plot {plot_file}", "is no picture that can be drawn", "end its name in .png or .svg")
    load = LoadConfig(timeout_s=options.pop("timeout_ms") / 1000, **options)
    if before_after:
        if metrics_url:
            raise UserError("--metrics", "does not go with --before-after", "leave it out: the servers are its own")
        return _before_after(url, files, load, draft, threads, plot_file, price, source)
    if draft or threads:
        raise UserError("--draft, --threads", "go with --before-after", "give them to lakh serve")
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
        console().print(f"interrupted after {report.wall_s:.1f} s: what was measured until then")
        return Answer(data, shown, exit_code=Interrupted.exit_code)
    return Answer(data, shown, exit_code=PeerLost.exit_code if report.sent and report.sent == data["failed"] else 0)


def _before_after(
    model: str,
    files: Path,
    load: Any,
    draft: str | None,
    threads: int | None,
    plot_file: str | None,
    price: float,
    source: str,
) -> Answer:
    from lakh.server.loadgen.ablation import rows_of, run_rows
    from lakh.server.loadgen.report import plot_rows

    rows: list[dict[str, Any]] = []
    is_interrupted = False
    with console().status("starting the server") as status:
        measured = run_rows(
            model,
            rows_of(load.order, draft),
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
            status.console.print("interrupted: what was measured until then; the rest was not run")
        finally:
            measured.close()  # ends the server
    title = f"{model}: {load.rate:g} requests/s for {load.seconds:g} s; price {source}"
    if plot_file:
        plot_rows(rows, Path(plot_file), title)
    indent_width = ["technique", "first ms", "p50 ms", "p99 ms", "late", "done", "prefilled", "CPU ms"]
    indent_width += ["prefix hits", "text hits", "drafts kept", "$ per 1k"]
    data = {"rows": rows, "price": source, **({"interrupted": True} if is_interrupted else {})}
    shown = table(indent_width, [_line(row) for row in rows], title=title)
    return Answer(data, shown, exit_code=Interrupted.exit_code if is_interrupted else 0)


def _line(row: dict[str, Any]) -> list[Any]:
    """Of the table of before and after."""

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
    """US dollars per hour of the machine, and where the figure is from."""
    from lakh.planner.prices import gpu_hour, load_prices

    if per_hour is not None:
        return per_hour, f"{per_hour:g} USD/h, as given"
    hour = gpu_hour(load_prices(), gpu or "H200")
    why = "; ".join(hour.assumptions)
    return hour.usd, f"{hour.usd:g} USD/h ({gpu or 'H200'}, {why})" + ("" if gpu else "; not this machine's")


def _whole(value: float | None) -> str:
    """Milliseconds or tokens, without their fractions."""
    return "" if value is None else f"{value:.0f}"


def _shown(value: Any) -> Any:
    if isinstance(value, dict):
        return ", ".join(f"{name} {round(one, 1) if isinstance(one, float) else one}" for name, one in value.items())
    return value
