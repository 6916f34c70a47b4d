"""lakh gateway: several engines behind one address."""

from __future__ import annotations

import json
import os

import click

from lakh.cli.output import console
from lakh.cli.serve_options import ServeOptions, read_key, server_options

__all__ = ["gateway"]


@click.command(context_settings={"show_default": True})
@click.argument("engines", nargs=-1, required=True, metavar="ENGINE...")
@server_options("127.0.0.1:8080")
@click.option(
    "--fim",
    default="suffix",
    metavar="TEMPLATE",
    help="Fill-in-the-middle template of engines other than lakh: suffix (the engine takes one), lakh, qwen, "
    "starcoder, deepseek, or PREFIX,SUFFIX,MIDDLE tokens.",
)
@click.option("--engine-key-file", type=click.Path(), help="File with the API key of the engines.")
@click.option(
    "--stall-s", type=click.FloatRange(0.1), default=30.0, help="Silence after which another engine is tried."
)
@click.option("--json", "as_json", is_flag=True, help="When ready, print one JSON line: url, engines, pid.")
def gateway(
    engines: tuple[str, ...],
    options: ServeOptions,
    fim: str,
    engine_key_file: str | None,
    stall_s: float,
    as_json: bool,
) -> None:
    """Put several engines behind one address.

    ENGINE is the URL of a lakh, vLLM or SGLang server, or dns:NAME:PORT for every address of a name. Serves the same
    API as `lakh serve`; routes the requests of a file to the engine that has it cached, and retries the requests of a
    failed engine on another. SIGTERM or Ctrl-C stops it after the running requests.
    """
    from lakh.server.gateway.fim_template import fim_template_of
    from lakh.server.gateway.gateway import Gateway

    key = read_key(engine_key_file) if engine_key_file else ""
    fleet = Gateway(engines, store=options.store, template=fim_template_of(fim), key=key, stall_s=stall_s)
    talk = console()

    def ready(url: str, grpc_at: str | None) -> None:
        talk.print(f"gateway at {url}" + (f", gRPC at {grpc_at}" if grpc_at else ""))
        for replica in fleet.replicas.values():
            talk.print(f"  {replica.url}: {replica.state} ({replica.found})", markup=False)
        if as_json:
            known = {replica.url: replica.state for replica in fleet.replicas.values()}
            click.echo(json.dumps({"url": url, "grpc": grpc_at, "engines": known, "pid": os.getpid()}))

    options.serve(fleet, talk, ready)
    talk.print("stopped")
