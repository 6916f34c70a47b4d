"""Operations under way, as torch waits for them.

A future that Python ended with `set_exception` counts as a success in C++, where DDP then reads an exception as a
tensor. Failing futures are therefore made by raising inside `then`. Errors come out of `wait()` and of the future.
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

__all__ = ["C3Work", "DoneWork", "EndsFutures"]


class EndsFutures(Protocol):
    def when_done(self, work: C3Work, future: Any) -> None:
        """End `future` when `work` has ended, well or not."""


class C3Work(dist.Work):
    """An operation under way. `finish` runs once, when it has succeeded: copies back to tensors that were not
    contiguous.
    """

    def __init__(
        self,
        group: EndsFutures,
        operation: str,
        result: list[torch.Tensor],
        end: Callable[[float], None] | None,
        finish: Callable[[], None] | None = None,
        keep: Any = None,
        is_done: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self._group, self._operation, self._result = group, operation, result
        self._end, self._finish, self._keep, self._is_done = end, finish, keep, is_done
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
                    self._group.when_done(self, plain)
            return self._future

    def _outcome(self, _done: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        return self._result

    def is_completed(self) -> bool:
        if self._end is not None and self._error is None and self._is_done():
            with contextlib.suppress(LakhError):  # kept, and raised by `wait`
                self.wait()  # returns at once, and brings the result where it belongs
        return self._end is None or self._error is not None

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


class DoneWork:
    """What a synchronous call returns: an operation that was over by then.

    Speaks as dist.Work does without being one: making one of those goes through C++ and costs more than a small
    operation itself. torch asks synchronous calls only to wait.
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
