"""Faults of processes from outside: real processes, sockets and files."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lakh.health.faults.files import flip_bit
from lakh.health.faults.processes import cut_links, descendants, kill_all, limit_file_size

pytestmark = pytest.mark.timeout(60)


@contextlib.contextmanager
def python(code: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_everything_below_a_process_is_killed() -> None:
    parent = "import subprocess, sys; p = subprocess.Popen(['sleep', '60'], start_new_session=True); p.wait()"
    with python(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {parent!r}])") as process:
        wait_for(lambda: len(descendants(process.pid)) == 2)
        below = descendants(process.pid)
        assert set(kill_all(process.pid)) == {process.pid, *below}
        wait_for(lambda: not any(is_alive(pid) for pid in below))


def test_a_cut_link_ends_the_connection_on_both_sides() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"import socket; s = socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))"
        with python(f"{connect}; print(s.recv(1))") as process:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(30)
                try:
                    assert cut_links(process.pid) == 1
                except PermissionError:
                    pytest.skip("this machine does not allow to take sockets of another process")
                assert connection.recv(1) == b""
                assert process.communicate()[0] == "b''\n"


def test_files_beyond_the_limit_cannot_be_written_until_it_ends(tmp_path: Path) -> None:
    code = """
for path in iter(input, ""):
    try:
        with open(path, "wb") as file:
            file.write(bytes(100_000))
        print("ok", flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""

    def write(process: subprocess.Popen[str]) -> str:
        assert process.stdin
        assert process.stdout
        process.stdin.write(f"{tmp_path / 'file'}\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    with python(code) as process:
        assert write(process) == "ok"
        with limit_file_size([process.pid, os.getpid() + 10**6], 50_000):  # the second does not exist
            assert write(process) == "27"  # EFBIG
        assert write(process) == "ok"


def test_one_bit_is_flipped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\x00\x01\x02")
    flip_bit(path, -1)
    flip_bit(path, 0)
    assert path.read_bytes() == b"\x01\x01\x03"
