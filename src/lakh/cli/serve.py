"""lakh serve: completions over HTTP."""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.parse import urlsplit

import click

from lakh.cli.face import console
from lakh.errors import UserError

__all__ = ["serve"]

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@click.command()
@click.argument("model")
@click.option(
    "--http",
    "address",
    metavar="HOST:PORT",
    default="127.0.0.1:8000",
    show_default=True,
    help="Where to listen; :PORT is this machine only, port 0 takes a free one.",
)
@click.option("--grpc", "grpc_address", metavar="HOST:PORT", help="Also answer gRPC (lakh.v1.Completion) there.")
@click.option(
    "--precision",
    type=click.Choice(["f32", "bf16", "int8"]),
    help="Of the weights; by default f32 on a CPU, bf16 on a GPU. int8 is for CPUs.",
)
@click.option(
    "--speculate", is_flag=True, help="Guess tokens from the text so far, where measurement says that it pays."
)
@click.option("--cache-tokens", type=click.IntRange(1), help="Tokens whose keys and values are remembered.")
@click.option("--keys", "keys_file", type=click.Path(), help="File of API keys: lines of KEY TENANT.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads.")
@click.option("--json", "as_json", is_flag=True, help="When ready, print one JSON line: url, model, pid.")
def serve(
    model: str,
    address: str,
    grpc_address: str | None,
    precision: Any,
    speculate: bool,
    cache_tokens: int | None,
    keys_file: str | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Serve completions over HTTP.

    MODEL is a run's folder, a checkpoint's folder or a Hugging Face directory. Answers POST /v1/completions
    in OpenAI's form, /v1/fim/completions and /infill in those of Mistral and llama.cpp, and GET /v1/models,
    /health, /ready and /metrics. SIGTERM or Ctrl-C ends it once the requests at work are answered.
    """
    host, port = _parse("--http", address)
    also = None if grpc_address is None else _parse("--grpc", grpc_address)
    from lakh.server import http
    from lakh.server.engine import Engine
    from lakh.server.keys import Keys

    keys = Keys.load(keys_file) if keys_file else None
    talk = console()
    if threads:
        import torch

        torch.set_num_threads(threads)
    with talk.status(f"loading {model}"):
        speculation: Any = "lookup" if speculate else "off"
        engine = Engine.load(model, precision=precision, speculation=speculation, cache_tokens=cache_tokens)
        engine.warm_up()
    if host not in LOOPBACK and keys is None:
        talk.print(f"{host} may be reached by others, and there are no keys: see --keys", style="yellow")

    def ready(url: str, grpc_at: str | None) -> None:
        body = json.dumps({"prompt": "def hello(", "max_tokens": 32, "temperature": 0})
        talk.print(f"serving {engine.name} ({engine.spec.parameters:,} parameters, {engine.device}) at {url}")
        talk.print(f"try: curl -s {url}/v1/completions -d '{body}'", markup=False, soft_wrap=True)
        if grpc_at:
            talk.print(f"gRPC at {grpc_at}")
        if as_json:
            click.echo(json.dumps({"url": url, "grpc": grpc_at, "model": engine.name, "pid": os.getpid()}))

    http.serve(engine, host, port, ready=ready, keys=keys, grpc_address=also)
    talk.print("stopped")


def _parse(option: str, address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname or LOOPBACK[0], parts.port
    except ValueError:
        port = None
    if port is None or parts.path or parts.username:
        raise UserError(f"{option} {address}", "is not of the form HOST:PORT", f"write e.g. {option} 127.0.0.1:8000")
    return host, port
