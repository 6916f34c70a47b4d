"""TLS for HTTP and gRPC: a certificate, its key, and optionally the CA of client certificates (mutual TLS).

Files are read once at start; renewed certificates need a (rolling) restart.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lakh.errors import UserError

__all__ = ["Tls", "tls_of"]


@dataclass(frozen=True)
class Tls:
    certificate: Path
    """PEM, with the whole chain."""
    key: Path
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as error:
            names = ", ".join(str(path) for path in (self.certificate, self.key, self.client_ca) if path)
            todo = "give PEM files: --tls-cert CHAIN --tls-key KEY"
            raise UserError(f"TLS ({names})", f"cannot be used ({error})", todo) from None
        return context

    def grpc_credentials(self) -> Any:
        import grpc

        self.context()  # raises a clear error; gRPC does not
        root = None if self.client_ca is None else self.client_ca.read_bytes()
        pair = (self.key.read_bytes(), self.certificate.read_bytes())
        return grpc.ssl_server_credentials([pair], root, require_client_auth=root is not None)


def tls_of(certificate: str | None, key: str | None, client_ca: str | None = None) -> Tls | None:
    """From command-line options: certificate and key together, or neither."""
    if certificate is None and key is None and client_ca is None:
        return None
    if certificate is None or key is None:
        raise UserError("--tls-cert, --tls-key", "need each other", "give both")
    tls = Tls(Path(certificate), Path(key), None if client_ca is None else Path(client_ca))
    tls.context()
    return tls
