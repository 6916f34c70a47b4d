"""Hostile programs do not pass, do not leave the sandbox and do not outlive their run."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lakh
from lakh.errors import ConfigError, Interrupted, UserError
from lakh.evals import sandboxed
from lakh.evals.sandbox import Program, Sandbox, SandboxLimits, isolation, seccomp
from lakh.evals.sandbox.backends import bubblewrap, landlock
from lakh.evals.sandbox.backends.none import NoIsolation

LIMITS = SandboxLimits(cpu_s=1, wall_s=20, memory_MiB=256)
TEST = "assert answer() == 42"
RIGHT = "def answer():\n    return 42\n"


def program(source: str, test: str = TEST) -> Program:
    return Program(source, test, names=("answer",))


# Looks for the test's text in all memory around its objects: first for some letters, then for those that follow, so
# that it does not find its own question.
HUNT = (
    "import ctypes, gc\n"
    "def answer():\n"
    "    for page in {id(thing) & ~0xffff for thing in gc.get_objects()}:\n"
    "        memory, at = ctypes.string_at(page, 1 << 16), 0\n"
    "        while (at := memory.find(b'assert ans', at) + 1) > 0:\n"
    "            if memory[at + 9 : at + 14] == b'wer()': return 42\n"
    "    return 41\n"
)

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
    "equals everything": (
        "class Any:\n    __eq__ = lambda self, other: True\n    __hash__ = object.__hash__\nanswer = Any",
        {"failed"},
    ),
    "a list that equals everything": (
        "class Any(list):\n    __eq__ = lambda self, other: True\n    __ne__ = lambda self, other: False\nanswer = Any",
        {"failed"},
    ),
    "an int that equals everything": (
        "class Any(int):\n    __eq__ = lambda self, other: True\n    __hash__ = int.__hash__\nanswer = Any",
        {"failed"},
    ),
    "breaks assert and the builtins": (
        "import builtins, sys\nbuiltins.AssertionError = None\nbuiltins.exec = lambda *a: None\n"
        "sys.settrace(lambda *a: None)\nanswer = lambda: 41",
        {"failed"},
    ),
    "reads the caller's frames": (
        "import sys\n"
        "def answer():\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        for thing in [*frame.f_locals.values(), *frame.f_globals.values()]:\n"
        "            if ' '.join(['assert', 'answer()']) in str(thing): return 42\n"
        "        frame = frame.f_back\n"
        "    return 41",
        {"failed"},
    ),
    "searches all objects": (
        "import gc\n"
        "def answer():\n"
        "    texts = [o for o in gc.get_objects() if isinstance(o, (dict, list, tuple))]\n"
        "    return 42 if any(' '.join(['assert', 'answer()']) in str(o)[:100000] for o in texts) else 41",
        {"failed", "timeout"},
    ),
    "searches its memory": (HUNT, {"failed"}),
    "reads every descriptor": (
        "import os\n"
        "def answer():\n"
        "    for fd in range(3, 64):\n"
        "        try:\n"
        "            os.set_blocking(fd, False)\n"
        "            if b'== 42' in os.pread(fd, 1 << 16, 0): return 42\n"
        "        except OSError: pass\n"
        "    return 41",
        {"failed"},
    ),
    "answers for the test": (
        "import json, os\n"
        "body = json.dumps(['passed', None, None]).encode()\n"
        "def answer():\n"
        "    for fd in range(3, 64):\n"
        "        try: os.write(fd, len(body).to_bytes(8, 'little') + body)\n"
        "        except OSError: pass\n"
        "    return 41",
        {"failed"},
    ),
    "sends nonsense": (
        "import os\n"
        "def answer():\n"
        "    for fd in range(3, 64):\n"
        "        try: os.write(fd, b'\\xff' * 4096)\n"
        "        except OSError: pass",
        {"failed"},
    ),
    "sends a nest of brackets": (
        "import os\nbody = b'[' * 200000\n"
        "def answer():\n"
        "    for fd in range(3, 64):\n"
        "        try: os.write(fd, len(body).to_bytes(8, 'little') + body)\n"
        "        except OSError: pass",
        {"failed"},
    ),
    "ends the test's loop": ("def answer(): raise StopIteration", {"failed"}),
    "kills its siblings": (
        "import os, signal\n"
        "for pid in range(2, 50):\n"
        "    if pid != os.getpid():\n"
        "        try: os.kill(pid, signal.SIGKILL)\n"
        "        except OSError: pass\n"
        "answer = lambda: 41",
        {"failed"},
    ),
    "stops its siblings": (
        "import os, signal\n"
        "for pid in range(2, 50):\n"
        "    if pid != os.getpid():\n"
        "        try: os.kill(pid, signal.SIGSTOP)\n"
        "        except OSError: pass\n"
        "answer = lambda: 41",
        {"failed", "timeout"},
    ),
    "looks at its siblings through /proc": (
        "import os\nos.listdir('/proc')\nanswer = lambda: 42",
        {"failed"},
    ),
    "attaches to its siblings": (
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "answer = lambda: 42 if any(libc.ptrace(16, pid, 0, 0) == 0 for pid in range(1, 20)) else 41",
        {"failed"},
    ),
    "follows a link out": (
        "import os\nos.symlink('/etc/passwd', '/tmp/x')\nopen('/tmp/x').read()\nanswer = lambda: 42",
        {"failed"},
    ),
    "a hundred thousand files": (
        "for i in range(100000): open(f'/tmp/{i}', 'w').close()\nanswer = lambda: 41",
        {"failed", "timeout"},
    ),
    "nested namespaces": (
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "flags = (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x10020000)\n"
        "answer = lambda: 42 if any(libc.unshare(flag) == 0 for flag in flags) else 41",
        {"failed"},
    ),
    "mounts": (
        "import ctypes\nanswer = lambda: 42 if ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, 0) == 0 else 41",
        {"failed"},
    ),
    "memory that belongs to no process": (
        "import os\n"
        "held = [os.memfd_create('x') for _ in range(200)]\n"
        "for fd in held: os.write(fd, bytes(8 << 20))\n"
        "answer = lambda: 42",
        {"failed"},
    ),
    "unspeakable error": (
        "class Evil(Exception):\n    def __str__(self): raise SystemExit(0)\nraise Evil",
        {"failed"},
    ),
    "surrogate": ("x = '\ud800'", {"failed"}),
    "null byte": ("x = '\0'", {"failed"}),
}


# Two seconds of CPU until SIGKILL.
HOSTILE_PROGRAMS = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if "SIGXCPU" in name else name for name in HOSTILE]
)


@pytest.mark.slow
@HOSTILE_PROGRAMS
def test_a_hostile_program_gets_the_right_verdict_and_leaves_no_process(
    sandbox: Sandbox, alive: Callable[[Sandbox], list[int]], name: str
) -> None:
    source, kinds = HOSTILE[name]
    # A bomb's processes share the cores, so none of them uses up its CPU seconds soon.
    limits = SandboxLimits(cpu_s=1, wall_s=1) if name == "fork bomb" else LIMITS
    verdict = sandbox.run(program(source), limits)
    assert verdict.kind in kinds, verdict
    assert alive(sandbox) == []


def test_a_sleeping_program_ends_at_the_wall_limit(sandbox: Sandbox, alive: Callable[[Sandbox], list[int]]) -> None:
    verdict = sandbox.run(program("import time; time.sleep(600)"), SandboxLimits(cpu_s=1, wall_s=0.5))
    assert (verdict.kind, verdict.detail) == ("timeout", "wall limit of 0.5 s")
    assert verdict.cpu_s < 0.5
    assert alive(sandbox) == []


def test_the_memory_limit_holds_for_all_processes_together(
    sandbox: Sandbox, alive: Callable[[Sandbox], list[int]]
) -> None:
    source = (
        "import os, time\n"
        "for _ in range(12):\n"  # a control group's limit is above the 512: it includes the runner and /tmp
        "    if os.fork() == 0:\n"
        "        x = bytearray(b'x') * (96 << 20)\n"
        "        time.sleep(60)\n"
        "        os._exit(0)\n"
        "time.sleep(60)\n"
    )
    verdict = sandbox.run(program(source), SandboxLimits(cpu_s=5, wall_s=50, memory_MiB=256))
    assert (verdict.kind, verdict.detail) == ("memory", "all processes together hold more than 512 MiB")
    assert alive(sandbox) == []


@pytest.mark.slow
def test_a_busy_loop_ends_at_the_cpu_limit(sandbox: Sandbox) -> None:
    verdict = sandbox.run(program("while True: pass"), LIMITS)
    assert verdict.detail == "CPU limit of 1 s"
    assert 0.5 < verdict.cpu_s < 2.5  # the kernel keeps the limit in ticks, which a shared machine stretches


def test_a_correct_program_passes_and_may_print_and_use_tmp(sandbox: Sandbox) -> None:
    source = RIGHT + "print('hello')\nopen('/tmp/x', 'w').write('y')\nimport math, typing, hashlib, collections, json\n"
    assert sandbox.run(program(source), LIMITS).kind == "passed"


def test_a_large_test_is_sent_completely(sandbox: Sandbox) -> None:
    test = f"text = {'x' * 300_000!r}\nassert len(text) == 300_000\n{TEST}"
    assert sandbox.run(program(RIGHT, test), LIMITS).kind == "passed"
    assert sandbox.run(program(RIGHT, test + "\nassert False"), LIMITS).kind == "failed"


def test_the_order_of_sets_does_not_change_between_runs(sandbox: Sandbox) -> None:
    source = "raise ValueError(''.join({'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'}))"
    assert len({sandbox.run(program(source), LIMITS).detail for _ in range(4)}) == 1


def test_programs_do_not_see_what_earlier_ones_left(sandbox: Sandbox) -> None:
    leave = "import builtins, os\nbuiltins.trace = 1\nopen('/tmp/trace', 'w').close()\nos.environ['TRACE'] = '1'\n"
    look = "import builtins, os\nassert not hasattr(builtins, 'trace')\nassert not os.listdir('/tmp')\n"
    look += "assert 'TRACE' not in os.environ\n"
    with Sandbox(bubblewrap.Bubblewrap()) as box:
        for _ in range(3):  # one thread: the same worker, if it is reused
            assert box.run(program(leave + RIGHT), LIMITS).kind == "passed"
            assert box.run(program(look + RIGHT), LIMITS).kind == "passed"


def test_an_earlier_test_is_not_in_the_memory_of_a_later_candidate(sandbox: Sandbox) -> None:
    with Sandbox(bubblewrap.Bubblewrap()) as box:
        for source in (RIGHT, RIGHT):
            assert box.run(program(source), LIMITS).passed
        assert box.run(program(HUNT), SandboxLimits(cpu_s=20)).kind == "failed"
        # the search itself succeeds if there is something to find
        prey = "text = ' '.join(['assert', 'answer() is here'])\n"
        assert box.run(program(prey + HUNT), SandboxLimits(cpu_s=20)).kind == "passed"


# --- isolation -------------------------------------------------------------------------------------------------------


def test_files_of_the_host_are_not_visible(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("42")
    for path in (secret, Path("/etc/passwd"), Path(lakh.__file__), Path.home() / ".profile"):
        verdict = sandbox.run(program(f"open({str(path)!r}).read()\n{RIGHT}"), LIMITS)
        assert verdict.kind == "failed"
        assert verdict.detail.startswith("FileNotFoundError"), path


def test_nothing_outside_tmp_can_be_written(sandbox: Sandbox, tmp_path: Path) -> None:
    library = Path(os.__file__).parent / "lakh_was_here"
    for path in ("/x", "/usr/x", "/etc/x", "/dev/x", "/dev/shm/x", str(tmp_path / "x"), str(library)):
        verdict = sandbox.run(program(f"open({path!r}, 'w')\n{RIGHT}"), LIMITS)
        assert verdict.kind == "failed", path
        assert "Error" in verdict.detail
        assert not Path(path).exists()


def test_tmp_is_private_and_small(sandbox: Sandbox) -> None:
    fill = "for i in range(99):\n    with open(f'/tmp/{i}', 'wb') as file: file.write(bytes(1 << 20))\n"
    verdict = sandbox.run(program(fill), SandboxLimits(cpu_s=5, tmp_MiB=8))
    assert "No space left" in verdict.detail
    empty = "import os\nassert os.listdir('/tmp') == []\n"
    assert sandbox.run(program(empty + RIGHT), LIMITS).kind == "passed"


def test_the_size_of_a_file_is_limited(sandbox: Sandbox) -> None:
    write = "open('/tmp/x', 'wb').write(bytes(8 << 20))"
    assert "too large" in sandbox.run(program(write), SandboxLimits(file_MiB=1)).detail


@pytest.mark.parametrize("filtered", [True, False], ids=["with seccomp", "by namespace alone"])
def test_a_server_on_loopback_cannot_be_reached(sandbox: Sandbox, filtered: bool) -> None:
    backend = bubblewrap.Bubblewrap()
    if not filtered:
        backend._filter = None
    box = Sandbox(backend)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        source = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)\n{RIGHT}"
        with box:
            verdict = box.run(program(source), LIMITS)
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()
    assert verdict.kind == "failed"
    assert ("PermissionError" if filtered else "ConnectionRefusedError") in verdict.detail


def test_the_environment_and_descriptors_are_clean(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "42")
    source = "import os\nassert 'SECRET_KEY' not in os.environ\nassert os.read(0, 1) == b''\n"
    assert sandbox.run(program(source + RIGHT), LIMITS).kind == "passed"


def test_user_namespaces_cannot_be_nested(sandbox: Sandbox) -> None:
    if seccomp.filter_bytes() is None:
        pytest.skip("no seccomp filter for this kind of machine")
    source = "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == -1\n"
    assert sandbox.run(program(source + RIGHT), LIMITS).kind == "passed"


def test_threads_work_up_to_the_limit_on_processes(sandbox: Sandbox) -> None:
    source = (
        "import threading\nthreads = [threading.Thread(target=print) for _ in range(4)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
    )
    assert sandbox.run(program(source + RIGHT), LIMITS).kind == "passed"
    many = "import os, time\nfor _ in range(40):\n    if os.fork() == 0:\n        time.sleep(600)\n"
    verdict = sandbox.run(program(many + RIGHT), SandboxLimits(processes=8))
    assert "Resource temporarily unavailable" in verdict.detail


# --- choosing ----------------------------------------------------------------------------------------------------


def test_without_bubblewrap_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(landlock, "_syscall", lambda *words: -1)
    with pytest.raises(UserError, match=r"bubblewrap is not installed.*landlock is not available.*apt-get.*--unsafe"):
        Sandbox.choose()


def test_if_bubblewrap_cannot_start_the_error_has_its_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(broken))
    with pytest.raises(UserError, match=r"cannot start here \(bwrap: setting up uid map: Permission denied\)"):
        Sandbox.choose(backend="bubblewrap", workers=2)


def test_other_workers_start_during_the_self_test(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    with Sandbox.choose(backend="bubblewrap", workers=8) as chosen:
        assert len(chosen._idle) == 3
        assert [worker.run(program(RIGHT), LIMITS)[0].kind for worker in chosen._idle] == ["passed"] * 3
    assert chosen._idle == []


def test_code_sent_into_the_sandbox_has_no_host_path() -> None:
    """Code objects contain the name of their file."""
    words = sandboxed.command_line()
    assert os.fsencode(Path(sandboxed.__file__).parent) not in base64.b64decode(words[2])


HOLES = {
    "a folder of the host": (["--ro-bind", "/proc", "/proc"], "folders of the host are visible"),
    "the host's tmp": (["--bind", "/tmp", "/tmp"], "/tmp is not private"),
    "the host's users": (["--ro-bind", "/etc", "/etc"], "the host's users are visible"),
    "a writable folder": (["--perms", "1777", "--tmpfs", "/usr"], "can write to /usr/probe|cannot start"),
}


@pytest.mark.parametrize("hole", HOLES)
def test_the_self_test_detects_weak_isolation(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hole: str
) -> None:
    extra, finding = HOLES[hole]
    (tmp_path / "x").touch()  # so that the host's /tmp is not empty
    whole = bubblewrap.command

    def with_hole(bwrap: str, **options: Any) -> list[str]:
        words = whole(bwrap, **options)
        at = words.index("--remount-ro")
        return [*words[:at], *extra, *words[at:]]

    monkeypatch.setattr(bubblewrap, "command", with_hole)
    with pytest.raises(UserError, match=finding):
        Sandbox.choose(backend="bubblewrap", workers=2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can stay root")
def test_the_self_test_detects_that_root_was_not_dropped(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "next_uid", lambda: 0)
    with pytest.raises(UserError, match="runs as root"):
        Sandbox.choose(backend="bubblewrap")


ORDINARY_USER = (
    "from lakh.evals.sandbox import Program, Sandbox, SandboxLimits\n"
    "sandbox = Sandbox.choose()\n"
    "bomb = 'import os\\nwhile True:\\n    try: os.fork()\\n    except OSError: pass'\n"
    "for source in ('', bomb, 'import socket; socket.socket()', 'x = bytearray(10 << 30)'):\n"
    "    print(sandbox.run(Program(source, ''), SandboxLimits(cpu_s=1, wall_s=2)).kind)\n"
    "print(sandbox.description)\n"
)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to change its uid; the other tests run as a user then")
@pytest.mark.slow
def test_an_ordinary_user_has_the_same_isolation(
    sandbox: Sandbox, run_as_ordinary_user: Callable[..., list[str]]
) -> None:
    *kinds, description = run_as_ordinary_user(ORDINARY_USER)
    assert kinds == ["passed", "timeout", "failed", "memory"]
    assert "(user namespace)" in description


# Each tries to change what the programs after it get: candidate, examiner and zygote have one uid here.
SPOILERS = {
    "limits of others": "import resource\nfor pid in range(1, 8):\n    for kind in (1, 9):\n        "
    "try: resource.prlimit(pid, kind, (0, 0))\n        except (OSError, ValueError): pass",
    "mode of /tmp": "import os\nos.chmod('/tmp', 0o555)",
    "a stopped zygote": "import os, signal\ntry: os.kill(os.getppid(), signal.SIGSTOP)\nexcept OSError: pass",
    "priorities of others": "import os\nfor pid in range(1, 8):\n    try: os.setpriority(0, pid, 19)\n    "
    "except OSError: pass",
}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to change its uid; the other tests run as a user then")
@pytest.mark.slow
def test_no_program_of_an_ordinary_user_changes_the_next_verdicts(
    sandbox: Sandbox, run_as_ordinary_user: Callable[..., list[str]]
) -> None:
    script = (
        "from lakh.evals.sandbox import Program, Sandbox, SandboxLimits\n"
        "sandbox = Sandbox.choose()\n"
        'honest = Program(\'def f(x):\\n    open("/tmp/a", "w").write("x" * 5000)\\n    return x + 1\', '
        "'assert f(1) == 2', names=('f',))\n"
        f"for source in {list(SPOILERS.values())!r}:\n"
        "    sandbox.run(Program(source, ''), SandboxLimits(cpu_s=2, wall_s=5))\n"
        "    print(*(sandbox.run(honest, SandboxLimits(cpu_s=2, wall_s=5)).kind for _ in range(3)))\n"
        "sandbox.stop()\n"
    )
    assert run_as_ordinary_user(script) == ["passed passed passed"] * len(SPOILERS)


# --- stopping and unsafe runs ------------------------------------------------------------------------------------


def test_stop_ends_what_is_running(sandbox: Sandbox, alive: Callable[[Sandbox], list[int]]) -> None:
    box = Sandbox(bubblewrap.Bubblewrap())
    threading.Timer(0.5, box.stop).start()
    with pytest.raises(Interrupted):
        box.run(program("import time; time.sleep(600)"), SandboxLimits(wall_s=600))
    assert alive(sandbox) == []


@pytest.mark.slow
def test_unsafe_is_named_and_still_applies_limits_and_tests() -> None:
    box = Sandbox(NoIsolation())
    assert "--unsafe" in box.description
    assert box.run(program(RIGHT), LIMITS).kind == "passed"
    for name in ("wrong answer", "os._exit(0)", "prints passed", "endless output", "10 GiB", "spin"):
        source, kinds = HOSTILE[name]
        assert box.run(program(source), LIMITS).kind in kinds, name
    box.stop()


def test_a_program_that_ends_its_sandbox_fails() -> None:
    box = Sandbox.choose(unsafe=True)
    source = "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"
    verdict = box.run(program(source, ""), LIMITS)
    assert verdict.kind == "failed"
    assert "its sandbox ended with it, twice" in verdict.detail
    assert box.run(program(RIGHT), LIMITS).passed
    box.stop()


def test_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match="cpu_s"):
        SandboxLimits(cpu_s=0)
    with pytest.raises(ConfigError, match="wall_s"):
        SandboxLimits(wall_s=0)


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


# --- landlock ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked(bubblewrap_sandbox: Sandbox | None) -> Iterator[Sandbox]:
    if bubblewrap_sandbox is not None:  # its warm workers would count as leftovers
        bubblewrap_sandbox.stop()
        bubblewrap_sandbox._stopping.clear()
    try:
        chosen = Sandbox.choose(backend="landlock")
    except UserError as error:
        pytest.skip(str(error))
    with chosen:
        yield chosen


WITHOUT_TMP = {"a hundred thousand files", "kills its parent", "kills itself", "stops its siblings", "kills everything"}


@pytest.mark.slow
@HOSTILE_PROGRAMS
def test_landlock_stops_the_same_hostile_programs(
    locked: Sandbox, alive: Callable[[Sandbox], list[int]], name: str
) -> None:
    source, kinds = HOSTILE[name]
    limits = SandboxLimits(cpu_s=1, wall_s=1) if name == "fork bomb" else LIMITS
    verdict = locked.run(program(source), limits)
    assert verdict.kind in kinds | ({"failed"} if name in WITHOUT_TMP else set()), verdict
    assert alive(locked) == []


def test_landlock_refuses_what_namespaces_would_contain(locked: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("42")
    tries = [
        f"open({str(tmp_path / 'secret')!r}).read()",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        "open('/tmp/lakh-was-here', 'w')",
        f"__import__('os').chmod({str(tmp_path)!r}, 0o777)",
        f"__import__('os').utime({str(tmp_path)!r})",
        f"__import__('os').kill({os.getpid()}, 0)",
        f"__import__('resource').prlimit({os.getpid()}, 7)",
        "__import__('os').setsid()",
        "__import__('socket').socket()",
    ]
    for attempt in tries:
        verdict = locked.run(program(f"{attempt}\n{RIGHT}"), LIMITS)
        assert verdict.kind == "failed", attempt
        assert "Error" in verdict.detail
    assert not (tmp_path / "new").exists()
    assert not Path("/tmp/lakh-was-here").exists()


MODULES = "asyncio calendar collections.abc csv dataclasses difflib enum inspect json logging pathlib queue threading"


@pytest.mark.parametrize("box", ["sandbox", "locked"])
def test_the_standard_library_can_be_imported(box: str, request: pytest.FixtureRequest) -> None:
    """Also from a Python in root's home, which programs with another uid cannot read."""
    source = f"import {MODULES.replace(' ', ', ')}\n{RIGHT}"
    verdict = request.getfixturevalue(box).run(program(source), LIMITS)
    assert verdict.passed, verdict


@pytest.mark.parametrize("box", ["sandbox", "locked"])
def test_packages_installed_beside_python_cannot_be_read(box: str, request: pytest.FixtureRequest) -> None:
    """Benchmarks' own packages hold their answers."""
    folders = [str(path) for path in isolation.package_folders()]
    assert folders
    source = f"""
import os
for folder in {folders!r}:
    for root, _, files in os.walk(folder):
        for file in files:
            try:
                open(os.path.join(root, file)).read(1)
            except OSError:
                continue
            raise SystemExit("read " + file)
{RIGHT}
"""
    verdict = request.getfixturevalue(box).run(program(source), LIMITS)
    assert verdict.passed, verdict


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to change its uid")
@pytest.mark.slow
def test_landlock_is_chosen_where_user_namespaces_are_forbidden(
    locked: Sandbox, run_as_ordinary_user: Callable[..., list[str]]
) -> None:
    *kinds, description = run_as_ordinary_user(ORDINARY_USER, without_user_namespaces=True)
    assert kinds == ["passed", "timeout", "failed", "memory"]
    assert description.startswith("landlock")


def test_an_unknown_backend_is_an_error() -> None:
    with pytest.raises(UserError, match="no such isolation backend"):
        Sandbox.choose(backend="chroot")


def test_the_sandbox_uses_the_interpreter_below_the_virtual_environment() -> None:
    path = Path(isolation.interpreter())
    assert path.is_relative_to(Path(sys.base_prefix).resolve()) or path.is_relative_to("/usr")
