"""Collectives on CUDA tensors, staged in chunks through pinned memory that the ranks of a host share, in stream order.

    caller's stream --event--> copy to the host -> collective of the chunk -> copy back --event--> caller's stream

One chunk is copied to the host while the previous one is on the network and the one before that is copied back, all
from a separate thread. The staging memory is registered (registered_memory.py) and pinned, so an all_reduce within a
host works on it in place.

`wait()` returns when the network part is complete, and orders the caller's current stream behind the last copy back. It
does not make the stream wait for the network: a stream that waits for a thread which must call CUDA can deadlock the
driver. A failure is raised by `wait()` and ends the group; the result is then filled with NaN (integers: their lowest
value), so that a partial sum is never mistaken for a result.

Device-to-device copies inside a host are left to NCCL.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lakh.c3.group import CommGroup
from lakh.c3.torch.registered_memory import registered_empty
from lakh.errors import LakhError, PeerTimeout, UserError

__all__ = ["CudaWork", "GpuStaging", "StagedCollective", "StagingChunk", "split_into_chunks"]

CHUNK_BYTES = 8 << 20
NUM_SLOTS = 3
"""One being copied to the host, one on the network, one being copied back."""
_CHUNKED = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")
_U8_LIKE = (torch.bool, torch.uint8)


@dataclass(frozen=True)
class StagingChunk:
    """Elements [begin, end) of every rank's part."""

    begin: int
    end: int


def split_into_chunks(
    count: int, copies: int, element_bytes: int, chunk_bytes: int = CHUNK_BYTES
) -> list[StagingChunk]:
    """Equal chunks whose `copies` (one per rank, if the collective gathers or scatters) fit into a staging slot.

    A multiple of the codecs' group of 32, so that chunks are encoded like the whole tensor.
    """
    most = max(1, chunk_bytes // (copies * element_bytes))
    most = max(1, most // 32 * 32)
    return [StagingChunk(at, min(count, at + most)) for at in range(0, count, most)]


@dataclass
class StagedCollective:
    """One collective on device memory. `source` and `target` are flat; a part of each is staged per chunk."""

    operation: str
    dtype: int
    op: int
    root: int
    factor: int
    count: int
    source: torch.Tensor | None
    target: torch.Tensor | None
    result: list[torch.Tensor]
    finish: Callable[[], None] | None
    extra: dict[str, Any]
    ready: Any = None
    """Event recorded in the caller's stream at the time of the call."""
    done: Any = None
    """Event recorded behind the last copy back."""
    native_future: Any = None
    """Completed by the thread; callers get its `then`, which raises if there is an error."""
    future: Any = None
    finished: threading.Event = field(default_factory=threading.Event)
    error: LakhError | None = None

    def future_value(self, _done: Any) -> list[torch.Tensor]:
        if self.error is not None:  # raised here, because C++ treats a future failed by Python as a success
            raise RuntimeError(str(self.error)) from self.error
        return self.result


class CudaWork(dist.Work):
    """A collective on device memory in progress."""

    def __init__(self, staging: GpuStaging, job: StagedCollective) -> None:
        super().__init__()
        self._staging, self._job = staging, job

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the network part, then order the current stream behind the result."""
        job = self._job
        limit_s = timeout.total_seconds() if timeout and timeout.total_seconds() > 0 else 1e6
        if not job.finished.wait(limit_s):
            raise PeerTimeout(f"c3 {job.operation}", f"has not finished after {limit_s:g} s", "wait longer")
        if job.error is not None:
            raise job.error
        torch.cuda.current_stream(self._staging.device).wait_event(job.done)
        return True

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        return self._job.future

    def is_completed(self) -> bool:
        return self._job.finished.is_set() and (self._job.error is not None or self._job.done.query())

    def is_success(self) -> bool:
        return self.is_completed() and self._job.error is None

    def exception(self) -> Any:
        return self._job.error

    def result(self) -> list[torch.Tensor]:
        return self._job.result


class GpuStaging:
    """Staging memory, two streams and a thread for one group and device."""

    def __init__(self, group: CommGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.memory = [registered_empty(CHUNK_BYTES, dtype=torch.uint8) for _ in range(NUM_SLOTS)]
        for slot in self.memory:
            _pin(slot)
        with torch.cuda.device(device):
            self.to_host, self.to_device = torch.cuda.Stream(), torch.cuda.Stream()
            self.copied = [torch.cuda.Event() for _ in range(NUM_SLOTS)]
            self.free = [torch.cuda.Event() for _ in range(NUM_SLOTS)]
        self._next_slot = 0
        self._failure: LakhError | None = None
        self._last: StagedCollective | None = None
        self._jobs: queue.SimpleQueue[StagedCollective | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="c3 gpu", daemon=True)
        self._thread.start()

    def start(self, job: StagedCollective) -> CudaWork:
        """Queue one collective behind the work in the current stream."""
        if self._failure is not None:
            raise self._failure
        job.ready = torch.cuda.Event()
        job.ready.record(torch.cuda.current_stream(self.device))
        job.native_future = _device_future(self.device)
        job.future = job.native_future.then(job.future_value)
        for tensor in (job.source, job.target):
            if tensor is not None:  # it may be freed before the staging streams are done with it
                tensor.record_stream(self.to_host)
                tensor.record_stream(self.to_device)
        self._last = job
        self._jobs.put(job)
        return CudaWork(self, job)

    def drain(self) -> None:
        """Wait for the network part of all queued operations: operations have one order on all ranks."""
        if self._last is not None:
            self._last.finished.wait()  # every operation has a deadline

    def close(self) -> None:
        """Wait for operations in progress (each has a deadline), then unpin."""
        self._jobs.put(None)
        self._thread.join()
        with torch.cuda.device(self.device):
            self.to_device.synchronize()
            for slot in self.memory:
                torch.cuda.cudart().cudaHostUnregister(slot.data_ptr())

    # --- the thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        torch.cuda.set_device(self.device)
        while (job := self._jobs.get()) is not None:
            try:
                if self._failure is not None:
                    raise self._failure
                self._run(job)
                with torch.cuda.stream(self.to_device):
                    if job.finish is not None:
                        job.finish()
                    self._release(job)
            except LakhError as error:
                self._fail(job, error)
            except Exception as error:  # noqa: BLE001 - a thread that dies silently leaves callers waiting forever
                self._fail(job, LakhError(f"c3 {job.operation}", f"{type(error).__name__}: {error}", "report this"))
            job.finished.set()

    def _release(self, job: StagedCollective) -> None:
        """The result is complete once the current content of the stream has run."""
        job.done = torch.cuda.Event()
        job.done.record(self.to_device)
        job.native_future.set_result(None)  # records the current stream, so consumers wait for it

    def _fail(self, job: StagedCollective, error: LakhError) -> None:
        job.error = self._failure = error
        with contextlib.suppress(RuntimeError), torch.cuda.stream(self.to_device):
            for tensor in job.result:
                tensor.detach().fill_(_invalid_value(tensor.dtype))
            self.to_device.synchronize()
        job.native_future.set_result(None)

    def _run(self, job: StagedCollective) -> None:
        self.to_host.wait_event(job.ready)
        self.to_device.wait_event(job.ready)  # earlier work may still read what the result overwrites
        if job.operation not in _CHUNKED:
            self._run_unchunked(job)
            return
        is_root = job.root == self.group.rank
        has_result = {"reduce": is_root, "broadcast": not is_root}.get(job.operation, True)
        for slot, chunk, source, result in self._stage_ahead(job):
            self.copied[slot].synchronize()
            size = (chunk.end - chunk.begin) * job.factor
            addresses = (source.data_ptr(), result.data_ptr())
            self.group.run(job.operation, job.dtype, job.op, job.root, *addresses, size, **job.extra)
            with torch.cuda.stream(self.to_device):
                if has_result:
                    _copy_rows(_rows(job.target, job.count, chunk), result)
                self.free[slot].record(self.to_device)

    def _stage_ahead(self, job: StagedCollective) -> Iterator[tuple[int, StagingChunk, torch.Tensor, torch.Tensor]]:
        """Yields the slot, the chunk, and its staged input and result. The next copy to the host is started before.

        A slot holds one row for each rank if the operation gathers or scatters; this rank's own row is then its input
        or its result, which saves a copy.
        """
        rank, ranks = self.group.rank, self.group.size
        source = job.source if job.source is not None else job.target
        assert source is not None
        rows = ranks if job.operation in ("all_gather", "reduce_scatter") else 1
        own = slice(rank, rank + 1) if rows > 1 else slice(0, 1)
        ahead: list[tuple[int, StagingChunk, torch.Tensor, torch.Tensor]] = []
        for chunk in split_into_chunks(job.count, rows, source.element_size()):
            slot, self._next_slot = self._next_slot, (self._next_slot + 1) % NUM_SLOTS
            self.free[slot].synchronize()
            memory = _view_as(self.memory[slot], (chunk.end - chunk.begin) * rows, source.dtype).view(rows, -1)
            staged = memory[own] if job.operation == "all_gather" else memory
            with torch.cuda.stream(self.to_host):
                if job.operation != "broadcast" or job.root == rank:
                    _copy_rows(staged, _rows(source, job.count, chunk))
                self.copied[slot].record(self.to_host)
            ahead.append((slot, chunk, staged, memory[own] if job.operation == "reduce_scatter" else memory))
            if len(ahead) == NUM_SLOTS - 1:
                yield ahead.pop(0)
        yield from ahead

    def _run_unchunked(self, job: StagedCollective) -> None:
        """Collectives with unequal parts (gather, scatter, all_to_all): through ordinary memory, in one transfer."""
        with torch.cuda.stream(self.to_host):
            source = job.source.cpu() if job.source is not None else None
            target = torch.empty_like(job.target, device="cpu") if job.target is not None else None
        self.group.run(
            job.operation,
            job.dtype,
            job.op,
            job.root,
            source.data_ptr() if source is not None else 0,
            target.data_ptr() if target is not None else 0,
            job.count * job.factor,
            **job.extra,
        )
        if target is not None and job.target is not None:
            with torch.cuda.stream(self.to_device):
                job.target.copy_(target)


def _rows(tensor: torch.Tensor | None, count: int, chunk: StagingChunk) -> torch.Tensor:
    """The chunk of each rank's part of a tensor, one row per part; a tensor of `count` elements has one part."""
    assert tensor is not None
    return tensor.view(-1, count)[:, chunk.begin : chunk.end]


def _copy_rows(target: torch.Tensor, source: torch.Tensor) -> None:
    """Row by row: dense copies run on a copy engine; one strided copy would need a kernel and extra memory."""
    for target_row, source_row in zip(target, source, strict=True):
        target_row.copy_(source_row, non_blocking=True)


def _device_future(device: torch.device) -> Any:
    return torch.futures.Future(devices=[device])


def _view_as(memory: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    return memory[: count * dtype.itemsize].view(dtype)


def _invalid_value(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype in _U8_LIKE else torch.iinfo(dtype).min


def _pin(memory: torch.Tensor) -> None:
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(status) != 0:
        found = f"cudaHostRegister of {memory.numel()} bytes failed with {status}"
        raise UserError("c3 on a GPU", found, "raise the limit on locked memory (ulimit -l)")
