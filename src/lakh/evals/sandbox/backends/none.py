"""No isolation, for --unsafe: the program runs with the rights of the user who runs lakh, under rlimits only."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator

from lakh.evals.sandbox.isolation import SandboxLaunch, python_command, setup_message
from lakh.evals.sandbox.packages import SandboxPackages
from lakh.evals.sandbox.verdict import SandboxLimits

__all__ = ["NoIsolation"]


class NoIsolation:
    description = "none (--unsafe: rlimits only)"
    no_commands = None

    def __init__(self, packages: SandboxPackages | None = None) -> None:
        self._packages = packages

    @contextlib.contextmanager
    def launch(self, limits: SandboxLimits) -> Iterator[SandboxLaunch]:
        folder = tempfile.mkdtemp(prefix="lakh-eval-")
        package_folders = [self._packages.linked()] if self._packages else []
        try:
            setup = setup_message(
                uids=(0, 0), tmp=folder, pid_namespace=False, packages=self._packages, package_folders=package_folders
            )
            yield SandboxLaunch(python_command(), setup, folder=folder, removes=(folder, *package_folders))
        except BaseException:
            for made in (folder, *package_folders):
                shutil.rmtree(made, ignore_errors=True)
            raise

    def probe(self) -> str:
        return "def check():\n    assert True\n"
