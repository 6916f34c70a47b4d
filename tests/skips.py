"""A pytest plugin that counts skipped tests by reason and fails if the set-up should have prevented a skip.

`make test` loads it with `-p tests.skips`. A reason that names a Python package fails the run, because `make setup`
installs all of them. A reason that names a system package fails it with LAKH_REQUIRE_SYSTEM_PACKAGES=1, for machines
on which the set-up may install those too.
"""

from __future__ import annotations

import os
import re
from collections import Counter

import pytest

PYTHON_PACKAGE = re.compile(r"pip install (?!nvidia-)")
SYSTEM_PACKAGE = re.compile(
    r"native (core|engine library) is not built|"
    r"apt-get install (bubblewrap|chromium|default-jre-headless|g\+\+(-aarch64-linux-gnu)?|git|iproute2|"
    r"kubernetes-client|libsimde-dev|munge|neovim|prometheus|qemu-user|redis-server|slurm\S*)(?![\w-])"
)


def is_unexpected(reason: str, *, with_system: bool) -> bool:
    return bool(PYTHON_PACKAGE.search(reason) or (with_system and SYSTEM_PACKAGE.search(reason)))


def _reasons(config: pytest.Config) -> Counter[str]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    reasons = (report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr) for report in skipped)
    return Counter(reason.removeprefix("Skipped: ") for reason in reasons)


def _unexpected(reasons: Counter[str]) -> list[str]:
    return sorted(
        reason
        for reason in reasons
        if is_unexpected(reason, with_system=bool(os.environ.get("LAKH_REQUIRE_SYSTEM_PACKAGES")))
    )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput") and session.exitstatus == 0 and _unexpected(_reasons(session.config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reasons = _reasons(config)
    if not reasons:
        return
    terminalreporter.section(f"{reasons.total()} tests skipped")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:5d}  {reason}")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """After pytest's last line, which says that every test passed."""
    if hasattr(config, "workerinput") or not (reporter := config.pluginmanager.get_plugin("terminalreporter")):
        return
    for reason in _unexpected(_reasons(config)):
        reporter.line(f"error: the set-up should have prevented this skip: {reason}; run: make setup", red=True)
