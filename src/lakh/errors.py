"""Every error that lakh raises on purpose.

    LakhError ┬─ UserError   exit 2    the input is at fault: mend it and run again
              │    ├─ ConfigError       a setting is unknown, of the wrong type or out of range
              │    ├─ InfeasiblePlan    the run is well-formed and cannot work: heads not divisible by tp, ...
              │    ├─ MissingExtra      a dependency is not installed; carries the line that installs it
              │    └─ DiskFull          no space left where we write; nothing half-written was kept
              ├─ DataError   exit 65   bytes do not match what their manifest says
              │    ├─ CorruptShard      corpus and token shards
              │    └─ CorruptCheckpoint
              └─ PeerError   exit 75   try again: a scheduler may simply restart us
                   ├─ PeerLost          a rank or a server went away
                   ├─ PeerTimeout       a named wait ran out
                   └─ Interrupted       we were asked to stop and did so at a safe point

Anything else is a bug of ours: exit 1, with its traceback.

A message has three parts, always in this order: *where* it happened, *what was found*, *what to do*.
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
    """An error with a place, a finding and a remedy."""

    exit_code = 1
    cause: str = ""
    """A code for programs, if there is one: c3 sets a `lakh.c3.native.FailureCause`."""

    def __init__(self, where: str, found: str, todo: str) -> None:
        super().__init__(where, found, todo)  # all three, so that the error survives pickling
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
    """The error that another process of ours printed with `--json`, in its own words and of its own kind."""
    kind = globals().get(str(document.get("kind")), LakhError)
    if not (isinstance(kind, type) and issubclass(kind, LakhError)):
        kind = LakhError
    error = kind.__new__(kind)  # some kinds take other arguments; all of them have these three parts
    LakhError.__init__(error, *(str(document.get(part) or "unknown") for part in ("where", "found", "todo")))
    return error


class UserError(LakhError):
    exit_code = 2


class ConfigError(UserError):
    pass


class InfeasiblePlan(UserError):
    pass


class MissingExtra(UserError):
    """A command needs a package that a lighter install leaves out."""

    def __init__(self, where: str, package: str, extra: str) -> None:
        super().__init__(where, f"needs the package {package}", f"install it with: pip install 'lakh[{extra}]'")
        self.args = (where, package, extra)  # what pickling hands back to __init__


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
