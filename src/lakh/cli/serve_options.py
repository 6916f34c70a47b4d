"""Options that a server and a gateway share: who may come in, what is kept, how it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import click

from lakh.errors import UserError

__all__ = ["LOOPBACK", "face_options", "listen_address"]

LOOPBACK = ("127.0.0.1", "localhost", "::1")

_OPTIONS = [
    click.option(
        "--cache",
        default="memory",
        show_default=True,
        metavar="memory|off|redis://HOST:PORT",
        help="Where answers, quotas and counts are kept; Redis or Valkey for several servers together.",
    ),
    click.option(
        "--keys",
        "keys_file",
        type=click.Path(),
        help="File of API keys: lines of KEY TENANT [requests_per_minute=N] [tokens_per_minute=N] [at_once=N].",
    ),
    click.option("--tls-cert", type=click.Path(), help="Certificate chain (PEM): HTTPS, and gRPC over TLS."),
    click.option("--tls-key", type=click.Path(), help="Its private key (PEM)."),
    click.option("--tls-client-ca", type=click.Path(), help="Take only clients with a certificate from here (PEM)."),
    click.option(
        "--max-body-mb", type=click.FloatRange(0.001, 1024), default=4.0, show_default=True, help="Of a request."
    ),
    click.option(
        "--drain-s",
        type=click.FloatRange(0),
        default=10.0,
        show_default=True,
        help="For requests at work, once it is asked to stop.",
    ),
]


def face_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def listen_address(option: str, address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname or LOOPBACK[0], parts.port
    except ValueError:
        port = None
    if port is None or parts.path or parts.username:
        raise UserError(f"{option} {address}", "is not of the form HOST:PORT", f"write e.g. {option} 127.0.0.1:8000")
    return host, port
