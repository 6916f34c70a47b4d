"""lakh dashboard: a web page with the progress of one run or many."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from lakh.cli.complete import complete_runs
from lakh.cli.output import CommandResult, console, print_result, print_warning, table
from lakh.cli.serve_options import LOOPBACK, listen_address
from lakh.errors import MissingExtra, UserError

if TYPE_CHECKING:
    from lakh.planner.across.sites import Sites

__all__ = ["dashboard", "plan_choices"]

DEFAULT_SERVER = "http://127.0.0.1:8000"
BACK_TO_RUNS = '<nav aria-label="Dashboard"><a href="../">back to the runs</a></nav>'


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
@click.option(
    "--token-file",
    metavar="FILE",
    help="A file with the token that browsers need. Without it a new token is made, unless the address is loopback.",
)
@click.option(
    "--server",
    metavar="URL",
    help="A running server for the playground page; http://127.0.0.1:8000 by default if the dashboard is on loopback.",
)
@click.option("--once", is_flag=True, help="Print a table of the runs and exit.")
@click.option("--out", metavar="FILE", help="Save the page as one self-contained HTML file and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print the data behind the page as one JSON document and exit.")
def dashboard(
    run_dir: str,
    address: str,
    token_file: str | None,
    server: str | None,
    once: bool,
    out: str | None,
    as_json: bool,
) -> int:
    """Show the progress of runs, live, in a browser.

    RUN_DIR is the folder of a run or a folder that holds runs (default: the current folder), or the URL of one in an
    object store, for example s3://bucket/runs: its events are copied here, and again as they grow. Ctrl-C stops the
    server.
    """
    if once or out or as_json:
        exit_code: int = print_result(_print_once)(run_dir, out, as_json=as_json)
        return exit_code
    from lakh.dashboard.runs import RunCollection
    from lakh.server.api import playground as playground_page

    try:
        from lakh.dashboard.server import serve
        from lakh.dashboard.server.access import new_token, read_token
        from lakh.dashboard.server.playground import Playground, server_url
    except ModuleNotFoundError as error:  # a saved page and the data need no server
        raise MissingExtra("lakh dashboard", str(error.name), "dashboard") from None

    host, port = listen_address("--http", address)
    token = read_token(token_file) if token_file else None if host in LOOPBACK else new_token()
    # Who may see a dashboard elsewhere may use a server only if its address was given.
    url = server_url(server) if server else DEFAULT_SERVER if host in LOOPBACK else None
    playground = Playground(playground_page.page(BACK_TO_RUNS), playground_page.HEADERS, url)
    err = console()

    def ready(url: str) -> None:
        shown = url.partition("?")[0] + "?token=..." if token_file else url
        err.print(f"dashboard of {len(runs.names)} run(s) at {shown}", soft_wrap=True)
        if host not in LOOPBACK:
            print_warning(f"{host} may be reachable from other machines: who has this address can see these runs")
        err.print("Ctrl-C stops it")

    with _local_folder(run_dir) as folder:
        runs = RunCollection(folder, label=run_dir)
        serve(runs, host, port, ready, token=token, plan_choices=plan_choices, playground=playground)
    err.print("stopped")
    return 0


def plan_choices() -> dict[str, Any]:
    """Names that the plan page offers, and the sites with their links. Imported when it is first opened."""
    from lakh import config
    from lakh.planner.across.sites import load_sites
    from lakh.planner.catalogue import DATA
    from lakh.spec.cluster import shared_files

    return {
        "models": list(config.read_toml(DATA / "models.toml")),
        "clusters": sorted(shared_files("clusters", ".toml")),
        "sites": {
            name: _sites(load_sites(name)) for name in sorted(file.stem for file in (DATA / "sites").glob("*.toml"))
        },
    }


def _sites(found: Sites) -> dict[str, Any]:
    """The sites and their links, for a map."""
    from lakh.planner.across.sites import SiteNetwork

    rates = SiteNetwork(found).capacity_Bps
    return {
        "sites": [{"name": site.name, "gpus": site.gpus} for site in found.sites],
        "links": [
            {"between": list(link.between), "distance_km": link.distance_km, "bandwidth_Tbps": rate * 8 / 1e12}
            for link, rate in zip(found.links, rates.tolist(), strict=True)
        ],
    }


def _print_once(run_dir: str, out: str | None) -> CommandResult:
    from lakh import storage
    from lakh.dashboard.page import page
    from lakh.dashboard.runs import RunCollection

    with _local_folder(run_dir) as folder:
        runs = RunCollection(folder, label=run_dir)
        runs.read_all()
        data = runs.data()
        if not data["runs"]:
            raise UserError(run_dir, "holds no runs", "start one with: lakh train laptop --out RUN_DIR")
        for run in data["runs"]:
            if run["state"]["word"] == "unreadable":
                print_warning(f"{run['name']}: {run['state']['reason']}")
        if out:
            storage.write_bytes(out, page(runs.data_with_samples()).encode())
            console().print(f"saved {out}", soft_wrap=True)
    return CommandResult(data, _summary(data["runs"]))


@contextlib.contextmanager
def _local_folder(run_dir: str) -> Iterator[str]:
    """The folder itself, or a copy of what the dashboard needs of one in an object store."""
    from lakh import storage

    if storage.is_local(run_dir):
        yield run_dir
        return
    from lakh.dashboard.mirror import RunMirror

    with RunMirror(run_dir, on_error=lambda error: print_warning(str(error))) as mirror:
        yield str(mirror.folder)


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
