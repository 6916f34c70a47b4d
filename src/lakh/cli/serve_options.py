"""What a server and a gateway share: where they listen, who may come in, what is kept, how it ends.

`@listens(default)` and `@face_options` add the options; the command gets one `face` instead of all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from lakh.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from lakh.server.backend import Backend

__all__ = ["LOOPBACK", "ServeOptions", "face_options", "listen_address", "listens"]

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


NAMES = ("cache", "keys_file", "tls_cert", "tls_key", "tls_client_ca", "max_body_mb", "drain_s")


def face_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def listens(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """--http and --grpc; from them and `face_options`, the command's argument `face`."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_face(address: str, grpc_address: str | None, **options: Any) -> Any:
            face = ServeOptions(address, grpc_address, **{name: options.pop(name) for name in NAMES})
            return command(face=face, **options)

        grpc = click.option(
            "--grpc", "grpc_address", metavar="HOST:PORT", help="Also answer gRPC (lakh.v1.Completion) there."
        )
        http = click.option(
            "--http",
            "address",
            metavar="HOST:PORT",
            default=default,
            show_default=True,
            help="Where to listen; :PORT is this machine only, port 0 takes a free one.",
        )
        return http(grpc(with_face))

    return decorate


class ServeOptions:
    """Where and for whom to listen; whatever is wrong with it is said here, before a model is loaded."""

    def __init__(
        self,
        address: str,
        grpc_address: str | None,
        *,
        cache: str,
        keys_file: str | None,
        tls_cert: str | None,
        tls_key: str | None,
        tls_client_ca: str | None,
        max_body_mb: float,
        drain_s: float,
    ) -> None:
        self.host, self.port = listen_address("--http", address)
        self._also = None if grpc_address is None else listen_address("--grpc", grpc_address)
        from lakh.server.api.listen import check_free
        from lakh.server.api.api_keys import ApiKeys
        from lakh.server.api.tls import tls_of
        from lakh.server.store import open_store

        check_free("--http", self.host, self.port)
        if self._also is not None:
            check_free("--grpc", *self._also)
        self._keys = ApiKeys.load(keys_file) if keys_file else None
        self._tls = tls_of(tls_cert, tls_key, tls_client_ca)
        self.store = open_store(cache)
        self._limits = {"drain_s": drain_s, "max_body_bytes": int(max_body_mb * 2**20)}

    def serve(self, backend: Backend, talk: Console, ready: Callable[[str, str | None], None]) -> None:
        """Until SIGTERM or SIGINT, with known answers in front of the backend where a store keeps them."""
        from lakh.server.backends.completion_cache import CompletionCache
        from lakh.server.gc_control import settle
        from lakh.server.api import http

        if self.host not in LOOPBACK and self._keys is None:
            talk.print(f"{self.host} may be reached by others, and there are no keys: see --keys", style="yellow")
        behind = backend if self.store is None else CompletionCache(backend, self.store)
        options: dict[str, Any] = {"keys": self._keys, "store": self.store, "tls": self._tls, **self._limits}
        settle()
        http.serve(behind, self.host, self.port, ready=ready, grpc_address=self._also, **options)


def listen_address(option: str, address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname or LOOPBACK[0], parts.port
    except ValueError:
        port = None
    if port is None or parts.path or parts.username:
        raise UserError(f"{option} {address}", "is not of the form HOST:PORT", f"write e.g. {option} 127.0.0.1:8000")
    return host, port
