"""The two kinds of program that a sandbox runs."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["NONCE", "CommandProgram", "Program"]

NONCE = "THE_NONCE_GOES_HERE"  # replaced by the nonce in the files of a CommandProgram


@dataclass(frozen=True, slots=True)
class Program:
    """Python code and its test, which run in two processes (sandboxed/examiner.py). It passes if both run to their end.

    The two are compiled separately: an open quote or a trailing backslash in model-written code cannot absorb the test.
    """

    source: str
    """Code under test."""
    test: str
    """Trusted code that calls the names under test."""
    reference: str = ""
    """Trusted code that runs before the test, in the same process: helpers and imports that the test uses."""
    names: tuple[str, ...] = ()
    """Names that the test takes from the code under test instead of the reference."""
    packages: tuple[str, ...] = ()
    """Installed packages that it needs; without them it does not run."""


@dataclass(frozen=True, slots=True)
class CommandProgram:
    """Files and commands of another language. It passes if all commands exit with 0 and the last prints the nonce, also
    with files of `parts`, and if they do not with files of `controls`.
    """

    files: dict[str, str]
    commands: tuple[tuple[str, ...], ...]
    environment: dict[str, str] = field(default_factory=dict)
    controls: tuple[dict[str, str], ...] = ()
    """The files with a changed test, which an honest program fails."""
    parts: tuple[dict[str, str], ...] = ()
    """The files with a part of the test, which an honest program passes."""
    failure: str = ""
    """Pattern of output that means a failure whatever the exit code."""
    packages: tuple[str, ...] = ()
    """Installed packages that it needs; without them it does not run."""
