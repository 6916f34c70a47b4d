"""lakh serve: completions over HTTP."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from lakh.cli.face import console
from lakh.cli.serve_options import LOOPBACK, face_options, listen_address

__all__ = ["serve"]


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
    "--speculate/--no-speculate",
    default=True,
    show_default=True,
    help="Guess tokens, by the draft or from the text so far, where measurement says that it pays.",
)
@click.option("--draft", metavar="MODEL", help="A smaller model of the same tokenizer that guesses.")
@click.option("--cache-tokens", type=click.IntRange(1), help="Tokens whose keys and values are remembered.")
@face_options
@click.option(
    "--max-waiting",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Requests in the queue; then it is a 429.",
)
@click.option("--threads", type=click.IntRange(1), help="CPU threads.")
@click.option("--json", "as_json", is_flag=True, help="When ready, print one JSON line: url, model, pid.")
def serve(
    model: str,
    address: str,
    grpc_address: str | None,
    precision: Any,
    speculate: bool,
    draft: str | None,
    cache_tokens: int | None,
    cache: str,
    keys_file: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    tls_client_ca: str | None,
    max_body_mb: float,
    drain_s: float,
    max_waiting: int,
    threads: int | None,
    as_json: bool,
) -> None:
    """Serve completions over HTTP.

    MODEL is a run's folder, a checkpoint's folder or a Hugging Face directory. Answers POST /v1/completions
    in OpenAI's form, /v1/fim/completions and /infill in those of Mistral and llama.cpp, and GET /v1/models,
    /health, /ready and /metrics. SIGTERM or Ctrl-C ends it once the requests at work are answered.
    """
    host, port = listen_address("--http", address)
    also = None if grpc_address is None else listen_address("--grpc", grpc_address)
    from lakh.server import http
    from lakh.server.backend import Backend
    from lakh.server.engine import Engine
    from lakh.server.keys import Keys
    from lakh.server.local import LocalBackend
    from lakh.server.store import open_store
    from lakh.server.textcache import TextCache
    from lakh.server.tls import tls_of

    keys = Keys.load(keys_file) if keys_file else None
    tls = tls_of(tls_cert, tls_key, tls_client_ca)
    store = open_store(cache)
    talk = console()
    if threads:
        import torch

        torch.set_num_threads(threads)
    with talk.status(f"loading {model}"):
        speculation: Any = "lookup" if speculate else "off"
        engine = Engine.load(
            model,
            precision=precision,
            speculation=speculation,
            draft=draft if speculate else None,
            cache_tokens=cache_tokens,
        )
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

    backend: Backend = LocalBackend(engine, max_waiting=max_waiting)
    if store is not None:
        backend = TextCache(backend, store)
    options = {"keys": keys, "store": store, "drain_s": drain_s, "max_body_bytes": int(max_body_mb * 2**20)}
    http.serve(backend, host, port, ready=ready, grpc_address=also, tls=tls, **options)
    talk.print("stopped")
