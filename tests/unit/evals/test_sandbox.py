"""Hostile programs: none passes, none gets out, none outlives its run."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import lakh
from lakh.errors import ConfigError, Interrupted, UserError
from lakh.evals import bubblewrap, seccomp
from lakh.evals.sandbox import Limits, Sandbox
from lakh.evals.task import Program

LIMITS = Limits(cpu_s=1, wall_s=20, memory_MiB=256)
TEST = "assert answer() == 42"
RIGHT = "def answer():\n    return 42\n"

HOSTILE = {
    "wrong answer": ("def answer(): return 41", {"failed"}),
    "syntax error": ("def answer(:", {"failed"}),
    "open quote": (RIGHT + "'''", {"failed"}),
    "trailing backslash": (RIGHT + "x = 1 \\", {"failed"}),
    "os._exit(0)": ("import os; os._exit(0)", {"failed"}),
    "sys.exit(0)": ("import sys; sys.exit(0)", {"failed"}),
    "exit inside the test": ("def answer(): raise SystemExit(0)", {"failed"}),
    "prints passed": ("print('passed\\n' * 9); print('ALL TESTS PASSED'); import os; os._exit(0)", {"failed"}),
    "says passed everywhere": (
        "import os\n"
        "for fd in range(1000):\n"
        "    try: os.write(fd, b'passed 0123456789abcdef\\n')\n"
        "    except OSError: pass\n"
        "os._exit(0)",
        {"failed", "output"},
    ),
    "kills its parent": (
        "import os, signal\n"
        "for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP):\n"
        "    os.kill(os.getppid(), number)\n"
        "answer = lambda: 41",
        {"failed"},
    ),
    "kills everything": ("import os, signal; os.kill(-1, signal.SIGKILL); answer = lambda: 41", {"failed"}),
    "kills itself": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", {"failed"}),
    "segfault": ("import ctypes; ctypes.string_at(0)", {"failed"}),
    "fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", {"timeout", "failed"}),
    "daemon": (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0: time.sleep(600)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "answer = lambda: 41",
        {"failed"},
    ),
    "10 GiB": ("x = bytearray(10 << 30)", {"memory"}),
    "list without end": ("x = []\nwhile True: x.append(bytearray(1 << 20))", {"memory"}),
    "endless output": ("while True: print('x' * 1000)", {"output"}),
    "endless errors": ("import os\nwhile True: os.write(2, b'x' * 60000)", {"output"}),
    "spin": ("while True: pass", {"timeout"}),
    "spin, deaf to SIGXCPU": (
        "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        {"timeout"},
    ),
    "unspeakable error": (
        "class Evil(Exception):\n    def __str__(self): raise SystemExit(0)\nraise Evil",
        {"failed"},
    ),
    "surrogate": ("x = '\ud800'", {"failed"}),
    "null byte": ("x = '\0'", {"failed"}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_fails_in_its_own_class_and_leaves_nothing_alive(
    sandbox: Sandbox, alive: Callable[[], list[int]], name: str
) -> None:
    source, kinds = HOSTILE[name]
    # A bomb's processes share the cores, so none of them uses up its CPU seconds soon.
    limits = Limits(cpu_s=1, wall_s=1) if name == "fork bomb" else LIMITS
    verdict = sandbox.run(Program(source, TEST), limits)
    assert verdict.kind in kinds, verdict
    assert alive() == []


def test_a_sleeping_program_ends_at_the_wall_limit(sandbox: Sandbox, alive: Callable[[], list[int]]) -> None:
    verdict = sandbox.run(Program("import time; time.sleep(600)", TEST), Limits(cpu_s=1, wall_s=0.5))
    assert (verdict.kind, verdict.detail) == ("timeout", "wall limit of 0.5 s")
    assert verdict.cpu_s < 0.5
    assert alive() == []


def test_a_spinning_program_ends_by_its_cpu_time(sandbox: Sandbox) -> None:
    verdict = sandbox.run(Program("while True: pass", TEST), LIMITS)
    assert verdict.detail == "CPU limit of 1 s"
    assert 0.5 < verdict.cpu_s < 2.5  # the kernel keeps the limit in ticks, which a shared machine stretches


def test_a_right_program_passes_and_may_print_and_use_tmp(sandbox: Sandbox) -> None:
    source = RIGHT + "print('hello')\nopen('/tmp/x', 'w').write('y')\nimport math, typing, hashlib, collections, json\n"
    assert sandbox.run(Program(source, TEST), LIMITS).kind == "passed"


def test_a_large_test_arrives_whole(sandbox: Sandbox) -> None:
    test = f"text = {'x' * 300_000!r}\nassert len(text) == 300_000\n{TEST}"
    assert sandbox.run(Program(RIGHT, test), LIMITS).kind == "passed"
    assert sandbox.run(Program(RIGHT, test + "\nassert False"), LIMITS).kind == "failed"


def test_the_order_of_sets_does_not_change_between_runs(sandbox: Sandbox) -> None:
    source = "raise ValueError(''.join({'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'}))"
    assert len({sandbox.run(Program(source, TEST), LIMITS).detail for _ in range(4)}) == 1


def test_the_candidate_does_not_see_its_test_before_it_has_run(sandbox: Sandbox) -> None:
    source = (
        "import sys\nframe, seen = sys._getframe(), []\n"
        "while frame:\n    seen.append(repr(frame.f_locals)); frame = frame.f_back\n"
        "answer = lambda: 42 if 'for' 'ty' in ''.join(seen) else 41\n"
    )
    assert sandbox.run(Program(source, f"{TEST}  # forty-two"), LIMITS).kind == "failed"


# --- walls -------------------------------------------------------------------------------------------------------


def test_a_file_of_the_host_is_not_there(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("42")
    for path in (secret, Path("/etc/passwd"), Path(lakh.__file__), Path.home() / ".profile"):
        verdict = sandbox.run(Program(f"open({str(path)!r}).read()\n{RIGHT}", TEST), LIMITS)
        assert verdict.kind == "failed"
        assert verdict.detail.startswith("FileNotFoundError"), path


def test_nothing_outside_tmp_can_be_written(sandbox: Sandbox, tmp_path: Path) -> None:
    library = Path(os.__file__).parent / "lakh_was_here"
    for path in ("/x", "/usr/x", "/etc/x", "/dev/x", "/dev/shm/x", str(tmp_path / "x"), str(library)):
        verdict = sandbox.run(Program(f"open({path!r}, 'w')\n{RIGHT}", TEST), LIMITS)
        assert verdict.kind == "failed", path
        assert "Error" in verdict.detail
        assert not Path(path).exists()


def test_tmp_is_private_and_small(sandbox: Sandbox) -> None:
    fill = "for i in range(99):\n    with open(f'/tmp/{i}', 'wb') as file: file.write(bytes(1 << 20))\n"
    verdict = sandbox.run(Program(fill, TEST), Limits(cpu_s=5, tmp_MiB=8))
    assert "No space left" in verdict.detail
    empty = "import os\nassert os.listdir('/tmp') == []\n"
    assert sandbox.run(Program(empty + RIGHT, TEST), LIMITS).kind == "passed"


def test_one_file_has_a_largest_size(sandbox: Sandbox) -> None:
    write = "open('/tmp/x', 'wb').write(bytes(8 << 20))"
    assert "too large" in sandbox.run(Program(write, TEST), Limits(file_MiB=1)).detail


@pytest.mark.parametrize("filtered", [True, False], ids=["with seccomp", "by namespace alone"])
def test_a_server_on_loopback_is_out_of_reach(sandbox: Sandbox, filtered: bool) -> None:
    walls = Sandbox(bubblewrap.find())
    if not filtered:
        walls._seccomp = None
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        source = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)\n{RIGHT}"
        verdict = walls.run(Program(source, TEST), LIMITS)
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()
    assert verdict.kind == "failed"
    assert ("PermissionError" if filtered else "ConnectionRefusedError") in verdict.detail


def test_the_environment_and_descriptors_are_clean(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "42")
    source = "import os\nassert 'SECRET_KEY' not in os.environ\nassert os.read(0, 1) == b''\n"
    assert sandbox.run(Program(source + RIGHT, TEST), LIMITS).kind == "passed"


def test_user_namespaces_cannot_be_nested(sandbox: Sandbox) -> None:
    if seccomp.filter_bytes() is None:
        pytest.skip("no seccomp filter for this kind of machine")
    source = "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == -1\n"
    assert sandbox.run(Program(source + RIGHT, TEST), LIMITS).kind == "passed"


def test_threads_work_up_to_the_limit_on_processes(sandbox: Sandbox) -> None:
    source = (
        "import threading\nthreads = [threading.Thread(target=print) for _ in range(4)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
    )
    assert sandbox.run(Program(source + RIGHT, TEST), LIMITS).kind == "passed"
    many = "import os, time\nfor _ in range(40):\n    if os.fork() == 0:\n        time.sleep(600)\n"
    verdict = sandbox.run(Program(many + RIGHT, TEST), Limits(processes=8))
    assert "Resource temporarily unavailable" in verdict.detail


# --- choosing ----------------------------------------------------------------------------------------------------


def test_without_bubblewrap_we_refuse_and_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "find", lambda: None)
    with pytest.raises(UserError, match=r"bubblewrap is not installed.*apt-get install.*--unsafe"):
        Sandbox.choose()


def test_where_bubblewrap_cannot_start_we_refuse_with_its_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(bubblewrap, "find", lambda: str(broken))
    with pytest.raises(UserError, match=r"cannot start here \(bwrap: setting up uid map: Permission denied\)"):
        Sandbox.choose()


HOLES = {
    "a folder of the host": (["--ro-bind", "/proc", "/proc"], "folders of the host are visible"),
    "the host's tmp": (["--bind", "/tmp", "/tmp"], "/tmp is not private"),
    "the host's users": (["--ro-bind", "/etc", "/etc"], "the host's users are visible"),
    "a writable folder": (["--perms", "1777", "--tmpfs", "/usr"], "can write to /usr/probe|cannot start"),
}


@pytest.mark.parametrize("hole", HOLES)
def test_the_self_test_finds_a_hole(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hole: str
) -> None:
    extra, finding = HOLES[hole]
    (tmp_path / "x").touch()  # so that the host's /tmp is not empty
    whole = bubblewrap.command

    def with_hole(bwrap: str, *, tmp_bytes: int, seccomp_fd: int | None) -> list[str]:
        words = whole(bwrap, tmp_bytes=tmp_bytes, seccomp_fd=seccomp_fd)
        at = words.index("--remount-ro")
        return [*words[:at], *extra, *words[at:]]

    monkeypatch.setattr(bubblewrap, "command", with_hole)
    with pytest.raises(UserError, match=finding):
        Sandbox.choose()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can stay root")
def test_the_self_test_finds_that_root_was_not_dropped(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "next_uid", lambda: 0)
    with pytest.raises(UserError, match="runs as root"):
        Sandbox.choose()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else; the other tests run as a user then")
def test_an_ordinary_user_has_the_same_walls(sandbox: Sandbox) -> None:
    system = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    source_folder = str(Path(lakh.__file__).parents[1])
    if system is None:
        pytest.skip("no python3 outside root's home")
    script = (
        "from lakh.evals.sandbox import Limits, Sandbox\n"
        "from lakh.evals.task import Program\n"
        "sandbox = Sandbox.choose()\n"
        "bomb = 'import os\\nwhile True:\\n    try: os.fork()\\n    except OSError: pass'\n"
        "for source in ('', bomb, 'import socket; socket.socket()', 'x = bytearray(10 << 30)'):\n"
        "    print(sandbox.run(Program(source, ''), Limits(cpu_s=1, wall_s=2)).kind)\n"
        "print(sandbox.description)\n"
    )
    done = subprocess.run(
        [system, "-B", "-c", script],
        env={"PYTHONPATH": source_folder, "PATH": os.environ["PATH"]},
        cwd="/",
        user=54321,
        group=54321,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if "SyntaxError" in done.stderr or "ModuleNotFoundError" in done.stderr:
        pytest.skip(f"the system's Python cannot run lakh: {done.stderr.strip().splitlines()[-1]}")
    assert done.stdout.split("\n")[:4] == ["passed", "timeout", "failed", "memory"], done.stderr
    assert "(user namespace)" in done.stdout


# --- stopping and unsafe runs ------------------------------------------------------------------------------------


def test_stop_ends_what_is_running(sandbox: Sandbox, alive: Callable[[], list[int]]) -> None:
    walls = Sandbox(bubblewrap.find())
    threading.Timer(0.5, walls.stop).start()
    with pytest.raises(Interrupted):
        walls.run(Program("import time; time.sleep(600)", TEST), Limits(wall_s=600))
    assert alive() == []


def test_unsafe_says_so_and_still_limits_and_judges() -> None:
    walls = Sandbox.choose(unsafe=True)
    assert "--unsafe" in walls.description
    assert walls.run(Program(RIGHT, TEST), LIMITS).kind == "passed"
    for name in ("wrong answer", "os._exit(0)", "prints passed", "endless output", "10 GiB", "spin"):
        source, kinds = HOSTILE[name]
        assert walls.run(Program(source, TEST), LIMITS).kind in kinds, name


def test_a_harness_that_dies_is_an_error_of_the_sandbox_and_not_a_pass() -> None:
    walls = Sandbox.choose(unsafe=True)
    source = "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"
    assert walls.run(Program(source, ""), LIMITS).kind == "sandbox_error"


def test_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match="cpu_s"):
        Limits(cpu_s=0)
    with pytest.raises(ConfigError, match="wall_s"):
        Limits(wall_s=0)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_seccomp_filter_jumps_only_forward_and_within_itself(machine: str) -> None:
    import struct

    code = seccomp.filter_bytes(machine)
    assert code is not None
    steps = list(struct.iter_unpack("<HBBI", code))
    for at, (operation, yes, no, _) in enumerate(steps):
        if operation != seccomp.RETURN:
            assert at + 1 + max(yes, no) < len(steps)
    assert steps[-1][0] == seccomp.RETURN
    assert seccomp.filter_bytes("riscv64") is None


def test_the_interpreter_inside_is_the_one_below_the_virtual_environment() -> None:
    path = Path(bubblewrap.interpreter())
    assert path.is_relative_to(Path(sys.base_prefix).resolve()) or path.is_relative_to("/usr")
