"""TLS for both faces: a certificate, its key, and, where clients must show one too, whose certificates are taken.

Read once, when the server starts; a file that is missing or no certificate is a UserError. Renewed certificates need a
restart (a rolling one loses nothing: see drain).
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
    """PEM, the whole chain."""
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

        self.context()  # gRPC does not say what is wrong with a file; this does
        root = None if self.client_ca is None else self.client_ca.read_bytes()
        pair = (self.key.read_bytes(), self.certificate.read_bytes())
        return grpc.ssl_server_credentials([pair], root, require_client_auth=root is not None)


def tls_of(certificate: str | None, key: str | None, client_ca: str | None = None) -> Tls | None:
    """From a command's options: all or nothing."""
    if certificate is None and key is None and client_ca is None:
        return None
    if certificate is None or key is None:
        raise UserError("--tls-cert, --tls-key", "one goes with the other", "give both")
    tls = Tls(Path(certificate), Path(key), None if client_ca is None else Path(client_ca))
    tls.context()
    return tls
