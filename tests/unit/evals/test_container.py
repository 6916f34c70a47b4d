"""The container backend: its command line, a fake engine without isolation, which the self-test must detect, and a real
engine where there is one, with an image made from the Python that runs this."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lakh.errors import UserError
from lakh.evals.sandbox import Sandbox, SandboxLimits
from lakh.evals.sandbox.backends import container
from lakh.evals.sandbox.worker import SandboxWorker
from lakh.evals.task import CommandProgram, Program

IMAGE = "localhost/lakh-test-python:latest"
BUILD_TIMEOUT_S = 120.0
LEFT_OUT = ("site-packages", "test", "idlelib", "ensurepip", "tkinter", "lib2to3", "__pycache__", "turtledemo")
HOSTILE = {
    "leaves early": ("import os; os._exit(0)", {"failed"}),
    "spins": ("while True: pass", {"timeout"}),
    "takes 10 GB": ("x = bytearray(10 << 30)", {"memory", "failed"}),
    "forks without end": ("import os\nwhile True: os.fork()", {"failed", "timeout", "memory"}),
    "writes without end": ("while True: print('x' * 10000)", {"output"}),
    "calls out": ("import socket; socket.create_connection(('1.1.1.1', 53), 2)", {"failed"}),
    "writes to the system": ("open('/usr/x', 'w')", {"failed"}),
    "reads the host": (f"open({__file__!r})", {"failed"}),
    "becomes root": ("import os; os.setuid(0)", {"failed"}),
    "kills process 1": ("import os; os.kill(1, 9)", {"failed"}),
    "makes a user namespace": ("import ctypes\nif ctypes.CDLL(None).unshare(0x10000000): raise OSError", {"failed"}),
}
RIGHT = Program("def answer():\n    return 42\n", "assert answer() == 42", names=("answer",))


def test_the_command_line_isolates_the_container() -> None:
    words = container.command("docker", "an/image", "a-name", SandboxLimits(), gvisor=True)
    line = " ".join(words[: words.index("an/image")])
    for part in (
        "--network none",
        "--read-only",
        "--cap-drop ALL",
        "--security-opt no-new-privileges",
        "--pids-limit",
        "--memory 2368m --memory-swap 2368m",
        "--tmpfs /tmp:rw,nosuid,nodev,mode=1777,size=64m",
        "--pull never",
        "--runtime runsc",
        "--rm",
    ):
        assert part in line
    assert not {"-v", "--volume", "--mount", "--privileged", "--device"} & set(words)
    assert words[words.index("an/image") + 1] == "python3"


def test_without_an_engine_the_backend_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for backend in ("gvisor", "docker"):
        with pytest.raises(UserError, match="no docker and no podman"):
            Sandbox.choose(backend=backend)


# --- an engine that is none --------------------------------------------------------------------------------------


@pytest.fixture
def pretender(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A fake docker that runs the command on this machine, without isolation."""
    script = tmp_path / "docker"
    script.write_text(
        f"#!{sys.executable}\n"
        "import os, sys\n"
        "words = sys.argv[1:]\n"
        "if words[0] == 'info': print('{}'); sys.exit()\n"
        f"command = words[words.index({IMAGE!r}) + 2 :]\n"
        f"os.execv({os.path.realpath(sys.executable)!r}, ['python3', *command])\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("LAKH_EVAL_IMAGE", IMAGE)
    return script


def test_the_self_test_detects_an_engine_without_isolation(pretender: Path) -> None:
    with pytest.raises(UserError, match="the self-test of docker ended as failed"):
        Sandbox.choose(backend="docker")
    with pytest.raises(UserError, match="no runtime runsc"):
        Sandbox.choose(backend="gvisor")


def test_the_error_of_a_missing_image_has_the_message_of_the_engine(pretender: Path) -> None:
    pretender.write_text("#!/bin/sh\necho 'no such image' >&2\nexit 125\n")
    with pytest.raises(UserError, match=r"docker cannot start here \(no such image\).*LAKH_EVAL_IMAGE"):
        Sandbox.choose(backend="docker")


def test_programs_and_verdicts_are_sent_over_pipes(pretender: Path) -> None:
    worker = SandboxWorker(container.Container(gvisor=False), SandboxLimits(), threading.Event())
    try:
        assert worker.run(RIGHT, SandboxLimits())[0].kind == "passed"
        large = Program(RIGHT.source, f"text = {'x' * 300_000!r}\nassert answer() == len(text)", names=("answer",))
        verdict = worker.run(large, SandboxLimits())[0]
        assert (verdict.kind, "AssertionError" in verdict.detail) == ("failed", True)
        assert worker.run(RIGHT, SandboxLimits())[0].kind == "passed"
    finally:
        worker.close()
    assert worker._process is not None
    assert worker._process.poll() is not None


def test_programs_of_other_languages_are_not_run(pretender: Path) -> None:
    with Sandbox(container.Container(gvisor=False)) as box:
        verdict = box.run(CommandProgram({"x.c": ""}, (("/usr/bin/cc", "x.c"),)))
    assert verdict.kind == "not_run"


# --- a real engine -----------------------------------------------------------------------------------------------


def image_of_this_python(engine: str) -> None:
    """Import an image that holds this interpreter, its library and what they are linked with."""
    prefix, version = Path(sys.base_prefix).resolve(), f"python{sys.version_info[0]}.{sys.version_info[1]}"
    library = Path(sysconfig.get_path("stdlib", vars={"installed_base": str(prefix), "base": str(prefix)}))
    binary = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
    loaded = [binary, *library.glob("lib-dynload/*.so")]
    listed = subprocess.run(["ldd", *map(str, loaded)], capture_output=True, text=True, check=False).stdout
    libraries = {word for line in listed.splitlines() for word in line.split() if word.startswith("/")}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:

        def skip(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
            return None if Path(entry.name).name in LEFT_OUT else entry

        # Docker makes folders without an entry accessible to CAP_DAC_OVERRIDE only, which the container does not have.
        inside = [
            Path("usr/local/bin/python3"),
            Path("usr/local/lib/x"),
            *(Path(path.lstrip("/")) for path in libraries),
        ]
        folders = {str(parent) for path in inside for parent in path.parents} - {"."}
        for name, mode in (*((name, 0o755) for name in sorted(folders)), ("tmp", 0o1777)):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, mode
            archive.addfile(folder)
        archive.add(binary, "usr/local/bin/python3")
        archive.add(library, f"usr/local/lib/{version}", filter=skip)
        for path in libraries:
            if not path.endswith(":") and Path(path).exists():
                archive.add(os.path.realpath(path), path.lstrip("/"))
    paths = ":".join(sorted({str(Path(path).parent) for path in libraries if not path.endswith(":")}))
    settings = [f"ENV LD_LIBRARY_PATH={paths}", "ENV PATH=/usr/local/bin:/usr/bin:/bin"]
    changes = [word for setting in settings for word in ("--change", setting)]
    subprocess.run(
        [engine, "import", *changes, "-", IMAGE],
        input=packed.getvalue(),
        capture_output=True,
        timeout=BUILD_TIMEOUT_S,
        check=True,
    )


@pytest.fixture(scope="module", params=["docker", "gvisor"])
def contained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    engine = container.find()
    if engine is None or shutil.which("ldd") is None:
        pytest.skip("there is no docker and no podman (apt-get install podman runc runsc)")
    with pytest.MonkeyPatch.context() as settings:
        settings.setenv("LAKH_EVAL_IMAGE", IMAGE)
        if shutil.which("runc"):  # podman's first choice, crun, does not know every layout of control groups
            file = tmp_path_factory.mktemp("podman") / "containers.conf"
            file.write_text('[engine]\nruntime = "runc"\n')
            settings.setenv("CONTAINERS_CONF", str(file))
        try:
            image_of_this_python(engine)
            chosen = Sandbox.choose(backend=request.param)
        except (subprocess.SubprocessError, UserError) as error:
            pytest.skip(f"{engine} cannot run {request.param} containers here: {error}")
        with chosen:
            yield chosen
        subprocess.run([engine, "rmi", "-f", IMAGE], capture_output=True, timeout=60, check=False)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_container_stops_hostile_programs(contained: Sandbox, name: str) -> None:
    source, kinds = HOSTILE[name]
    limits = SandboxLimits(cpu_s=1, wall_s=3 if name == "forks without end" else 20, memory_MiB=256)
    verdict = contained.run(Program(f"{source}\n{RIGHT.source}", RIGHT.test, names=("answer",)), limits)
    assert verdict.kind in kinds, verdict


def test_processes_started_in_a_container_end_with_the_program(contained: Sandbox) -> None:
    leave = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\n    os._exit(0)\n"
    look = (
        "import os\n"
        "for name in filter(str.isdigit, os.listdir('/proc')):\n"
        "    uid = open(f'/proc/{name}/status').read().partition('Uid:')[2].split()[0]\n"
        "    assert int(name) == os.getpid() or int(uid) != os.getuid(), 'somebody is left'\n"
    )
    alone = Program(look + RIGHT.source, RIGHT.test, names=("answer",))
    two = f"import os, time\nif os.fork() == 0: time.sleep(60)\ntime.sleep(0.1)\n{look}"
    assert (
        "somebody is left" in contained.run(Program(two, ""), SandboxLimits()).detail
    )  # a leftover process would be seen
    for _ in range(2):
        assert (
            contained.run(Program(leave + RIGHT.source, RIGHT.test, names=("answer",)), SandboxLimits()).kind
            == "passed"
        )
        assert contained.run(alone, SandboxLimits()).kind == "passed"


def test_no_container_outlives_its_sandbox(contained: Sandbox) -> None:
    engine = container.find()
    assert engine is not None
    assert contained.run(RIGHT, SandboxLimits()).passed
    contained.stop()
    contained._stopping.clear()
    listed = [engine, "ps", "-a", "--format", "{{.Names}}"]
    names = subprocess.run(listed, capture_output=True, text=True, timeout=60, check=True).stdout
    assert f"lakh-eval-{os.getpid()}-" not in names
