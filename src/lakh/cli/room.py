"""lakh room: the control room of one run or many."""

from __future__ import annotations

from typing import Any

import click

from lakh.cli.face import Answer, answers, console, table
from lakh.cli.serve_options import LOOPBACK, listen_address
from lakh.errors import MissingExtra, UserError

__all__ = ["room"]


@click.command()
@click.argument("run_dir", default=".")
@click.option(
    "--http",
    "address",
    default="127.0.0.1:8100",
    show_default=True,
    metavar="[HOST]:PORT",
    help="Port 0: any free one.",
)
@click.option("--once", is_flag=True, help="Say where the runs stand and leave; nothing is served.")
@click.option("--out", metavar="FILE", help="Save the page as one HTML file with all in it, and leave.")
@click.option("--json", "as_json", is_flag=True, help="Print the data behind the page as one JSON document, and leave.")
def room(run_dir: str, address: str, once: bool, out: str | None, as_json: bool) -> int:
    """Show what runs are doing, live, in a browser.

    RUN_DIR is the folder of a run, or one that holds runs; here by default. Ctrl-C ends it.
    """
    if once or out or as_json:
        answer: int = answers(_look_once)(run_dir, out, as_json=as_json)
        return answer
    from lakh.room.house import House

    try:
        from lakh.room.server import serve
    except ModuleNotFoundError as error:  # a saved page and the data need no server
        raise MissingExtra("lakh room", str(error.name), "room") from None

    host, port = listen_address("--http", address)
    house = House(run_dir)
    talk = console()

    def ready(url: str) -> None:
        talk.print(f"control room of {len(house.names)} run(s) at {url}", soft_wrap=True)
        if host not in LOOPBACK:
            talk.print(f"{host} may be reached by others: whoever reaches it sees these runs", style="yellow")
        talk.print("Ctrl-C ends it")

    serve(house, host, port, ready)
    talk.print("stopped")
    return 0


def _look_once(run_dir: str, out: str | None) -> Answer:
    from lakh import storage
    from lakh.room.house import House
    from lakh.room.page import page

    house = House(run_dir)
    house.read_all()
    data = house.data()
    if not data["runs"]:
        raise UserError(run_dir, "holds no runs", "make one with: lakh train laptop --out RUN_DIR")
    if out:
        storage.write_bytes(out, page(data).encode())
        console().print(f"saved {out}", soft_wrap=True)
    return Answer(data, _standing(data["runs"]))


def _standing(runs: list[dict[str, Any]]) -> Any:
    """What fits 80 columns beside a name: the goal where it is not reached, restarts where there were any."""
    columns = {"loss": "loss", "held-out": "heldout_loss", "tokens/s": "tokens_per_s", "goodput": "goodput"}
    if any(run["restarts"] for run in runs):
        columns["restarts"] = "restarts"
    rows = [
        [
            run["name"],
            run["state"]["word"],
            _progress(run["step"], run["steps"]),
            *(run[key] for key in columns.values()),
        ]
        for run in runs
    ]
    return table(["run", "state", "step", *columns], rows)


def _progress(step: int | None, steps: int | None) -> str:
    return f"{step or 0:,}" if not steps or step == steps else f"{step or 0:,}/{steps:,}"
