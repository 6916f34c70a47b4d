"""Shared by all kinds of tests: a small corpus, its tokens, and the command."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from tests.forks import Forks

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported, as the command does
# Containers set it. Hundreds of processes of the tests would compile torch again, 6 to 8 seconds of a core each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# No deadline: a slow machine is not a failure. The same examples on every run of CI: a failure there can be repeated.
hypothesis.settings.register_profile("lakh", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("lakh")

# A shell that starts pytest in the background makes it and its children ignore SIGINT, which tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)


def lakh(*arguments: str, timeout_s: float = 240, check: bool = True, **environment: str):
    """Run `lakh ARGUMENTS --json` and return its last line as data; with check=False, the finished process."""
    command = [sys.executable, "-m", "lakh", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env={**os.environ, **environment})
    if not check:
        return done
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def run_lakh():
    return lakh


def write_code(folder: Path, files: int = 60) -> None:
    """Small Python files that look alike and are all different."""
    rng = random.Random(7)
    words = ["count", "total", "index", "value", "result", "name", "path", "line", "item", "key"]
    for number in range(files):
        lines = [f'"""Module number {number}."""', ""]
        for function in range(rng.randint(2, 6)):
            a, b, c = rng.sample(words, 3)
            lines += [
                f"def {a}_{b}_{number}_{function}({a}, {b}={rng.randint(0, 99)}):",
                f"    {c} = {a} + {b} * {rng.randint(2, 9)}",
                f"    if {c} > {rng.randint(10, 500)}:",
                f"        return {c} - {a}",
                f"    return {c}",
                "",
            ]
        path = folder / f"part{number % 3}" / f"module_{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines))


@pytest.fixture(scope="session")
def code_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("code")
    write_code(folder)
    return folder


@pytest.fixture(scope="session")
def tokens_dir(code_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("data")
    # Without the stages whose packages are missing on a machine that only trains.
    light = ["--set", "secrets.action=keep", "--set", "quality.enabled=false"]
    lakh("corpus", "build", f"own:{code_dir}", "--out", str(base / "corpus"), *light)
    lakh("tokens", "train", str(base / "corpus"), "--out", str(base / "tokenizer"), "--vocab", "512")
    pack = ["tokens", "pack", str(base / "corpus"), "--tokenizer", str(base / "tokenizer")]
    lakh(*pack, "--out", str(base / "tokens"), "--heldout", "0.15")
    return base / "tokens"


@pytest.fixture
def tiny_recipe(tokens_dir: Path, tmp_path: Path) -> Path:
    """A run that takes a second: 12 steps of a model with some ten thousand parameters."""
    path = tmp_path / "tiny.py"
    path.write_text(
        f"""
from lakh.spec import Checkpoints, Data, Model, Optimizer, Run, Training

def tiny():
    return Run(
        name="tiny",
        model=Model(layers=2, width=32, heads=4, kv_heads=2, ffn=64, vocab=512, context=64),
        data=Data(tokens={str(tokens_dir)!r}, sequence=32, batch=8, micro_batch=2, prefetch=3),
        optim=Optimizer(lr=1e-2, warmup_steps=3),
        train=Training(steps=12, eval_every=6, eval_sequences=5, precision="f32", threads=1, peer_timeout_s=60,
            device="cpu"),
        checkpoint=Checkpoints(every=4, keep=10),
    )
"""
    )
    return path


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Starts processes that have imported torch."""
    from tests.forks import Forks

    made = Forks(tmp_path_factory.mktemp("forks"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def shared_fork_server(forks: Forks):
    """A context in which launches by this process use one fork server, which imports torch once for all of them."""
    from lakh.trainer.launch.fork_server import ForkServer

    @contextlib.contextmanager
    def share():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ForkServer, "start", staticmethod(lambda *_, **__: forks.server()))
            yield

    return share


@pytest.fixture(scope="session")
def shared_data():
    """The path of data next to the checkout that is not part of it; skips the test if it is missing."""

    def find(name: str, what: str) -> Path:
        for folder in Path(__file__).resolve().parents:
            if (found := folder / "shared" / "data" / name).exists():
                return found
        pytest.skip(f"no {what}: put them at shared/data/{name} beside the checkout")

    return find


class Redis:
    """A real redis-server on a socket in a test's own folder. May be killed and restarted; not persistent."""

    START_S = 20.0

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            pytest.skip("no redis-server: apt-get install redis-server")
        command = [program, "--port", "0", "--unixsocket", str(self.socket), "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=self.socket.parent)
        until_s = time.monotonic() + self.START_S
        while time.monotonic() < until_s:
            with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
                probe.connect(str(self.socket))
                return
            time.sleep(0.02)
        raise AssertionError("redis-server did not start")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(self.START_S)
            self.process = None


@pytest.fixture
def redis_server(tmp_path: Path):
    redis = Redis(tmp_path)
    redis.start()
    yield redis
    redis.kill()
