"""lakh dashboard: a web page with the progress of one run or many."""

from __future__ import annotations

from typing import Any

import click

from lakh.cli.complete import complete_runs
from lakh.cli.output import CommandResult, console, print_result, print_warning, table
from lakh.cli.serve_options import LOOPBACK, listen_address
from lakh.errors import MissingExtra, UserError

__all__ = ["dashboard"]


@click.command()
@click.argument("run_dir", default=".", shell_complete=complete_runs)
@click.option(
    "--http",
    "address",
    default="127.0.0.1:8100",
    show_default=True,
    metavar="[HOST]:PORT",
    help="Address to listen on. Port 0 picks a free port.",
)
@click.option("--once", is_flag=True, help="Print a table of the runs and exit.")
@click.option("--out", metavar="FILE", help="Save the page as one self-contained HTML file and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print the data behind the page as one JSON document and exit.")
def dashboard(run_dir: str, address: str, once: bool, out: str | None, as_json: bool) -> int:
    """Show the progress of runs, live, in a browser.

    RUN_DIR is the folder of a run or a folder that holds runs (default: the current folder). Ctrl-C stops the server.
    """
    if once or out or as_json:
        exit_code: int = print_result(_print_once)(run_dir, out, as_json=as_json)
        return exit_code
    from lakh.dashboard.runs import RunCollection

    try:
        from lakh.dashboard.server import serve
    except ModuleNotFoundError as error:  # a saved page and the data need no server
        raise MissingExtra("lakh dashboard", str(error.name), "dashboard") from None

    host, port = listen_address("--http", address)
    runs = RunCollection(run_dir)
    err = console()

    def ready(url: str) -> None:
        err.print(f"dashboard of {len(runs.names)} run(s) at {url}", soft_wrap=True)
        if host not in LOOPBACK:
            print_warning(f"{host} may be reachable from other machines: they can see these runs")
        err.print("Ctrl-C stops it")

    serve(runs, host, port, ready)
    err.print("stopped")
    return 0


def _print_once(run_dir: str, out: str | None) -> CommandResult:
    from lakh import storage
    from lakh.dashboard.page import page
    from lakh.dashboard.runs import RunCollection

    runs = RunCollection(run_dir)
    runs.read_all()
    data = runs.data()
    if not data["runs"]:
        raise UserError(run_dir, "holds no runs", "start one with: lakh train laptop --out RUN_DIR")
    if out:
        storage.write_bytes(out, page(data).encode())
        console().print(f"saved {out}", soft_wrap=True)
    return CommandResult(data, _summary(data["runs"]))


def _summary(runs: list[dict[str, Any]]) -> Any:
    """A table that fits 80 columns; restarts appear only if there were any."""
    columns = {"loss": "loss", "held-out": "heldout_loss", "tokens/s": "tokens_per_s", "goodput": "goodput"}
    if any(run["restarts"] for run in runs):
        columns["restarts"] = "restarts"
    rows = []
    for run in runs:
        of_steps = f"/{run['steps']:,}" if run["steps"] and run["step"] != run["steps"] else ""
        progress = f"{run['step'] or 0:,}{of_steps}"
        rows.append([run["name"], run["state"]["word"], progress, *(run[key] for key in columns.values())])
    return table(["run", "state", "step", *columns], rows)
