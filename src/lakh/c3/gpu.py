"""CUDA tensors over c3: staged through pinned memory that the ranks of a host share, piece by piece, in stream order.

    caller's stream --event--> copies to the host -> collective of the piece -> copies back --event--> caller's stream

A piece travels to the host while the one before it is on the wire and the one before that travels back, all from a
thread of our own. The staging memory is registered (`lakh.c3.memory`) and pinned, so an all_reduce within a host
touches it in place.

`wait()` returns when the wire is done with the operation, and orders the caller's current stream behind the last copy
back. It does not make the stream itself wait for the wire: a stream that waits for a thread which must call CUDA can
lock up the driver. A failure is raised by `wait()` and ends the group; the result is then filled with NaN (integers:
with their lowest value), so that no half-made sum is ever taken for a result.

Not here: device-to-device copies inside a host. NCCL does those.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lakh.c3.group import Group
from lakh.c3.memory import registered_empty
from lakh.errors import LakhError, PeerTimeout, UserError

__all__ = ["CudaWork", "GpuStaging", "Piece", "cut"]

PIECE_BYTES = 8 << 20
PIECES = 3
"""One on its way to the host, one on the wire, one on its way back."""
_U8_LIKE = (torch.bool, torch.uint8)


@dataclass(frozen=True)
class Piece:
    """Elements [begin, end) of every rank's part."""

    begin: int
    end: int


def cut(count: int, copies: int, element_bytes: int, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """Equal pieces whose `copies` (one for each rank, where the collective gathers or scatters) fit into the staging.

    A whole number of the codecs' groups of 32, so that pieces are encoded as the whole would be.
    """
    most = max(1, piece_bytes // (copies * element_bytes))
    most = max(1, most // 32 * 32)
    return [Piece(at, min(count, at + most)) for at in range(0, count, most)]


@dataclass
class Job:
    """One collective on device memory. `source` and `target` are flat; a part of each is staged for every piece."""

    operation: str
    dtype: int
    op: int
    root: int
    factor: int
    count: int
    source: torch.Tensor | None
    target: torch.Tensor | None
    finish: Callable[[], None] | None
    extra: dict[str, Any]
    ready: Any
    """Recorded where the caller's stream was when it asked."""
    result: list[torch.Tensor]
    done: Any = None
    """Recorded behind the last copy back."""
    arrives: Any = None
    """The future that the thread ends; what callers get is its `then`, which raises where there is an error."""
    future: Any = None
    over: threading.Event = field(default_factory=threading.Event)
    error: LakhError | None = None

    def outcome(self, _done: Any) -> list[torch.Tensor]:
        if self.error is not None:  # raised here, because C++ takes a future that Python failed for a success
            raise RuntimeError(str(self.error)) from self.error
        return self.result


class CudaWork(dist.Work):
    """A collective on device memory that is under way."""

    def __init__(self, staging: GpuStaging, job: Job) -> None:
        super().__init__()
        self._staging, self._job = staging, job

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until the wire is done; then the current stream is ordered behind the result."""
        job = self._job
        limit_s = timeout.total_seconds() if timeout and timeout.total_seconds() > 0 else 1e6
        if not job.over.wait(limit_s):
            raise PeerTimeout(f"c3 {job.operation}", f"is still under way after {limit_s:g} s", "wait longer")
        if job.error is not None:
            raise job.error
        torch.cuda.current_stream(self._staging.device).wait_event(job.done)
        return True

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        return self._job.future

    def is_completed(self) -> bool:
        return self._job.over.is_set() and (self._job.error is not None or self._job.done.query())

    def is_success(self) -> bool:
        return self.is_completed() and self._job.error is None

    def exception(self) -> Any:
        return self._job.error

    def result(self) -> list[torch.Tensor]:
        return self._job.result


class GpuStaging:
    """What one group needs for tensors of one device: memory, two streams and a thread."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group, self.device = group, device
        self.memory = [registered_empty(PIECE_BYTES, dtype=torch.uint8) for _ in range(PIECES)]
        for one in self.memory:
            _pin(one)
        with torch.cuda.device(device):
            self.down, self.back = torch.cuda.Stream(), torch.cuda.Stream()
            self.arrived = [torch.cuda.Event() for _ in range(PIECES)]
            self.free = [torch.cuda.Event() for _ in range(PIECES)]
        self._next_slot = 0
        self._failure: LakhError | None = None
        self._last: Job | None = None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="c3 gpu", daemon=True)
        self._thread.start()

    def start(
        self,
        operation: str,
        dtype: int,
        op: int,
        root: int,
        factor: int,
        count: int,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        result: list[torch.Tensor],
        finish: Callable[[], None] | None,
        extra: dict[str, Any],
    ) -> CudaWork:
        """Queue one collective behind what the current stream holds."""
        if self._failure is not None:
            raise self._failure
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self.device))
        job = Job(operation, dtype, op, root, factor, count, source, target, finish, extra, ready, result)
        job.arrives = _promise(self.device)
        job.future = job.arrives.then(job.outcome)
        for tensor in (source, target):
            if tensor is not None:  # it may be freed before our streams are done with it
                tensor.record_stream(self.down)
                tensor.record_stream(self.back)
        self._last = job
        self._jobs.put(job)
        return CudaWork(self, job)

    def drain(self) -> None:
        """Until the wire is done with all that was started: operations have one order on all ranks."""
        if self._last is not None:
            self._last.over.wait()  # each operation ends at its deadline at the latest

    def close(self) -> None:
        """Wait for what is under way (each operation has a deadline), then unpin."""
        self._jobs.put(None)
        self._thread.join()
        with torch.cuda.device(self.device):
            self.back.synchronize()
            for one in self.memory:
                torch.cuda.cudart().cudaHostUnregister(one.data_ptr())

    # --- the thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        torch.cuda.set_device(self.device)
        while (job := self._jobs.get()) is not None:
            try:
                if self._failure is not None:
                    raise self._failure
                self._run(job)
                with torch.cuda.stream(self.back):
                    if job.finish is not None:
                        job.finish()
                    self._release(job)
            except LakhError as error:
                self._fail(job, error)
            except Exception as error:  # noqa: BLE001 - a thread that dies silently would leave callers waiting for ever
                self._fail(job, LakhError(f"c3 {job.operation}", f"{type(error).__name__}: {error}", "report this"))
            job.over.set()

    def _release(self, job: Job) -> None:
        """The result is complete once what is in the stream now has run."""
        job.done = torch.cuda.Event()
        job.done.record(self.back)
        job.arrives.set_result(None)  # records the current stream, so whoever takes it waits for it

    def _fail(self, job: Job, error: LakhError) -> None:
        job.error = self._failure = error
        with contextlib.suppress(RuntimeError), torch.cuda.stream(self.back):
            for tensor in job.result:
                tensor.detach().fill_(_poison(tensor.dtype))
            self.back.synchronize()
        job.arrives.set_result(None)

    def _run(self, job: Job) -> None:
        self.down.wait_event(job.ready)
        self.back.wait_event(job.ready)  # what the result overwrites may still be read by what came before
        way = _WAYS.get(job.operation)
        if way is None:
            self._whole(job)
            return
        tensor = job.target if job.target is not None else job.source
        assert tensor is not None
        pieces = cut(job.count, way.copies(self.group.size), tensor.element_size())
        staged = self._staged(job, way, pieces)
        for slot, piece, given, made in staged:
            self.arrived[slot].synchronize()
            size = (piece.end - piece.begin) * job.factor
            addresses = (given.data_ptr(), made.data_ptr())
            self.group.run(job.operation, job.dtype, job.op, job.root, *addresses, size, **job.extra)
            with torch.cuda.stream(self.back):
                way.back(job, piece, made, self.group)
                self.free[slot].record(self.back)

    def _staged(self, job: Job, way: _Way, pieces: Sequence[Piece]) -> Iterator[tuple[int, Piece, Any, Any]]:
        """Each piece when its copy to the host is under way; the next one's is started before it is handed out."""
        ahead: list[tuple[int, Piece, Any, Any]] = []
        for piece in pieces:
            slot, self._next_slot = self._next_slot, (self._next_slot + 1) % PIECES
            self.free[slot].synchronize()
            with torch.cuda.stream(self.down):
                given, made = way.down(job, piece, self.memory[slot], self.group)
                self.arrived[slot].record(self.down)
            ahead.append((slot, piece, given, made))
            if len(ahead) == PIECES - 1:
                yield ahead.pop(0)
        yield from ahead

    def _whole(self, job: Job) -> None:
        """Collectives whose parts differ (gather, scatter, all_to_all): through ordinary memory, in one piece."""
        with torch.cuda.stream(self.down):
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
            with torch.cuda.stream(self.back):
                job.target.copy_(target)


# --- how the pieces of a collective lie in the staging memory --------------------------------------------------------


class _Way:
    """In place: all_reduce, reduce, broadcast."""

    def copies(self, ranks: int) -> int:
        return 1

    def down(self, job: Job, piece: Piece, memory: torch.Tensor, group: Group) -> tuple[Any, Any]:
        assert job.target is not None
        part = job.target.view(-1)[piece.begin : piece.end]
        staged = _like(memory, part.numel(), part.dtype)
        if job.operation != "broadcast" or job.root == group.rank:
            staged.copy_(part, non_blocking=True)
        return staged, staged

    def back(self, job: Job, piece: Piece, made: torch.Tensor, group: Group) -> None:
        assert job.target is not None
        if (job.operation == "reduce" and job.root != group.rank) or (
            job.operation == "broadcast" and job.root == group.rank
        ):
            return
        job.target.view(-1)[piece.begin : piece.end].copy_(made, non_blocking=True)


class _Gather(_Way):
    """Every rank's part to all: the piece of each, one after another, our own where it belongs, so that no core copies
    it again.
    """

    def copies(self, ranks: int) -> int:
        return ranks

    def down(self, job: Job, piece: Piece, memory: torch.Tensor, group: Group) -> tuple[Any, Any]:
        assert job.source is not None
        part = job.source.view(-1)[piece.begin : piece.end]
        made = _like(memory, part.numel() * group.size, part.dtype)
        given = made.view(group.size, -1)[group.rank]
        given.copy_(part, non_blocking=True)
        return given, made

    def back(self, job: Job, piece: Piece, made: torch.Tensor, group: Group) -> None:
        assert job.target is not None
        _by_row(job.target.view(group.size, -1)[:, piece.begin : piece.end], made.view(group.size, -1))


class _Scatter(_Gather):
    """Sums of every rank's part: the piece of each, one after another; the result takes the place of our own."""

    def down(self, job: Job, piece: Piece, memory: torch.Tensor, group: Group) -> tuple[Any, Any]:
        assert job.source is not None
        columns = job.source.view(group.size, -1)[:, piece.begin : piece.end]
        given = _like(memory, (piece.end - piece.begin) * group.size, job.source.dtype)
        rows = given.view(group.size, -1)
        _by_row(rows, columns)
        return given, rows[group.rank]

    def back(self, job: Job, piece: Piece, made: torch.Tensor, group: Group) -> None:
        assert job.target is not None
        job.target.view(-1)[piece.begin : piece.end].copy_(made, non_blocking=True)


_WAYS: dict[str, _Way] = {
    "all_reduce": _Way(),
    "reduce": _Way(),
    "broadcast": _Way(),
    "all_gather": _Gather(),
    "reduce_scatter": _Scatter(),
}


def _by_row(target: torch.Tensor, source: torch.Tensor) -> None:
    """Each row is dense on both sides, a copy engine's work; all at once would take a kernel and memory for strides."""
    for to, given in zip(target, source, strict=True):
        to.copy_(given, non_blocking=True)


def _promise(device: torch.device) -> Any:
    return torch.futures.Future(devices=[device])


def _like(memory: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    return memory[: count * dtype.itemsize].view(dtype)


def _poison(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype in _U8_LIKE else torch.iinfo(dtype).min


def _pin(memory: torch.Tensor) -> None:
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(status) != 0:
        found = f"cudaHostRegister of {memory.numel()} bytes failed with {status}"
        raise UserError("c3 on a GPU", found, "raise the limit of locked memory (ulimit -l)")
