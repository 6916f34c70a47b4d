"""GPU staging on a device emulated by the CPU: chunks, their order, and the result after a failure."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from lakh.c3 import native
from lakh.c3.group import CommGroup
from lakh.c3.torch import gpu_staging
from lakh.c3.torch.gpu_staging import StagedCollective
from lakh.errors import PeerLost

F32, SUM = native.DTYPES["f32"], native.OPS["sum"]


@given(st.integers(0, 100_000), st.integers(1, 9), st.sampled_from([1, 2, 4, 8]))
def test_chunks_cover_every_element_once_and_fit(count: int, copies: int, element_bytes: int) -> None:
    chunks = gpu_staging.split_into_chunks(count, copies, element_bytes, chunk_bytes=4096)
    assert [chunk.begin for chunk in chunks] + [count] == [0] + [chunk.end for chunk in chunks]
    assert all((chunk.end - chunk.begin) * copies * element_bytes <= 4096 for chunk in chunks)
    assert all(chunk.begin % 32 == 0 for chunk in chunks)


class FakeStream:
    cuda_stream = 0

    def wait_event(self, event) -> None: ...
    def wait_stream(self, stream) -> None: ...
    def synchronize(self) -> None: ...


class FakeEvent:
    def record(self, stream=None) -> None: ...
    def synchronize(self) -> None: ...


@pytest.fixture
def device(monkeypatch) -> torch.device:
    """A fake CUDA device that executes everything immediately."""
    cudart = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    for name, value in {
        "Stream": FakeStream,
        "Event": FakeEvent,
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
        "current_stream": lambda device=None: FakeStream(),
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "cudart": lambda: cudart,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(gpu_staging, "_device_future", lambda device: torch.futures.Future())
    monkeypatch.setattr(gpu_staging, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(
        gpu_staging, "split_into_chunks", lambda count, copies, width: _split(count, copies, width, 4096)
    )
    return torch.device("cpu")


_split = gpu_staging.split_into_chunks


def on_ranks(size: int, body) -> None:
    store, errors = HashStore(), []

    def rank(number: int) -> None:
        try:
            group = CommGroup.join(store, number, size, timeout_s=60.0)
            body(group, number)
            group.close()
        except BaseException as error:  # noqa: BLE001 - reported to the test
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("count", [1, 1000, 5000])
def test_chunked_collectives_equal_whole_ones(device, count: int) -> None:
    def body(group: CommGroup, rank: int) -> None:
        staging = gpu_staging.GpuStaging(group, device)
        size = group.size
        data = torch.arange(count, dtype=torch.float32) + rank
        work = staging.start(StagedCollective("all_reduce", F32, SUM, -1, 1, count, data, data, [data], None, {}))
        assert work.wait()
        assert torch.equal(data, torch.arange(count) * size + sum(range(size)))
        part, whole = torch.full((count,), float(rank)), torch.empty(size * count)
        staging.start(StagedCollective("all_gather", F32, -1, -1, 1, count, part, whole, [whole], None, {})).wait()
        assert torch.equal(whole.view(size, -1), torch.arange(size).float()[:, None].expand(size, count))
        given_ = torch.arange(size * count, dtype=torch.float32)
        staging.start(StagedCollective("reduce_scatter", F32, SUM, -1, 1, count, given_, part, [part], None, {})).wait()
        assert torch.equal(part, given_.view(size, -1)[rank] * size)
        message = torch.full((count,), float(rank))
        staging.start(StagedCollective("broadcast", F32, -1, 1, 1, count, None, message, [message], None, {})).wait()
        assert torch.equal(message, torch.ones(count))
        splits = [count * r // size for r in range(size + 1)]
        if count % size == 0:
            other = torch.empty(count)
            extra = {"splits": splits * 2}
            staging.start(StagedCollective("all_to_all", F32, -1, -1, 1, 0, data, other, [other], None, extra)).wait()
            assert torch.equal(other.view(size, -1)[1], data.view(size, -1)[rank])
        staging.close()

    on_ranks(2, body)


@pytest.mark.timeout(60)
def test_a_failure_is_raised_and_invalidates_the_result(device) -> None:
    def body(group: CommGroup, rank: int) -> None:
        if rank == 1:
            group.abort("requested by a test")
            return
        staging = gpu_staging.GpuStaging(group, device)
        data = torch.ones(5000)
        work = staging.start(StagedCollective("all_reduce", F32, SUM, -1, 1, 5000, data, data, [data], None, {}))
        with pytest.raises(PeerLost, match="requested by a test"):
            work.wait()
        assert data.isnan().all()
        with pytest.raises(RuntimeError, match="requested by a test"):
            work.get_future().wait()
        with pytest.raises(PeerLost):
            staging.start(StagedCollective("all_reduce", F32, SUM, -1, 1, 5000, data, data, [data], None, {}))
        staging.close()

    on_ranks(2, body)
