"""The base of the torch process group: starts, awaits and ends operations over c3. backend.py has the operations.

A synchronous call runs in the caller's thread, an asynchronous one in the group's thread; messages use separate
threads. GPU tensors go through gpu_staging.py. Errors: those of `lakh.c3.group`.

Without a C++ backend registered inside the Python group, DeviceMesh, DTensor and FSDP2 find no group name. Gloo is
registered for this; it connects only if it is called, and c3 does not use it.
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

from lakh.c3.group import CommGroup
from lakh.c3.network.links import apply_measured_network
from lakh.c3.torch.gpu_staging import CudaWork, GpuStaging, StagedCollective
from lakh.c3.torch.tensors import U8, as_contiguous, copy_into, native_dtype, require_dense, single_tensor
from lakh.c3.torch.work import C3Work, CompletedWork

__all__ = ["BACKEND", "AnyWork", "C3ProcessGroupBase"]

BACKEND = "c3"
AnyWork = C3Work | CudaWork | CompletedWork


class C3ProcessGroupBase(ProcessGroup):
    """Starts operations. `calls` counts them by name."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._timeout = timeout
        self.calls: dict[str, int] = {}
        self.codec = "none"
        """Encoding of float32 sums between the outermost groups of hosts: "none", "bf16", "int8" or "int4"."""
        self._coalesced: list[AnyWork] | None = None
        self._pending: queue.SimpleQueue[tuple[C3Work, Any] | None] = queue.SimpleQueue()
        self._completer: threading.Thread | None = None
        self.group = CommGroup.join(store, rank, size, name="c3", timeout_s=timeout.total_seconds())
        if not self.group.on_one_host:
            apply_measured_network(self.group)
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

    # --- collectives -----------------------------------------------------------------------------------------------

    def _start(
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
        dtype, factor = native_dtype(tensor, op, operation) if tensor is not None else (U8, 1)
        if count is None:
            assert tensor is not None
            count = tensor.numel()
        if factor != 1 and "splits" in extra:
            extra["splits"] = [value * factor for value in extra["splits"]]
        if tensor is not None and tensor.is_cuda:
            job = StagedCollective(operation, dtype, op, root, factor, count, source, target, result, finish, extra)
            on_gpu = self._staging(tensor.device).start(job)
            if self._coalesced is not None:
                self._coalesced.append(on_gpu)
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
        if getattr(options, "asyncOp", True) or self._coalesced is not None:
            ticket, native_objects = self.group.start(*arguments, **extra)

            def wait_native(limit_s: float) -> None:
                self.group.wait(ticket, operation, limit_s)

            keep_alive, is_done = (source, target, keep, native_objects), partial(self.group.is_done, ticket)
            work = C3Work(self, operation, result, wait_native, finish, keep_alive, is_done)
        else:
            self.group.run(*arguments, **extra)
            work = C3Work(self, operation, result, None, finish)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _staging(self, device: torch.device) -> GpuStaging:
        index = device.index if device.index is not None else torch.cuda.current_device()
        if index not in self._gpus:
            self._gpus[index] = GpuStaging(self.group, torch.device("cuda", index))
        return self._gpus[index]

    def complete_later(self, work: C3Work, future: Any) -> None:
        """Complete `future` when `work` completes. Works complete in order, so one thread waits for them in order."""
        if self._completer is None:
            self._completer = threading.Thread(target=self._complete_in_order, name="c3 futures", daemon=True)
            self._completer.start()
        self._pending.put((work, future))

    def _complete_in_order(self) -> None:
        while (item := self._pending.get()) is not None:
            work, future = item
            with contextlib.suppress(Exception):  # stored in the work, raised by the future's `then`
                work.wait()
            future.set_result(None)

    # --- messages ----------------------------------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> AnyWork:
        self.calls["send"] = self.calls.get("send", 0) + 1
        tensor = require_dense(single_tensor(tensors, "send"), "send").cpu().contiguous()
        ticket = self.group.send(dst, tag, tensor.data_ptr(), tensor.numel() * tensor.element_size())
        return self._message("send", ticket, [], None, tensor)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> AnyWork:
        self.calls["recv"] = self.calls.get("recv", 0) + 1
        tensor = require_dense(single_tensor(tensors, "recv"), "recv")
        flat, finish = as_contiguous(tensor, copy=False)
        if flat.is_cuda:
            flat = torch.empty_like(flat, device="cpu")
            finish = partial(copy_into, tensor, flat)
        ticket, sender = self.group.recv(src, tag, flat.data_ptr(), flat.numel() * flat.element_size())
        work = self._message("recv", ticket, [tensor], finish, (flat, sender))
        work.sender = sender
        return work

    def recv_anysource(self, tensors: Any, tag: int = 0) -> AnyWork:
        return self.recv(tensors, -1, tag)

    def _message(self, what: str, ticket: int, result: list[torch.Tensor], finish: Any, keep: Any) -> C3Work:
        limit_s = self._timeout.total_seconds()

        def wait_native(timeout_s: float) -> None:
            # A little more than the native limit, so that the native error is raised.
            self.group.wait_message(ticket, min(timeout_s, limit_s + 5.0))

        return C3Work(self, what, result, wait_native, finish, keep, partial(self.group.is_message_done, ticket))

    # --- coalescing and shutdown -----------------------------------------------------------------------------------

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> AnyWork:
        works, self._coalesced = self._coalesced or [], None
        return self._all(works, [tensor for work in works for tensor in work.result()])

    def _all(self, works: Sequence[AnyWork], result: list[torch.Tensor]) -> AnyWork:
        def wait_native(limit_s: float) -> None:
            for work in works:
                work.wait(timedelta(seconds=limit_s))

        def is_done() -> bool:
            return all(work.is_completed() for work in works)

        return C3Work(self, "coalesced", result, wait_native if works else None, keep=works, is_done=is_done)

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


def _gloo_options(timeout: timedelta) -> Any:
    """Options for a Gloo group that connects on first use."""
    options = dist.ProcessGroupGloo._Options()
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    make = dist.ProcessGroupGloo.create_device if interface else dist.ProcessGroupGloo.create_default_device
    arguments = {"interface": interface} if interface else {}
    try:
        options._devices = [make(**arguments, lazy_init=True)]
    except TypeError:  # this torch has no lazy connections
        options._devices = [make(**arguments)]
    options._timeout = timeout
    return options
