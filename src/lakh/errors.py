"""Every error that lakh raises on purpose.

    LakhError ┬─ UserError   exit 2    the input is at fault: fix it and run again
              │    ├─ ConfigError       a setting is unknown, of the wrong type or out of range
              │    ├─ InfeasiblePlan    a valid run that cannot work: heads not divisible by tp, ...
              │    ├─ MissingExtra      a dependency is not installed; names the command that installs it
              │    └─ DiskFull          no space left on the disk; partly written files were removed
              ├─ DataError   exit 65   bytes do not match their manifest
              │    ├─ CorruptShard      corpus and token shards
              │    └─ CorruptCheckpoint
              └─ PeerError   exit 75   temporary: run again, or let the scheduler restart the job
                   ├─ PeerLost          a rank or a server died
                   ├─ PeerTimeout       a wait exceeded its timeout
                   └─ Interrupted       stopped on request at a safe point

Every other exception is a bug in lakh: exit 1, with a traceback.

A message has three parts: *where* it happened, *what was found*, *what to do*.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "ConfigError",
    "CorruptCheckpoint",
    "CorruptShard",
    "DataError",
    "DiskFull",
    "InfeasiblePlan",
    "Interrupted",
    "LakhError",
    "MissingExtra",
    "PeerError",
    "PeerLost",
    "PeerTimeout",
    "UserError",
    "from_dict",
]


class LakhError(Exception):
    """An error that states where it happened, what was found and what to do."""

    exit_code = 1
    cause: str = ""
    """A code for programs, if there is one: c3 sets a `lakh.c3.native.FailureCause`."""

    def __init__(self, where: str, found: str, todo: str) -> None:
        super().__init__(where, found, todo)  # for pickling
        self.where = where
        self.found = found
        self.todo = todo

    def __str__(self) -> str:
        return f"{self.where}: {self.found}; {self.todo}"

    def as_dict(self) -> dict[str, str | int]:
        """The form that `--json` prints."""
        return {
            "kind": type(self).__name__,
            "where": self.where,
            "found": self.found,
            "todo": self.todo,
            "exit_code": self.exit_code,
        }


def from_dict(document: Mapping[str, Any]) -> LakhError:
    """The error that another lakh process printed with `--json`, of the same class and with the same message."""
    kind = globals().get(str(document.get("kind")), LakhError)
    if not (isinstance(kind, type) and issubclass(kind, LakhError)):
        kind = LakhError
    error = kind.__new__(kind)  # some classes take other arguments
    LakhError.__init__(error, *(str(document.get(part) or "unknown") for part in ("where", "found", "todo")))
    return error


class UserError(LakhError):
    exit_code = 2


class ConfigError(UserError):
    pass


class InfeasiblePlan(UserError):
    pass


class MissingExtra(UserError):
    """A command needs an optional package."""

    def __init__(self, where: str, package: str, extra: str) -> None:
        super().__init__(where, f"needs the package {package}", f"install it with: pip install 'lakh[{extra}]'")
        self.args = (where, package, extra)  # for pickling


class DiskFull(UserError):
    pass


class DataError(LakhError):
    exit_code = 65


class CorruptShard(DataError):
    pass


class CorruptCheckpoint(DataError):
    pass


class PeerError(LakhError):
    exit_code = 75


class PeerLost(PeerError):
    pass


class PeerTimeout(PeerError):
    pass


class Interrupted(PeerError):
    pass
