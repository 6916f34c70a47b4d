"""Checks listen addresses, before a model is loaded for minutes, and explains why one cannot be used."""

from __future__ import annotations

import errno
import socket
from typing import Any

from lakh.errors import UserError

__all__ = ["cannot_listen", "check_free"]


def check_free(option: str, host: str, port: int) -> None:
    """Raise a UserError if nothing can listen there now. Port 0 is always free."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise cannot_listen(option, host, port, error) from None
    errors = [one for family, *_, address in found if (one := _bind(family, address)) is not None]
    taken = [one for one in errors if one.errno in (errno.EADDRINUSE, errno.EACCES, errno.EPERM)]
    if taken or len(errors) == len(found):  # a machine may lack one of the two address families
        raise cannot_listen(option, host, port, [*taken, *errors][0])


def _bind(family: int, address: Any) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do: a closed socket may linger
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(address)
    except OSError as error:
        return error
    return None


def cannot_listen(option: str, host: str, port: int, error: Exception) -> UserError:
    """`option`: the command-line option of the address."""
    where, number = f"{host}:{port}", getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return UserError(where, "the port is in use", f"choose another, or 0 for any free one: {option} HOST:PORT")
    if number in (errno.EACCES, errno.EPERM):
        return UserError(where, "this port needs more privileges", f"choose one from 1024 up: {option} HOST:PORT")
    if isinstance(error, socket.gaierror | UnicodeError) or number == errno.EADDRNOTAVAIL:
        return UserError(where, "is not an address of this machine", f"use 127.0.0.1 or 0.0.0.0: {option} HOST:PORT")
    reason = getattr(error, "strerror", None) or error
    return UserError(where, f"cannot be listened on ({reason})", f"choose another: {option} HOST:PORT")
