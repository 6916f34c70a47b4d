"""Checkpoints on an S3-compatible server: the same as on disk, through retries, and clear errors."""

from __future__ import annotations

import http.client
import os
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from lakh import checkpoint, storage
from lakh.checkpoint.loading import _TensorFiles
from lakh.errors import CorruptCheckpoint, PeerLost, UserError

FACTS = {"sequence_index": 8, "run_sha256": "r", "data_sha256": "d", "attachments": {"run.toml": b"x = 1"}}
EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"model.a": torch.randn(700, 12), "model.b": torch.randn(5).bfloat16(), "optim.step": torch.tensor(3.0)}


def save(folder: str, step: int) -> str:
    url = f"{folder}/checkpoints/{checkpoint.folder_name(step)}"
    checkpoint.save(url, state(), step=step, **FACTS)
    return url


def check(folder: str) -> None:
    into = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    checkpoint.load(folder, into)
    for name, tensor in state().items():
        assert torch.equal(into[name], tensor), name


class FaultyServer:
    """A server in front of the S3 server. `fault` decides about each request: "pass", "reset", or (status, body)."""

    def __init__(self, target: str) -> None:
        host = target.removeprefix("http://")
        self.fault: Callable[[str, str], Any] = lambda method, path: "pass"
        self.requests: list[tuple[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.requests.append((self.command, self.path))
                fault = outer.fault(self.command, self.path)
                if fault == "reset":
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    self.connection.close()
                    self.close_connection = True
                    return
                if fault == "pass":
                    forward = http.client.HTTPConnection(host, timeout=30)
                    forward.request(self.command, self.path, body, dict(self.headers))
                    answer = forward.getresponse()
                    status, content, headers = answer.status, answer.read(), answer.getheaders()
                else:
                    (status, content), headers = fault, [("Content-Type", "application/xml")]
                self.send_response(status)
                skipped = {"content-length", "transfer-encoding", "connection", "server", "date"}
                length = {key.lower(): value for key, value in headers}.get("content-length", len(content))
                for key, value in headers:
                    if key.lower() not in skipped:
                        self.send_header(key, value)
                self.send_header("Content-Length", str(length if self.command == "HEAD" else len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_one

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def faulty(s3, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    import fsspec

    server = FaultyServer(os.environ["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setattr(storage, "RETRY_FIRST_WAIT_S", 0.001)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    yield server
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    server.close()


@pytest.mark.slow
def test_a_checkpoint_on_s3_is_the_same_as_on_disk(s3, faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "RANGE_BYTES", 8192)
    old, new = save("s3://bucket/run", 5), save("s3://bucket/run", 10)
    assert checkpoint.newest_usable("s3://bucket/run") == (new, [])
    faulty.requests.clear()
    check(new)
    ranges = [path for method, path in faulty.requests if method == "GET" and "rank-00000" in path]
    assert len(ranges) > 4, "one tensor of 33,600 bytes is read in several ranges"
    faulty.requests.clear()
    part = _TensorFiles(new).read("rank-00000.safetensors", "model.a", (slice(300, 400), slice(2, 5)))
    assert torch.equal(part, state()["model.a"][300:400, 2:5])
    assert len(faulty.requests) == 3, "length, header and the rows: not the whole file"
    content = bytearray(s3.cat_file(f"{new}/rank-00000.safetensors"))
    content[-1] ^= 1
    s3.pipe_file(f"{new}/rank-00000.safetensors", bytes(content))
    usable, skipped = checkpoint.newest_usable("s3://bucket/run")
    assert usable == old
    assert isinstance(skipped[0], CorruptCheckpoint)
    assert checkpoint.prune("s3://bucket/run", keep=1).damaged == [new]
    s3.rm(new, recursive=True)
    assert checkpoint.prune("s3://bucket/run", keep=1).kept == [old]


@pytest.mark.slow
def test_resets_and_slow_downs_are_retried(faulty: FaultyServer) -> None:
    count = [0]

    def every_third_fails(method: str, path: str) -> Any:
        count[0] += 1
        return {1: "reset", 2: (503, SLOW_DOWN)}.get(count[0] % 6, "pass")

    faulty.fault = every_third_fails
    folder = save("s3://bucket/flaky", 5)
    check(folder)
    assert count[0] > 6


@pytest.mark.slow
def test_a_writer_stopped_after_any_request_leaves_a_usable_checkpoint(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "RETRY_ATTEMPTS", 1)
    old, new = save("s3://bucket/torn", 5), "s3://bucket/torn/checkpoints/step-00000010"
    found = []
    for limit in range(50):
        left = [limit]

        def stops(method: str, path: str, left: list[int] = left) -> Any:
            left[0] -= method in ("PUT", "POST", "DELETE")
            return "pass" if left[0] >= 0 else (403, EXPIRED)

        faulty.fault = stops
        stopped = True
        try:
            save("s3://bucket/torn", 10)
            stopped = False
        except UserError:
            pass
        faulty.fault = lambda method, path: "pass"
        usable, skipped = checkpoint.newest_usable("s3://bucket/torn")
        assert (usable, skipped) == (old if stopped else new, [])
        found.append(stopped)
        if not stopped:
            break
    assert found == [True] * 3 + [False], "three objects: tensors, run.toml, manifest"


def test_a_wrong_bucket_and_expired_credentials_are_clear_errors(faulty: FaultyServer) -> None:
    with pytest.raises(UserError, match=r"s3://nowhere.*bucket does not exist"):
        save("s3://nowhere/run", 5)
    faulty.fault = lambda method, path: (403, EXPIRED)
    with pytest.raises(UserError, match=r"token has expired"):
        save("s3://bucket/expired", 5)


def test_a_server_that_does_not_answer_is_a_lost_peer(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "RETRY_ATTEMPTS", 1)
    faulty.fault = lambda method, path: (500, b"<Error><Code>InternalError</Code><Message>down</Message></Error>")
    with pytest.raises(PeerLost, match="try again later"):
        save("s3://bucket/down", 5)
