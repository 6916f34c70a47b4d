"""Processes that are forks of a server: their output, environment and exit codes, signals, and the server's death."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lakh.errors import PeerLost
from lakh.trainer.launch.fork_server import ForkedProcess, ForkServer, PythonCommand

pytestmark = pytest.mark.timeout(60)
WAIT_S = 30.0

PROGRAM = """
import os, sys, time
print("preloaded" in sys.modules, os.environ.get("GREETING"), sys.argv[1:], os.getpid() == os.getsid(0), flush=True)
if sys.argv[1] == "sleep":
    time.sleep(60)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "preloaded.py").write_text("")
    monkeypatch.chdir(tmp_path)  # the first entry of the server's module path
    started = ForkServer.start(["preloaded", "no_such_module"], tmp_path / "server.log")
    wait_for(lambda: started.is_alive() and started.is_ready)
    yield started
    started.close()


def wait_for(condition) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def fork(server: ForkServer, argument: str) -> tuple[ForkedProcess, Path]:
    output = Path(f"{argument}.out").absolute()
    environment = {**os.environ, "GREETING": f"hello {argument}"}
    return server.fork(PythonCommand("program", [argument], environment, output, output.with_suffix(".err"))), output


def test_a_fork_runs_a_module_with_its_own_environment_output_and_exit_code(server: ForkServer) -> None:
    started = [(argument, *fork(server, argument)) for argument in ("0", "3")]
    for argument, process, output in started:
        assert process.wait(WAIT_S) == int(argument), output.with_suffix(".err").read_text()
        assert output.read_text() == f"True hello {argument} ['{argument}'] True\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_reaches_a_fork_and_is_its_exit_code(server: ForkServer, number: signal.Signals) -> None:
    process, output = fork(server, "sleep")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.0)
    wait_for(lambda: output.exists() and output.read_text())
    process.send_signal(number)
    assert process.wait(WAIT_S) == -number
    process.kill()  # no-op for one that has ended


def test_a_stop_signal_right_after_the_fork_is_not_lost(server: ForkServer) -> None:
    for _ in range(5):
        process, _ = fork(server, "sleep")
        process.terminate()
        assert process.wait(WAIT_S) == -signal.SIGTERM


def test_forks_of_a_server_that_dies_count_as_killed(server: ForkServer) -> None:
    process, _ = fork(server, "sleep")
    os.kill(server.pid, signal.SIGTERM)  # ignored: the launcher decides when work ends
    assert process.poll() is None
    os.kill(server.pid, signal.SIGKILL)
    assert process.wait(WAIT_S) == -signal.SIGKILL
    assert not server.is_alive()
    os.kill(process.pid, signal.SIGKILL)  # `run_rank` asks for this signal; a plain program does not
    with pytest.raises(PeerLost):
        fork(server, "0")
