"""Ctrl-C and SIGTERM: quiet while modules are imported and while the process ends, an error line in between."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lakh.cli.interrupts import end_on_interrupt, raise_on_interrupt

INTERRUPT = "import os, signal; os.kill(os.getpid(), signal.SIGINT)\n"


def run(folder: Path, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """`lakh ARGUMENTS` with modules of `folder` before all others."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "lakh", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, **options)


def test_an_interrupted_import_ends_quietly(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text(INTERRUPT)
    done = run(tmp_path, "config", "check", "laptop")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_the_import_of_a_command_ends_quietly(tmp_path: Path) -> None:
    (tmp_path / "tomllib.py").write_text(INTERRUPT)  # lakh train imports it, lakh --help does not
    done = run(tmp_path, "train", "laptop")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
    assert run(tmp_path, "--help").returncode == 0


def test_an_interrupt_when_the_process_ends_prints_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os, signal; atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))"
    )
    done = run(tmp_path, "config", "check", "laptop")
    assert done.returncode == -signal.SIGINT
    assert "laptop" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_shell_sees_130(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text(INTERRUPT)
    shell = ["sh", "-c", f"{sys.executable} -m lakh; echo $?"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(shell, capture_output=True, text=True, timeout=60, env=environment)
    assert (done.stdout, done.stderr) == ("130\n", "")


def test_a_process_in_the_background_ignores_interrupts(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text(f"{INTERRUPT}raise SystemExit(7)")
    ignore = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)  # noqa: E731 - as a shell does for `lakh ... &`
    assert run(tmp_path, "config", preexec_fn=ignore).returncode == 7


RECIPE = """
import os, signal, time
from lakh import storage

def f():
    with storage.create({target!r}) as file:
        file.write(b"half of it")
        os.kill(os.getpid(), signal.{number})
        time.sleep(60)
"""


@pytest.mark.parametrize(("number", "words"), [("SIGINT", "interrupted"), ("SIGTERM", "stopped by SIGTERM")])
def test_a_command_that_is_stopped_removes_what_is_incomplete(number: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "recipe.py").write_text(RECIPE.format(target=str(tmp_path / "out" / "file"), number=number))
    done = run(tmp_path, "config", "check", str(tmp_path / "recipe.py"), "--json")
    assert done.returncode == 75, done.stderr
    assert f"error: lakh config: {words}; run the same command again" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_handlers_of_applications_stay() -> None:
    def own(number, frame) -> None: ...

    before = signal.signal(signal.SIGINT, own)
    try:
        with raise_on_interrupt(), end_on_interrupt():
            assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)
    with end_on_interrupt():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        with raise_on_interrupt():
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_other_threads_change_no_handler() -> None:
    found = []

    def look() -> None:
        with end_on_interrupt():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(10)
    assert found == [signal.default_int_handler]
