"""lakh loadgen: developers typing real files against a completion service."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import click

from lakh.cli.face import Answer, answers, console, table

__all__ = ["loadgen"]


@click.command()
@click.argument("url")
@click.option(
    "--rate", type=click.FloatRange(min=0, min_open=True), default=10.0, show_default=True, help="Per second."
)
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=30.0, show_default=True)
@click.option("--users", type=click.IntRange(1), default=50, show_default=True, help="Who type, each in a file.")
@click.option("--files", type=click.Path(exists=True, file_okay=False), help="Python files; the standard library's.")
@click.option(
    "--order", type=click.Choice(["spm", "psm", "none"]), default="spm", show_default=True, help="Of the prompt."
)
@click.option("--max-tokens", type=click.IntRange(1), default=32, show_default=True)
@click.option("--timeout-ms", type=click.IntRange(1), default=2000, show_default=True)
@click.option(
    "--prefix-chars", type=click.IntRange(16), default=6000, show_default=True, help="Sent before the cursor."
)
@click.option("--suffix-chars", type=click.IntRange(0), default=2000, show_default=True, help="Sent after it.")
@click.option("--stop-rule", type=click.Choice(["line", "block"]), help="Where a completion ends by itself.")
@click.option("--price-per-hour", type=float, default=3.0, show_default=True, help="Of the machine: an assumption.")
@click.option("--key", help="An API key of the service.")
@click.option("--seed", type=int, default=0, show_default=True)
@answers
def loadgen(
    url: str,
    rate: float,
    seconds: float,
    users: int,
    files: str | None,
    order: str,
    max_tokens: int,
    timeout_ms: int,
    prefix_chars: int,
    suffix_chars: int,
    stop_rule: str | None,
    price_per_hour: float,
    key: str | None,
    seed: int,
) -> Answer:
    """Load a completion service as developers who type do, and measure it."""
    from lakh.server.loadgen import Load, run_load

    load = Load(
        rate=rate,
        seconds=seconds,
        users=users,
        order=order,
        max_tokens=max_tokens,
        timeout_s=timeout_ms / 1000,
        prefix_chars=prefix_chars,
        suffix_chars=suffix_chars,
        stop_rule=stop_rule,
        price_per_hour=price_per_hour,
        seed=seed,
        key=key,
    )
    folder = Path(files) if files else Path(sysconfig.get_path("stdlib"))
    with console().status("typing") as status:
        report = run_load(url, folder, load, lambda sent: status.update(f"{sent} requests sent"))
    data = report.as_dict(load)
    rows = []
    for name, value in data.items():
        shown = (
            ", ".join(f"{k} {v:.1f}" for k, v in value.items() if v is not None) if isinstance(value, dict) else value
        )
        rows.append([name, shown])
    return Answer(data, table(["figure", "value"], rows))
