"""The torch backend "c3": `import lakh.c3.torch_backend`, then `dist.init_process_group("c3")`.

A Python ProcessGroup over `lakh.c3.group`. torch calls some methods by old names and some by new ones (2.11 to 2.13),
from Python and from C++; all are here. A synchronous call runs in the caller's thread, an asynchronous one in the
group's own thread, and its errors come out of `wait()` and of the future.

Two things that torch needs and does not say:
- A C++ backend must be registered inside the Python group, or DeviceMesh, DTensor and FSDP2 find no group name. Gloo
  is registered, unconnected until somebody calls it; nothing of c3's own goes through it.
- A future that Python ended with `set_exception` counts as a success in C++, where DDP then reads an exception as a
  tensor. Failing futures are therefore made by raising inside `then`.
"""

# torch's stubs type every method by several signatures, which differ between the versions that this file serves.
# mypy: disable-error-code="override,assignment,attr-defined,misc,call-arg"

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lakh.c3 import native
from lakh.c3.gpu import CudaWork, GpuStaging
from lakh.c3.group import Group
from lakh.c3.links import remembered_links
from lakh.errors import LakhError, UserError

__all__ = ["BACKEND", "C3ProcessGroup", "register"]

BACKEND = "c3"
_SUM, _AVG, _MIN, _MAX, _PROD = (native.OPS[name] for name in ("sum", "avg", "min", "max", "prod"))
_U8 = native.DTYPES["u8"]
DTYPES = {
    torch.float32: native.DTYPES["f32"],
    torch.float64: native.DTYPES["f64"],
    torch.float16: native.DTYPES["f16"],
    torch.bfloat16: native.DTYPES["bf16"],
    torch.int32: native.DTYPES["i32"],
    torch.int64: native.DTYPES["i64"],
    torch.uint8: _U8,
    torch.int8: native.DTYPES["i8"],
}
_OPS = {
    dist.ReduceOp.SUM: _SUM,
    dist.ReduceOp.AVG: _AVG,
    dist.ReduceOp.MIN: _MIN,
    dist.ReduceOp.MAX: _MAX,
    dist.ReduceOp.PRODUCT: _PROD,
}


class C3Work(dist.Work):
    """An operation under way. `finish` runs once, when it has succeeded: copies back to tensors that were not
    contiguous.
    """

    def __init__(
        self,
        group: C3ProcessGroup,
        operation: str,
        result: list[torch.Tensor],
        end: Callable[[float], None] | None,
        finish: Callable[[], None] | None = None,
        keep: Any = None,
    ) -> None:
        super().__init__()
        self._group, self._operation, self._result = group, operation, result
        self._end, self._finish, self._keep = end, finish, keep
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._future: torch.futures.Future[Any] | None = None
        if end is None:
            self._complete()

    def _complete(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        self._end = None
        self._keep = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._end is None and self._error is None:
            return True
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._end is not None:
                limit_s = timeout.total_seconds() if timeout else 0.0
                try:
                    self._end(limit_s if limit_s > 0 else 1e6)
                    self._complete()
                except LakhError as error:
                    self._error = error
                    raise
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        with self._lock:
            if self._future is None:
                plain: torch.futures.Future[Any] = torch.futures.Future()
                self._future = plain.then(self._outcome)
                if self._end is None:
                    plain.set_result(None)
                else:
                    self._group._when_done(self, plain)
            return self._future

    def _outcome(self, _done: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        return self._result

    def is_completed(self) -> bool:
        return self._end is None or self._error is not None

    def is_success(self) -> bool:
        return self._end is None and self._error is None

    def exception(self) -> Any:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def _source_rank(self) -> int:
        sender = getattr(self, "sender", None)
        return int(sender.value) if sender is not None else -1

    source_rank = _source_rank


AnyWork = C3Work | CudaWork


class C3ProcessGroup(ProcessGroup):
    """What torch.distributed calls. `calls` counts the operations that reached c3, by name."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, name: str = "") -> None:
        super().__init__(rank, size)
        self._timeout = timeout
        self._label = name
        self.calls: dict[str, int] = {}
        self.codec = "none"
        """What float32 sums wear between the outermost groups of hosts; "none", "bf16", "int8" or "int4"."""
        self._together: list[AnyWork] | None = None
        self._pending: queue.SimpleQueue[tuple[C3Work, Any] | None] = queue.SimpleQueue()
        self._completer: threading.Thread | None = None
        self.group = Group.meet(store, rank, size, name="c3", timeout_s=timeout.total_seconds())
        if not self.group.on_one_host and not self.group.topology.links:
            self.group.links = remembered_links(self.group)
        self._fast = self.group.library.lakh_c3_collective
        self._gpus: dict[int, GpuStaging] = {}
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, _gloo_options(timeout))
        self._gloo = gloo
        for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
            self._register_backend(torch.device(device), ProcessGroup.BackendType.CUSTOM, gloo)
        self._set_default_backend(ProcessGroup.BackendType.CUSTOM)

    def getBackendName(self) -> str:
        return BACKEND

    def name(self) -> str:
        return BACKEND

    # --- how every operation starts --------------------------------------------------------------------------------

    def _go(
        self,
        operation: str,
        options: Any,
        result: list[torch.Tensor],
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        *,
        op: int = -1,
        root: int = -1,
        count: int | None = None,
        finish: Callable[[], None] | None = None,
        keep: Any = None,
        **extra: Any,
    ) -> AnyWork:
        self.calls[operation] = self.calls.get(operation, 0) + 1
        tensor = target if target is not None else source
        dtype, factor = _element(tensor, op, operation) if tensor is not None else (_U8, 1)
        if count is None:
            assert tensor is not None
            count = tensor.numel()
        if factor != 1 and "splits" in extra:
            extra["splits"] = [value * factor for value in extra["splits"]]
        if tensor is not None and tensor.is_cuda:
            staging = self._staging(tensor.device)
            on_gpu = staging.start(operation, dtype, op, root, factor, count, source, target, result, finish, extra)
            if self._together is not None:
                self._together.append(on_gpu)
            return on_gpu
        for staging in self._gpus.values():
            staging.drain()
        arguments = (
            operation,
            dtype,
            op,
            root,
            source.data_ptr() if source is not None else 0,
            target.data_ptr() if target is not None else 0,
            count * factor,
        )
        if getattr(options, "asyncOp", True) or self._together is not None:
            ticket, held = self.group.start(*arguments, **extra)

            def end(limit_s: float) -> None:
                self.group.wait(ticket, operation, limit_s)

            work = C3Work(self, operation, result, end, finish, (source, target, keep, held))
        else:
            self.group.run(*arguments, **extra)
            work = C3Work(self, operation, result, None, finish)
        if self._together is not None:
            self._together.append(work)
        return work

    def _staging(self, device: torch.device) -> GpuStaging:
        index = device.index if device.index is not None else torch.cuda.current_device()
        if index not in self._gpus:
            self._gpus[index] = GpuStaging(self.group, torch.device("cuda", index))
        return self._gpus[index]

    def _when_done(self, work: C3Work, future: Any) -> None:
        """End `future` when `work` ends. Works end in order, so one thread waits for them in order."""
        if self._completer is None:
            self._completer = threading.Thread(target=self._complete_in_order, name="c3 futures", daemon=True)
            self._completer.start()
        self._pending.put((work, future))

    def _complete_in_order(self) -> None:
        while (item := self._pending.get()) is not None:
            work, future = item
            with contextlib.suppress(Exception):  # kept in the work, raised by the future's `then`
                work.wait()
            future.set_result(None)

    # --- reductions --------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> AnyWork:
        tensor, op = _one(tensors, "all_reduce"), _op(opts)
        dtype = DTYPES.get(tensor.dtype)
        # The commonest case, without detours: contiguous, synchronous, on one host.
        if (
            dtype is not None
            and opts is not None
            and not opts.asyncOp
            and self.group.on_one_host
            and self.codec == "none"
            and self._together is None
            and not self._gpus
            and tensor.is_contiguous()
            and tensor.device.type == "cpu"
        ):
            self.calls["all_reduce"] = self.calls.get("all_reduce", 0) + 1
            address = tensor.data_ptr()
            status = self._fast(self.group.handle, 0, dtype, op, -1, address, address, tensor.numel())
            if status:
                raise native.error_of(status, f"c3 all_reduce, rank {self.group.rank}")
            return C3Work(self, "all_reduce", [tensor], None)
        flat, finish = _in_place(tensor)
        extra: dict[str, Any] = {}
        if self.codec != "none" and tensor.dtype == torch.float32 and op in (_SUM, _AVG) and self.group.size > 1:
            extra = {"codec": self.codec, "seed": self.calls.get("all_reduce", 0)}
        return self._go("all_reduce", opts, [tensor], flat, flat, op=op, finish=finish, **extra)

    def allreduce_encoded(
        self, tensor: torch.Tensor, codec: str, residual: torch.Tensor | None, seed: int = 0
    ) -> AnyWork:
        """Average of a contiguous float32 tensor with a codec on the wire; `residual` is the error feedback of
        this rank.
        """
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise UserError("c3 all_reduce with a codec", f"a tensor of {tensor.dtype}", "give contiguous float32")
        if tensor.is_cuda:
            return self._allreduce_encoded_on_gpu(tensor, codec, residual)
        address = residual.data_ptr() if residual is not None else 0
        extra: dict[str, Any] = {"codec": codec, "residual": address, "seed": seed}
        return self._go("all_reduce", None, [tensor], tensor, tensor, op=_AVG, keep=residual, **extra)

    def _allreduce_encoded_on_gpu(self, tensor: torch.Tensor, codec: str, residual: torch.Tensor | None) -> AnyWork:
        """Everybody's encoded gradients to everybody, decoded and added in rank order: the same bits on all ranks.

        Suits the few replicas of hybrid sharding: bytes grow with the number of ranks.
        """
        from lakh.c3.gpu_codec import decode_sum, encode

        size, flat = self.group.size, tensor.view(-1)
        if not flat.numel():
            return self._go("all_reduce", None, [tensor], tensor, tensor, op=_AVG)
        wire = encode(codec, flat, residual)
        everything = torch.empty(size * wire.numel(), dtype=torch.uint8, device=tensor.device)

        def finish() -> None:
            decode_sum(codec, everything, flat.numel(), size, out=flat)

        return self._go("all_gather", None, [tensor], wire, everything, count=wire.numel(), finish=finish)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> AnyWork:
        return self._all([self.allreduce([tensor], opts) for tensor in tensors], list(tensors))

    def reduce(self, tensors: Any, opts: Any) -> AnyWork:
        tensor = _one(tensors, "reduce")
        flat, finish = _in_place(tensor)
        if self.group.rank != opts.rootRank:
            finish = None
        return self._go("reduce", opts, [tensor], flat, flat, op=_op(opts), root=opts.rootRank, finish=finish)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> AnyWork:
        output, pieces = _one(outputs, "reduce_scatter"), inputs[0]
        self._same_shapes("reduce_scatter", output, pieces)
        return self._reduce_scatter(output, torch.cat([piece.reshape(-1) for piece in pieces]), opts)

    def _reduce_scatter(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> AnyWork:
        if given.numel() != output.numel() * self.group.size or given.dtype != output.dtype:
            found = f"{given.numel()} {given.dtype} into {output.numel()} {output.dtype} on {self.group.size} ranks"
            raise UserError("c3 reduce_scatter", found, "the input must hold one output for each rank")
        given, (flat, finish) = given.contiguous(), _in_place(output, copy=False)
        return self._go("reduce_scatter", opts, [output], given, flat, op=_op(opts), finish=finish)

    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> AnyWork:
        return self._reduce_scatter(output, given, opts)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> AnyWork:
        return self._reduce_scatter(output, given, opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> AnyWork:
        works = [self._reduce_scatter(out, given, opts) for out, given in zip(outputs, inputs, strict=True)]
        return self._all(works, list(outputs))

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    # --- copies ------------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any) -> AnyWork:
        tensor = _one(tensors, "broadcast")
        flat, finish = _in_place(tensor)
        return self._go("broadcast", opts, [tensor], None, flat, root=opts.rootRank, finish=finish)

    def _all_gather(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> AnyWork:
        if output.numel() != given.numel() * self.group.size or given.dtype != output.dtype:
            found = f"{given.numel()} {given.dtype} into {output.numel()} {output.dtype} on {self.group.size} ranks"
            raise UserError("c3 all_gather", found, "the output must hold one input of each rank")
        given, (flat, finish) = given.contiguous(), _in_place(output, copy=False)
        return self._go("all_gather", opts, [output], given, flat, count=given.numel(), finish=finish)

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> AnyWork:
        return self._all_gather(output, given, opts)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> AnyWork:
        return self._all_gather(output, given, opts)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> AnyWork:
        works = [self._all_gather(out, given, opts) for out, given in zip(outputs, inputs, strict=True)]
        return self._all(works, list(outputs))

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> AnyWork:
        given, pieces = _one(inputs, "all_gather").contiguous(), outputs[0]
        self._same_shapes("all_gather", given, pieces)
        flat = torch.empty(given.numel() * self.group.size, dtype=given.dtype, device=given.device)
        finish = _spread(flat, pieces)
        return self._go("all_gather", opts, list(pieces), given, flat, count=given.numel(), finish=finish)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> AnyWork:
        # outputs[rank][i] here, unlike elsewhere
        works = [self.allgather([[row[index] for row in outputs]], [given], opts) for index, given in enumerate(inputs)]
        return self._all(works, [tensor for row in outputs for tensor in row])

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> AnyWork:
        given = _one(inputs, "gather").contiguous()
        flat, finish, pieces = None, None, []
        if self.group.rank == opts.rootRank:
            pieces = list(outputs[0])
            self._same_shapes("gather", given, pieces)
            flat = torch.empty(given.numel() * self.group.size, dtype=given.dtype, device=given.device)
            finish = _spread(flat, pieces)
        return self._go("gather", opts, pieces, given, flat, root=opts.rootRank, count=given.numel(), finish=finish)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> AnyWork:
        output = _one(outputs, "scatter")
        flat, finish = _in_place(output, copy=False)
        given = None
        if self.group.rank == opts.rootRank:
            self._same_shapes("scatter", output, inputs[0])
            given = torch.cat([piece.reshape(-1) for piece in inputs[0]])
        return self._go("scatter", opts, [output], given, flat, root=opts.rootRank, finish=finish)

    def alltoall_base(
        self, output: torch.Tensor, given: torch.Tensor, receives: Any = None, sends: Any = None, opts: Any = None
    ) -> AnyWork:
        given, (flat, finish) = given.contiguous(), _in_place(output, copy=False)
        splits = [
            *self._offsets(given, sends, "input"),
            *self._offsets(output, receives, "output"),
        ]
        count = 0  # sizes may differ between ranks; the splits say them
        return self._go("all_to_all", opts, [output], given, flat, count=count, splits=splits, finish=finish)

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> AnyWork:
        given = torch.cat([piece.reshape(-1) for piece in inputs])
        flat = torch.empty(sum(piece.numel() for piece in outputs), dtype=given.dtype, device=given.device)
        splits = _running([piece.numel() for piece in inputs]) + _running([piece.numel() for piece in outputs])
        finish = _spread(flat, outputs)
        return self._go("all_to_all", opts, list(outputs), given, flat, count=0, splits=splits, finish=finish)

    def _offsets(self, tensor: torch.Tensor, rows: Any, what: str) -> list[int]:
        """Offsets of each rank's part in elements; `rows` are numbers of rows, none: equal parts."""
        size = self.group.size
        if not rows:
            if tensor.numel() % size or (tensor.dim() and tensor.shape[0] % size):
                found = f"{what} of {tuple(tensor.shape)} does not divide among {size} ranks"
                raise UserError("c3 all_to_all", found, "give split sizes")
            return [tensor.numel() // size * place for place in range(size + 1)]
        if len(rows) != size or sum(rows) != tensor.shape[0]:
            found = f"{what} splits {list(rows)} of {tensor.shape[0]} rows on {size} ranks"
            raise UserError("c3 all_to_all", found, "give one split per rank, together all rows")
        width = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 1
        return _running([int(value) * width for value in rows])

    def barrier(self, opts: Any = None) -> AnyWork:
        return self._go("barrier", opts, [], None, None, count=0)

    # --- messages ----------------------------------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> AnyWork:
        self.calls["send"] = self.calls.get("send", 0) + 1
        tensor = _dense(_one(tensors, "send"), "send").cpu().contiguous()
        ticket = self.group.send(dst, tag, tensor.data_ptr(), tensor.numel() * tensor.element_size())
        return self._message("send", ticket, [], None, tensor)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> AnyWork:
        self.calls["recv"] = self.calls.get("recv", 0) + 1
        tensor = _dense(_one(tensors, "recv"), "recv")
        flat, finish = _in_place(tensor, copy=False)
        if flat.is_cuda:
            flat = torch.empty_like(flat, device="cpu")
            finish = partial(_write, tensor, flat)
        ticket, sender = self.group.recv(src, tag, flat.data_ptr(), flat.numel() * flat.element_size())
        work = self._message("recv", ticket, [tensor], finish, (flat, sender))
        work.sender = sender
        return work

    def recv_anysource(self, tensors: Any, tag: int = 0) -> AnyWork:
        return self.recv(tensors, -1, tag)

    def _message(self, what: str, ticket: int, result: list[torch.Tensor], finish: Any, keep: Any) -> C3Work:
        limit_s = self._timeout.total_seconds()

        def end(timeout_s: float) -> None:
            # A little more than the native limit, so that its words and not ours are heard.
            self.group.wait_message(ticket, min(timeout_s, limit_s + 5.0))

        return C3Work(self, what, result, end, finish, keep)

    # --- together, ending -------------------------------------------------------------------------------------------

    def _start_coalescing(self, device: Any = None) -> None:
        self._together = []

    def _end_coalescing(self, device: Any = None) -> AnyWork:
        works, self._together = self._together or [], None
        return self._all(works, [tensor for work in works for tensor in work.result()])

    def _all(self, works: Sequence[AnyWork], result: list[torch.Tensor]) -> AnyWork:
        def end(limit_s: float) -> None:
            for work in works:
                work.wait(timedelta(seconds=limit_s))

        return C3Work(self, "several", result, end if works else None, keep=works)

    def _set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self.group.set_timeout(timeout.total_seconds())

    set_timeout = _set_timeout

    def abort(self) -> None:
        self.group.abort(f"rank {self.group.rank} aborted the group")
        self.shutdown()

    def shutdown(self) -> None:
        self._pending.put(None)
        for staging in self._gpus.values():
            staging.close()
        self._gpus.clear()
        self.group.close()

    def _same_shapes(self, what: str, one: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
        size = self.group.size
        if len(pieces) != size or any(p.numel() != one.numel() or p.dtype != one.dtype for p in pieces):
            found = f"{len(pieces)} tensors {[tuple(p.shape) for p in pieces][:4]} beside {tuple(one.shape)}"
            raise UserError(f"c3 {what}", found, f"give {size} tensors of the same size and type")


def _element(tensor: torch.Tensor, op: int, operation: str) -> tuple[int, int]:
    """The native type of a tensor's elements, and how many of it one element is (for types that are only copied)."""
    _dense(tensor, operation)
    known = DTYPES.get(tensor.dtype)
    if known is not None:
        return known, 1
    if op < 0:
        return _U8, tensor.element_size()
    if tensor.dtype == torch.bool and op in (_MIN, _MAX, _PROD):
        return _U8, 1
    raise UserError(f"c3 {operation}", f"does not reduce {tensor.dtype}", "convert the tensor first")


def _dense(tensor: torch.Tensor, operation: str) -> torch.Tensor:
    if tensor.device.type not in ("cpu", "cuda") or tensor.layout != torch.strided:
        found = f"a tensor on {tensor.device} with layout {tensor.layout}"
        raise UserError(f"c3 {operation}", found, "give a dense CPU or CUDA tensor")
    return tensor


def _op(options: Any) -> int:
    wanted = getattr(options, "reduceOp", dist.ReduceOp.SUM)
    for known, number in _OPS.items():
        if wanted == known:
            return number
    raise UserError("c3", f"does not know the operator {wanted}", "use SUM, AVG, MIN, MAX or PRODUCT")


def _one(tensors: Any, operation: str) -> torch.Tensor:
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise UserError(f"c3 {operation}", f"{len(tensors)} tensors at once", "give one tensor per call")
    found: torch.Tensor = tensors[0]
    return found


def _in_place(tensor: torch.Tensor, copy: bool = True) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """A contiguous tensor to work on, and what brings the result back where that is a copy."""
    if tensor.is_contiguous():
        return tensor, None
    flat = tensor.contiguous() if copy else torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return flat, lambda: _write(tensor, flat)


def _write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(value.view(tensor.shape))


def _spread(flat: torch.Tensor, pieces: Sequence[torch.Tensor]) -> Callable[[], None]:
    def finish() -> None:
        at = 0
        for piece in pieces:
            _write(piece, flat[at : at + piece.numel()])
            at += piece.numel()

    return finish


def _running(values: Sequence[int]) -> list[int]:
    totals = [0]
    for value in values:
        totals.append(totals[-1] + value)
    return totals


def _gloo_options(timeout: timedelta) -> Any:
    """Gloo that connects to nobody until somebody calls it."""
    options = dist.ProcessGroupGloo._Options()
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    make = dist.ProcessGroupGloo.create_device if interface else dist.ProcessGroupGloo.create_default_device
    arguments = {"interface": interface} if interface else {}
    try:
        options._devices = [make(**arguments, lazy_init=True)]
    except TypeError:  # a torch without lazy connections
        options._devices = [make(**arguments)]
    options._timeout = timeout
    return options


def _create(options: Any, _pg_options: Any = None) -> C3ProcessGroup:
    return C3ProcessGroup(
        options.store, options.group_rank, options.group_size, options.timeout, getattr(options, "group_id", "")
    )


def register() -> None:
    """Make the name "c3" known to torch.distributed; harmless when it is."""
    if BACKEND.upper() not in dist.Backend.__dict__:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


register()
