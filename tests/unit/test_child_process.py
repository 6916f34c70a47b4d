"""Child processes: messages both ways, errors of the child, and its end with its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from lakh.child_process import AsyncChannel, Channel, ChannelClosed, ChildCrashed, ChildProcess, exit_reason
from lakh.errors import PeerLost

pytestmark = pytest.mark.timeout(60)

CHILD = """
import os, sys, time
from lakh.errors import PeerLost

def echo(channel, *first):
    for message in first:
        channel.send(message)
    while True:
        channel.send(channel.receive())

def fail(channel):
    raise PeerLost("storage", "no answer", "try again")

def crash(channel):
    raise ZeroDivisionError("a bug")

def missing(channel):
    import no_such_module

def leave(channel):
    print("this text goes to stderr")
    os._exit(3)

def hang(channel):
    time.sleep(1000)
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "child_functions.py").write_text(CHILD)
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])}


def test_messages_arrive_in_order_in_both_directions(env: dict[str, str]) -> None:
    child = ChildProcess.start("child_functions:echo", "first", {"second": 2}, env=env)
    large = b"x" * 3_000_000
    assert [child.channel.receive(30), child.channel.receive(30)] == ["first", {"second": 2}]
    child.channel.send(large)
    assert child.channel.receive(30) == large
    assert not child.channel.poll()
    child.stop(10)
    assert child.exit_code == 0


def test_signals_of_the_terminal_do_not_end_a_child_that_just_started(env: dict[str, str]) -> None:
    child = ChildProcess.start("child_functions:echo", env=env)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(child.pid, number)
    child.channel.send("still here")
    assert child.channel.receive(30) == "still here"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()  # of the parent
    child.stop(10)


def test_an_interrupt_while_a_child_starts_ends_it(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    popen = subprocess.Popen

    def interrupt(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = popen(*arguments, **options)
        started.append(process.pid)
        os.kill(os.getpid(), signal.SIGINT)
        return process

    monkeypatch.setattr(subprocess, "Popen", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ChildProcess.start("child_functions:hang", env=env)
    until_s = time.monotonic() + 30  # at once, or when it sees that the channel is closed
    while is_running(started[0]):
        assert time.monotonic() < until_s
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_error_of_the_child_is_raised_in_the_parent(env: dict[str, str]) -> None:
    child = ChildProcess.start("child_functions:fail", env=env)
    with pytest.raises(PeerLost, match="storage: no answer"):
        child.channel.receive(30)
    assert child.exit_reason() == "exit code 75"


def test_a_crash_has_the_traceback_of_the_child(env: dict[str, str]) -> None:
    child = ChildProcess.start("child_functions:crash", env=env)
    with pytest.raises(ChildCrashed, match="ZeroDivisionError: a bug"):
        child.channel.receive(30)
    assert child.exit_reason() == "exit code 1"


def test_a_missing_package_of_the_child_is_named(env: dict[str, str]) -> None:
    child = ChildProcess.start("child_functions:missing", env=env)
    with pytest.raises(ModuleNotFoundError) as caught:
        child.channel.receive(30)
    assert caught.value.name == "no_such_module"
    child.kill()


def test_a_child_that_ends_closes_the_channel(env: dict[str, str]) -> None:
    child = ChildProcess.start("child_functions:leave", env=env)
    with pytest.raises(ChannelClosed):
        child.channel.receive(30)
    assert child.exit_reason() == "exit code 3"
    with pytest.raises(ChannelClosed):
        child.channel.send("anything")


def test_a_killed_child_reports_the_signal(env: dict[str, str]) -> None:
    child = ChildProcess.start("child_functions:hang", env=env)
    with pytest.raises(TimeoutError):
        child.channel.receive(0.01)
    os.kill(child.pid, signal.SIGKILL)
    assert child.exit_reason() == "killed by SIGKILL"
    assert exit_reason(None) == "still running"


@pytest.mark.slow
def test_a_stopped_child_is_silent_and_a_busy_one_is_not(env: dict[str, str]) -> None:
    child = ChildProcess.start("child_functions:echo", "ready", env=env, heartbeat_s=0.05)
    assert child.channel.receive(30) == "ready"
    for _ in range(20):
        time.sleep(0.05)
    assert child.channel.silence_s() < 0.9
    assert not child.channel.poll(), "a heartbeat is not a message"
    os.kill(child.pid, signal.SIGSTOP)
    time.sleep(0.5)
    child.channel.silence_s()
    time.sleep(0.5)
    assert child.channel.silence_s() >= 0.5
    child.kill()


def test_a_child_ends_with_its_parent(env: dict[str, str], tmp_path: Path) -> None:
    parent = """
        import sys, time
        from lakh.child_process import ChildProcess
        child = ChildProcess.start("child_functions:echo", "ready")
        assert child.channel.receive(30) == "ready"
        print(child.pid, flush=True)
        time.sleep(1000)
    """
    command = [sys.executable, "-c", textwrap.dedent(parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **env}) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    for _ in range(300):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return  # ended; only its new parent has not looked yet
        time.sleep(0.1)
    pytest.fail(f"child {pid} outlived its parent")


def test_json_is_never_unpickled_and_its_size_is_bounded() -> None:
    ours, theirs = Channel.pair("json")
    theirs.send({"verdict": "passed"})
    assert ours.receive(1) == {"verdict": "passed"}
    os.write(theirs.fileno(), (1 << 40).to_bytes(8, "little"))
    with pytest.raises(ChannelClosed, match="exceeds"):
        ours.receive(1)
    ours.close()
    theirs.close()


def test_an_async_channel_takes_over_buffered_messages(env: dict[str, str]) -> None:
    child = ChildProcess.start("child_functions:echo", 1, 2, 3, env=env)
    assert child.channel.receive(30) == 1
    assert child.channel.poll(30)

    async def talk() -> list[object]:
        channel = await AsyncChannel.open(child.channel)
        got = [await channel.receive(), await channel.receive()]
        channel.send("four")
        got.append(await channel.receive())
        child.process.kill()
        with pytest.raises(ChannelClosed):
            await channel.receive()
        channel.close()
        return got

    assert asyncio.run(asyncio.wait_for(talk(), 30)) == [2, 3, "four"]
    assert child.exit_reason() == "killed by SIGKILL"
