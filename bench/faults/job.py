"""The training job of these benchmarks: a small model on the CPU, and a real S3 server (moto) for its checkpoints."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.harness.processes import ROOT
from lakh.errors import PeerTimeout

__all__ = ["S3_ENVIRONMENT", "as_options", "s3_server", "settings"]

TOKENS = ROOT / "tests" / "golden" / "tokens-1"
S3_ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}


def settings(steps: int, *more: str) -> list[str]:
    """Settings of the recipe "laptop" for a job with short steps: a smaller model, AdamW and no evaluation."""
    return [
        "model.layers=2",
        "model.width=64",
        "model.heads=2",
        "model.kv_heads=2",
        "model.ffn=128",
        f"data.tokens={TOKENS}",
        "data.sequence=32",
        "data.batch=24",
        "data.micro_batch=2",
        "data.prefetch=8",
        "optim.kind=adamw",
        "optim.lr=1e-3",
        "optim.warmup_steps=10",
        f"train.steps={steps}",
        "train.eval_every=0",
        "train.device=cpu",
        "train.threads=1",
        "checkpoint.every=0",
        *more,
    ]


def as_options(items: Sequence[str]) -> list[str]:
    return [word for item in items for word in ("--set", item)]


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """A real S3 server in a process of its own with the bucket "bucket". Sets the environment; yields its address."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    log = folder / "moto.log"
    before = dict(os.environ)
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as server:
        try:
            url = _wait_for_address(server, log)
            os.environ.update(S3_ENVIRONMENT, AWS_ENDPOINT_URL=url)
            import fsspec

            fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
            yield url
        finally:
            server.terminate()
            os.environ.clear()
            os.environ.update(before)


def _wait_for_address(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s and server.poll() is None:
        if found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text(errors="replace")):
            return found[0]
        time.sleep(0.1)
    raise PeerTimeout("moto", f"did not start: {log.read_text(errors='replace')[-200:]}", "pip install 'moto[server]'")
