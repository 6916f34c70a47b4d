"""Options that `lakh serve` and `lakh gateway` share: addresses, cache, API keys, TLS, limits.

`@server_options("127.0.0.1:8000")` adds them; the command gets one `options: ServeOptions`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from lakh.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from lakh.server.api.operator_routes import ModelCatalog
    from lakh.server.backend import Backend

__all__ = ["LOOPBACK", "ServeOptions", "listen_address", "read_key", "server_options"]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
PEM = click.Path()


def server_options(default_address: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    options = [
        click.option(
            "--http",
            "address",
            metavar="HOST:PORT",
            default=default_address,
            help="Where to listen; :PORT is this machine only, port 0 takes a free one.",
        ),
        click.option("--grpc", "grpc_address", metavar="HOST:PORT", help="Also serve gRPC (lakh.v1.Completion) there."),
        click.option(
            "--cache",
            default="memory",
            metavar="memory|off|redis://HOST:PORT",
            help="Where completions, quotas and counts are cached; Redis or Valkey for several servers.",
        ),
        click.option(
            "--cache-key-file",
            type=click.Path(),
            help="File with a secret that signs what is cached in Redis; the same for all servers that share it.",
        ),
        click.option(
            "--keys",
            "keys_file",
            type=click.Path(),
            help="File of API keys: lines of KEY TENANT [requests_per_minute=N] [tokens_per_minute=N] [at_once=N]; "
            "read again on SIGHUP.",
        ),
        click.option(
            "--cors", metavar="ORIGIN", help="Web pages of this origin may use the API: https://HOST[:PORT], or *."
        ),
        click.option("--tls-cert", type=PEM, help="Certificate chain (PEM): HTTPS, and gRPC over TLS."),
        click.option("--tls-key", type=PEM, help="Its private key (PEM)."),
        click.option("--tls-client-ca", type=PEM, help="Accept only clients with a certificate of this CA (PEM)."),
        click.option(
            "--request-log",
            metavar="FILE",
            help="Append one JSON line per completion request, without its text; - is standard error. SIGHUP opens the "
            "file again.",
        ),
        click.option("--otlp", metavar="URL", help="Send OpenTelemetry traces to this collector (OTLP over HTTP)."),
        click.option(
            "--price-per-hour",
            type=click.FloatRange(0),
            help="Price of the machine in US dollars, for the cost of 1,000 completions in /metrics.",
        ),
        click.option(
            "--max-body-mb", type=click.FloatRange(0.001, 1024), default=4.0, help="Maximum size of a request."
        ),
        click.option(
            "--drain-s", type=click.FloatRange(0), default=10.0, help="Time for running requests after a stop signal."
        ),
    ]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_options(**values: Any) -> Any:
            names = inspect.signature(ServeOptions).parameters
            return command(options=ServeOptions(**{name: values.pop(name) for name in names}), **values)

        return functools.reduce(lambda decorated, option: option(decorated), reversed(options), with_options)

    return decorate


class ServeOptions:
    """Validated server options: errors are raised here, before a model is loaded."""

    def __init__(
        self,
        *,
        address: str,
        grpc_address: str | None,
        cache: str,
        cache_key_file: str | None,
        cors: str | None,
        keys_file: str | None,
        tls_cert: str | None,
        tls_key: str | None,
        tls_client_ca: str | None,
        max_body_mb: float,
        drain_s: float,
        request_log: str | None,
        otlp: str | None,
        price_per_hour: float | None,
    ) -> None:
        self.host, self.port = listen_address("--http", address)
        self._grpc_address = None if grpc_address is None else listen_address("--grpc", grpc_address)
        from lakh.server.api.api_keys import ApiKeys
        from lakh.server.api.listen import check_free
        from lakh.server.api.tls import tls_of
        from lakh.server.store import open_store

        check_free("--http", self.host, self.port)
        if self._grpc_address is not None:
            check_free("--grpc", *self._grpc_address)
        self._keys = ApiKeys.load(keys_file) if keys_file else None
        self.store = open_store(cache, _secret(cache_key_file) if cache_key_file else None)
        self._has_private_cache = "://" in cache and cache_key_file is None
        self._options: dict[str, Any] = {
            "keys": self._keys,
            "store": self.store,
            "tls": tls_of(tls_cert, tls_key, tls_client_ca),
            "drain_s": drain_s,
            "max_body_bytes": int(max_body_mb * 2**20),
            "cors": None if cors is None else _origin(cors),
        }
        self._keys_file = keys_file
        self._observe(request_log, otlp, price_per_hour)

    def _observe(self, request_log: str | None, otlp: str | None, price_per_hour: float | None) -> None:
        """Who is told about requests: logs, traces and costs."""
        from lakh.server.observability.cost import CostMeter
        from lakh.server.observability.request_record import RequestLog
        from lakh.server.observability.tracing import RequestTracer

        cost = None if price_per_hour is None else CostMeter(price_per_hour)
        self._tracer = None if otlp is None else RequestTracer(_collector(otlp))
        self._log = None if request_log is None else RequestLog(request_log)
        # The tracer first: the log has its trace id.
        self._options["observers"] = [one for one in (self._tracer, self._log, cost) if one is not None]
        self._options["metric_sources"] = [] if cost is None else [cost]

    def allow_operator(self, key: str, catalog: ModelCatalog) -> None:
        """Models and adapters can be loaded and unloaded with this key."""
        from lakh.server.api.operator_routes import Operator

        self._options["operator"] = Operator(key, catalog)

    def serve(self, backend: Backend, talk: Console, ready: Callable[[str, str | None], None]) -> None:
        """Serve until SIGTERM or SIGINT."""
        from lakh.server.api import server
        from lakh.server.gc_control import freeze

        if self.host not in LOOPBACK and self._keys is None:
            talk.print(f"{self.host} may be reachable by others, and there are no API keys: see --keys", style="yellow")
        if self._has_private_cache:
            talk.print("no other server can read what this one caches in Redis: see --cache-key-file", style="yellow")
        freeze()
        server.serve(
            backend,
            self.host,
            self.port,
            on_ready=ready,
            on_hangup=None if self._keys_file is None and self._log is None else lambda: self._hang_up(talk),
            grpc_address=self._grpc_address,
            **self._options,
        )
        if self._tracer is not None:
            self._tracer.close()

    def _hang_up(self, talk: Console) -> None:
        """SIGHUP: read the keys again, and open the log again."""
        if self._log is not None:
            try:
                self._log.reopen()
            except UserError as error:
                talk.print(f"log not opened again: {error}", style="yellow", markup=False)
        if self._keys_file is not None:
            self._reload_keys(self._keys_file, talk)

    def _reload_keys(self, path: str, talk: Console) -> None:
        """Read the file of API keys again; a file with an error changes nothing."""
        assert self._keys is not None
        try:
            self._keys.reload(path)
        except UserError as error:
            talk.print(f"keys not read again: {error}", style="yellow", markup=False, soft_wrap=True)
        else:
            talk.print(f"read {path} again: {self._keys.num_keys} keys", markup=False, soft_wrap=True)


def _secret(path: str) -> bytes:
    from lakh.server.store import SHORTEST_SECRET

    todo = f"give a file with at least {SHORTEST_SECRET} bytes, e.g. of: openssl rand -hex 32"
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise UserError(f"--cache-key-file {path}", f"cannot be read ({type(error).__name__})", todo) from None
    if len(secret) < SHORTEST_SECRET:
        raise UserError(f"--cache-key-file {path}", f"has {len(secret)} bytes", todo)
    return secret


def _collector(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UserError(f"--otlp {url}", "is not an address", "write e.g. --otlp http://127.0.0.1:4318")
    return url


def _origin(text: str) -> str:
    parts = urlsplit(text)
    if text != "*" and (parts.scheme not in ("http", "https") or not parts.netloc or parts.path or parts.query):
        raise UserError(f"--cors {text}", "is not an origin", "write https://HOST, https://HOST:PORT or *")
    return text


def listen_address(option: str, address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname or LOOPBACK[0], parts.port
    except ValueError:
        port = None
    if port is None or parts.path or parts.username:
        raise UserError(f"{option} {address}", "is not of the form HOST:PORT", f"write e.g. {option} 127.0.0.1:8000")
    return host, port


def read_key(path: str) -> str:
    """The API key that a file holds."""
    try:
        key = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(path, f"cannot be read ({type(error).__name__})", "give a file with one key") from None
    if not key or any(character.isspace() for character in key):
        raise UserError(path, "does not contain exactly one key", "give a file with one key")
    return key
