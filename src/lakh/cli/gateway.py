"""lakh gateway: several engines behind one address."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from lakh.cli.face import console
from lakh.cli.serve_options import LOOPBACK, face_options, listen_address
from lakh.errors import UserError

__all__ = ["gateway"]


@click.command()
@click.argument("engines", nargs=-1, required=True, metavar="ENGINE...")
@click.option(
    "--http",
    "address",
    metavar="HOST:PORT",
    default="127.0.0.1:8080",
    show_default=True,
    help="Where to listen; port 0 takes a free one.",
)
@click.option("--grpc", "grpc_address", metavar="HOST:PORT", help="Also answer gRPC (lakh.v1.Completion) there.")
@click.option(
    "--fim",
    default="suffix",
    show_default=True,
    metavar="TEMPLATE",
    help="Of other engines than lakh: suffix (they take one), lakh, qwen, starcoder, deepseek, or three words A,B,C.",
)
@click.option("--engine-key-file", type=click.Path(), help="File with the API key that the engines ask for.")
@click.option(
    "--stall-s",
    type=click.FloatRange(0.1),
    default=30.0,
    show_default=True,
    help="Silence until another is asked.",
)
@face_options
@click.option("--json", "as_json", is_flag=True, help="When ready, print one JSON line: url, engines, pid.")
def gateway(
    engines: tuple[str, ...],
    address: str,
    grpc_address: str | None,
    fim: str,
    engine_key_file: str | None,
    stall_s: float,
    cache: str,
    keys_file: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    tls_client_ca: str | None,
    max_body_mb: float,
    drain_s: float,
    as_json: bool,
) -> None:
    """Put several engines behind one address.

    ENGINE is the URL of a lakh, vLLM or SGLang server, or dns:NAME:PORT for every address behind a name. Answers what
    `lakh serve` answers; sends a file's requests to the engine that knows it, and those of an engine that dies to
    another. SIGTERM or Ctrl-C ends it once the requests at work are answered.
    """
    host, port = listen_address("--http", address)
    also = None if grpc_address is None else listen_address("--grpc", grpc_address)
    from lakh.server.answers.textcache import TextCache
    from lakh.server.backend import Backend
    from lakh.server.faces import http
    from lakh.server.faces.keys import Keys
    from lakh.server.faces.tls import tls_of
    from lakh.server.gateway.fim_text import template_of
    from lakh.server.gateway.gateway import Gateway
    from lakh.server.store import open_store

    keys = Keys.load(keys_file) if keys_file else None
    tls = tls_of(tls_cert, tls_key, tls_client_ca)
    store = open_store(cache)
    key = _key(engine_key_file) if engine_key_file else ""
    fleet = Gateway(engines, store=store, template=template_of(fim), key=key, stall_s=stall_s)
    talk = console()
    if host not in LOOPBACK and keys is None:
        talk.print(f"{host} may be reached by others, and there are no keys: see --keys", style="yellow")

    def ready(url: str, grpc_at: str | None) -> None:
        talk.print(f"gateway at {url}" + (f", gRPC at {grpc_at}" if grpc_at else ""))
        for replica in fleet.replicas.values():
            talk.print(f"  {replica.url}: {replica.state} ({replica.found})", markup=False)
        if as_json:
            known = {replica.url: replica.state for replica in fleet.replicas.values()}
            click.echo(json.dumps({"url": url, "grpc": grpc_at, "engines": known, "pid": os.getpid()}))

    backend: Backend = fleet if store is None else TextCache(fleet, store)
    options = {"keys": keys, "store": store, "drain_s": drain_s, "max_body_bytes": int(max_body_mb * 2**20)}
    http.serve(backend, host, port, ready=ready, grpc_address=also, tls=tls, **options)
    talk.print("stopped")


def _key(path: str) -> str:
    try:
        key = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(path, f"cannot be read ({type(error).__name__})", "give a file with one key") from None
    if not key or any(character.isspace() for character in key):
        raise UserError(path, "does not hold one key", "give a file with one key")
    return key
