"""Runs many programs at a time on threads: the work is in the sandbox's processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

__all__ = ["map_threads"]

Item = TypeVar("Item")
Output = TypeVar("Output")


def map_threads(
    function: Callable[[Item], Output], items: Iterable[Item], workers: int, stop: Callable[[], None], *,
    progress: Callable[[int], None] | None = None, already_done: int = 0,
) -> list[Output]:  # fmt: skip
    """The results in the order of the items. `progress` gets the number done so far, `already_done` included.

    An error or Ctrl-C calls `stop`, which ends the running programs, before it is raised.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix="lakh-eval")
    try:
        futures = [pool.submit(function, item) for item in items]
        for done, future in enumerate(as_completed(futures), start=already_done + 1):
            future.result()
            if progress:
                progress(done)
        return [future.result() for future in futures]
    except BaseException:
        stop()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
