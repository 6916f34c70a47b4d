"""Fetch many packages concurrently with a few threads; one failure does not stop the others.

After all fetches, missing packages are reported together, or (with `skip_missing`) become one counted row each. Network
failures are worth a retry: the cache keeps the rest. npm gets few threads, because each call starts a program; an index
or a mirror gets at most THREADS.

Fails with UserError (names), PeerLost (the network) and DataError (a file with another hash than its index states).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.pool import ThreadPool

from lakh.corpus.document import Progress
from lakh.corpus.sources.listing import CorpusSource
from lakh.corpus.sources.packages import PackageSource, fetch
from lakh.errors import DataError, LakhError, PeerError, PeerLost, UserError

__all__ = ["fetch_all"]

THREADS = 8
THREADS_OF = {"npm": 2}
SHOWN = 12


def fetch_all(
    sources: Sequence[CorpusSource], *, skip_missing: bool = False, progress: Progress | None = None
) -> list[CorpusSource]:
    """Fetch all packages of the sources; returns the sources, with `missing` set where a package is missing."""
    packages = [source.argument for source in sources if isinstance(source, PackageSource)]
    failed = _fetch_each(packages, progress or (lambda activity, done, total: None))
    damaged = [error for error in failed.values() if isinstance(error, DataError)]
    if damaged:
        raise damaged[0]
    lost = {argument: error for argument, error in failed.items() if isinstance(error, PeerError)}
    if lost:
        raise _combined(lost, len(packages), PeerLost, "run the same command again: what was fetched is kept")
    if failed and not skip_missing:
        raise _combined(failed, len(packages), UserError, "remove them, or pass --skip-missing")
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


def _fetch_each(packages: Sequence[str], progress: Progress) -> dict[str, LakhError]:
    """Fetch all; returns the errors by argument."""
    by_kind: dict[str, list[str]] = {}
    for argument in packages:
        by_kind.setdefault(argument.partition(":")[0], []).append(argument)
    failed: dict[str, LakhError] = {}
    with contextlib.ExitStack() as stack:
        results = []
        for kind, few in by_kind.items():
            # The threads of a ThreadPool are daemons: Ctrl-C ends the program, not the last of a thousand downloads.
            pool = stack.enter_context(ThreadPool(min(THREADS_OF.get(kind, THREADS), len(few))))
            results.append(pool.imap_unordered(_try_fetch, few))
        for done, (argument, error) in enumerate(itertools.chain.from_iterable(results), 1):
            progress("fetching", done, len(packages))
            if error is not None:
                failed[argument] = error
    return failed


def _try_fetch(argument: str) -> tuple[str, LakhError | None]:
    try:
        fetch(argument)
    except LakhError as error:
        return argument, error
    return argument, None
