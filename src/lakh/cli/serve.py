"""lakh serve: completions over HTTP."""

from __future__ import annotations

import json
import os
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
@click.option("--json", "as_json", is_flag=True, help="When ready, print one JSON line: url, model, pid.")
def serve(model: str, address: str, as_json: bool) -> None:
    """Serve completions over HTTP.

    MODEL is a run's folder, a checkpoint's folder or a Hugging Face directory. Answers POST /v1/completions
    in OpenAI's form, and GET /v1/models, /health and /metrics. SIGTERM or Ctrl-C ends it once the requests
    at work are answered.
    """
    host, port = _parse(address)
    from lakh.server import http
    from lakh.server.engine import Engine

    talk = console()
    with talk.status(f"loading {model}"):
        engine = Engine.load(model)
    if host not in LOOPBACK:
        talk.print(f"{host} may be reached by others, and there is no authentication", style="yellow")

    def ready(url: str) -> None:
        body = json.dumps({"prompt": "def hello(", "max_tokens": 32, "temperature": 0})
        talk.print(f"serving {engine.name} ({engine.spec.parameters:,} parameters, {engine.device}) at {url}")
        talk.print(f"try: curl -s {url}/v1/completions -d '{body}'", markup=False, soft_wrap=True)
        if as_json:
            click.echo(json.dumps({"url": url, "model": engine.name, "pid": os.getpid()}))

    http.serve(engine, host, port, ready=ready)
    talk.print("stopped")


def _parse(address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname or LOOPBACK[0], parts.port
    except ValueError:
        port = None
    if port is None or parts.path or parts.username:
        raise UserError(f"--http {address}", "is not of the form HOST:PORT", "write e.g. --http 127.0.0.1:8000")
    return host, port
