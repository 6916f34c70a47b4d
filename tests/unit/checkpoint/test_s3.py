"""Checkpoints on an S3-compatible server: the same as on disk, through retries, and clear errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lakh import checkpoint, events, storage
from lakh.checkpoint.loading import _TensorFiles
from lakh.errors import CorruptCheckpoint, PeerLost, UserError
from lakh.health.faults.object_store import SLOW_DOWN, FaultyObjectStore, StoreFault
from lakh.spec import Checkpoints, Data, Model, Optimizer, Run, Training
from lakh.trainer.loop import train

TOKENS = Path(__file__).resolve().parents[2] / "golden" / "tokens-1"

FACTS = {"sequence_index": 8, "run_sha256": "r", "data_sha256": "d", "attachments": {"run.toml": b"x = 1"}}
EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"


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


@pytest.fixture
def faulty(s3, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyObjectStore]:
    import fsspec

    server = FaultyObjectStore(os.environ["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setattr(storage, "RETRY_FIRST_WAIT_S", 0.001)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    yield server
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    server.close()


@pytest.mark.slow
def test_a_checkpoint_on_s3_is_the_same_as_on_disk(
    s3, faulty: FaultyObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_resets_and_slow_downs_are_retried(faulty: FaultyObjectStore) -> None:
    count = [0]

    def every_third_fails(method: str, path: str) -> Any:
        count[0] += 1
        return {1: "reset", 2: SLOW_DOWN}.get(count[0] % 6, "pass")

    faulty.fault = every_third_fails
    folder = save("s3://bucket/flaky", 5)
    check(folder)
    assert count[0] > 6


@pytest.mark.slow
def test_a_writer_stopped_after_any_request_leaves_a_usable_checkpoint(
    faulty: FaultyObjectStore, monkeypatch: pytest.MonkeyPatch
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


def test_a_wrong_bucket_and_expired_credentials_are_clear_errors(faulty: FaultyObjectStore) -> None:
    with pytest.raises(UserError, match=r"s3://nowhere.*bucket does not exist"):
        save("s3://nowhere/run", 5)
    faulty.fault = lambda method, path: (403, EXPIRED)
    with pytest.raises(UserError, match=r"token has expired"):
        save("s3://bucket/expired", 5)


def test_a_run_goes_on_when_its_credentials_expire_and_says_that_it_is_unprotected(
    faulty: FaultyObjectStore, tmp_path: Path
) -> None:
    run = Run(
        name="tiny",
        model=Model(layers=1, width=16, heads=2, kv_heads=1, ffn=24, vocab=320, context=32),
        data=Data(tokens=str(TOKENS), sequence=16, batch=4, micro_batch=4),
        optim=Optimizer(lr=1e-2, warmup_steps=2, schedule="constant"),
        train=Training(steps=6, eval_every=0, eval_sequences=4, precision="f32", device="cpu", threads=1),
        checkpoint=Checkpoints(every=2, background="off", url="s3://bucket/expiring"),
    )
    written: set[str] = set()

    def expire(method: str, path: str) -> StoreFault:
        written.add(path if method == "PUT" and "step-00000004" in path else "")
        return (403, EXPIRED) if any(written) else "pass"

    faulty.fault = expire
    with pytest.raises(UserError, match=r"token has expired.*lakh resume"):
        train(run, tmp_path / "run")
    found = events.read(tmp_path / "run")
    failed = [event for event in found if isinstance(event, events.CheckpointFailed)]
    assert [(event.step, event.last.rpartition("/")[2]) for event in failed] == [
        (4, "step-00000002"),
        (6, "step-00000002"),
    ]
    assert all("token has expired" in event.reason for event in failed)
    assert [event.step for event in found if isinstance(event, events.StepDone)] == [1, 2, 3, 4, 5, 6]
    faulty.fault = lambda method, path: "pass"
    assert train(run, tmp_path / "run").step == 6


def test_a_server_that_does_not_answer_is_a_lost_peer(
    faulty: FaultyObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "RETRY_ATTEMPTS", 1)
    faulty.fault = lambda method, path: (500, b"<Error><Code>InternalError</Code><Message>down</Message></Error>")
    with pytest.raises(PeerLost, match="try again later"):
        save("s3://bucket/down", 5)
