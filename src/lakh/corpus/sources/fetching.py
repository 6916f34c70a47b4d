"""Fetch many packages at once with a few threads; one failure does not stop the others.

After all fetches, missing packages are reported together, or (with `skip_missing`) become one counted row each. Network
failures are reported last and are worth a retry: the cache keeps the rest. npm gets few threads, because each call
starts a program; an index or a mirror gets at most THREADS.

Fails with UserError (names), PeerLost (the network) and DataError (a file with another hash than its index states).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lakh.corpus.document import Progress
from lakh.corpus.sources.listing import CorpusSource
from lakh.corpus.sources.packages import PackageSource, fetch
from lakh.errors import DataError, LakhError, PeerError, PeerLost, UserError

__all__ = ["fetch_all"]

THREADS = 8
THREADS_OF = {"npm": 2}
SHOWN = 12
WAIT_S = 1.0


def fetch_all(
    sources: Sequence[CorpusSource], *, skip_missing: bool = False, progress: Progress | None = None
) -> list[CorpusSource]:
    """Fetch all packages of the sources; returns the sources, with `missing` set where a package is missing."""
    wanted = [source for source in sources if isinstance(source, PackageSource)]
    failed = _each(wanted, progress or (lambda what, done, total: None))
    damaged = [error for error in failed.values() if isinstance(error, DataError)]
    if damaged:
        raise damaged[0]
    lost = {argument: error for argument, error in failed.items() if isinstance(error, PeerError)}
    if lost:
        raise _combined(lost, len(wanted), PeerLost, "run the same command again: what was fetched is kept")
    if failed and not skip_missing:
        raise _combined(failed, len(wanted), UserError, "remove them, or pass --skip-missing")
    return [
        replace(source, missing=failed[source.argument].found)
        if isinstance(source, PackageSource) and source.argument in failed
        else source
        for source in sources
    ]


def _combined(failed: Mapping[str, LakhError], total: int, kind: type[LakhError], todo: str) -> LakhError:
    """One error for several; a single one is returned as it is."""
    if len(failed) == 1:
        return next(iter(failed.values()))
    shown = [f"{argument} ({error.found})" for argument, error in sorted(failed.items())]
    more = f", and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return kind(f"{len(failed)} of {total} packages", f"not fetched: {', '.join(shown[:SHOWN])}{more}", todo)


def _each(wanted: Sequence[PackageSource], progress: Progress) -> dict[str, LakhError]:
    """Fetch all; returns the errors by argument."""
    results: queue.Queue[tuple[str, LakhError | BaseException | None]] = queue.Queue()
    by_kind: dict[str, queue.Queue[str]] = {}
    for source in wanted:
        by_kind.setdefault(source.argument.partition(":")[0], queue.Queue()).put(source.argument)
    for kind, arguments in by_kind.items():
        for _ in range(min(THREADS_OF.get(kind, THREADS), arguments.qsize())):
            # Daemons: Ctrl-C ends the program, not the last of a thousand downloads.
            threading.Thread(target=_work, args=(arguments, results.put), daemon=True).start()
    failed: dict[str, LakhError] = {}
    for done in range(len(wanted)):
        argument, error = _await(results)
        progress("fetching", done + 1, len(wanted))
        if isinstance(error, LakhError):
            failed[argument] = error
        elif error is not None:
            raise error  # a bug
    return failed


def _await(
    results: queue.Queue[tuple[str, LakhError | BaseException | None]],
) -> tuple[str, LakhError | BaseException | None]:
    """The next result. Each fetch has its own time limit; the short waits let Ctrl-C through."""
    while True:
        try:
            return results.get(timeout=WAIT_S)
        except queue.Empty:
            continue


def _work(arguments: queue.Queue[str], report: Callable[[tuple[str, BaseException | None]], None]) -> None:
    while True:
        try:
            argument = arguments.get_nowait()
        except queue.Empty:
            return
        try:
            fetch(argument)
        except BaseException as error:  # noqa: BLE001 - raised by the waiting thread
            report((argument, error))
        else:
            report((argument, None))
