"""torch `Work` objects of c3 operations.

C++ treats a future completed by Python's `set_exception` as a success, and DDP then reads the exception as a tensor.
Failing futures therefore raise inside `then`. Errors are raised by `wait()` and by the future.
"""

# torch's stubs type every method by several signatures, which differ between the versions that this file serves.
# mypy: disable-error-code="override,assignment,attr-defined,misc,call-arg"

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lakh.errors import LakhError

__all__ = ["C3Work", "CompletedWork", "FutureCompleter"]


class FutureCompleter(Protocol):
    def complete_later(self, work: C3Work, future: Any) -> None:
        """Complete `future` when `work` has completed or failed."""


class C3Work(dist.Work):
    """An operation in progress. `wait_native` blocks until it completes; `finish` runs once after success and copies
    results back to non-contiguous tensors.
    """

    def __init__(
        self,
        group: FutureCompleter,
        operation: str,
        result: list[torch.Tensor],
        wait_native: Callable[[float], None] | None,
        finish: Callable[[], None] | None = None,
        keep: Any = None,
        is_done: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self._group, self._operation, self._result = group, operation, result
        self._wait_native, self._finish, self._keep, self._is_done = wait_native, finish, keep, is_done
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._future: torch.futures.Future[Any] | None = None
        if wait_native is None:
            self._complete()

    def _complete(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        self._wait_native = None
        self._keep = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._wait_native is None and self._error is None:
            return True
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._wait_native is not None:
                limit_s = timeout.total_seconds() if timeout else 0.0
                try:
                    self._wait_native(limit_s if limit_s > 0 else 1e6)
                    self._complete()
                except LakhError as error:
                    self._error = error
                    raise
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        with self._lock:
            if self._future is None:
                plain: torch.futures.Future[Any] = torch.futures.Future()
                self._future = plain.then(self._future_value)
                if self._wait_native is None:
                    plain.set_result(None)
                else:
                    self._group.complete_later(self, plain)
            return self._future

    def _future_value(self, _done: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        return self._result

    def is_completed(self) -> bool:
        if self._wait_native is not None and self._error is None and self._is_done():
            with contextlib.suppress(LakhError):  # stored, and raised by `wait`
                self.wait()  # returns immediately, and copies the result to its destination
        return self._wait_native is None or self._error is not None

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

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


class CompletedWork:
    """The result of a synchronous call: a completed operation.

    Has the interface of dist.Work without being one: constructing a dist.Work goes through C++ and costs more than a
    small operation. torch only calls `wait` on the result of synchronous calls.
    """

    __slots__ = ("_result",)

    def __init__(self, result: list[torch.Tensor]) -> None:
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future

    def is_completed(self) -> bool:
        return True

    is_success = is_completed

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._result

    def synchronize(self) -> None:
        return None
