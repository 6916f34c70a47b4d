"""Many packages at once: fetched by a few threads, whatever one of them says about its neighbours.

A name that its index does not have stops nothing: the others are fetched first, then all missing names are told
together, or (with `skip_missing`) become one counted row each. What the network lost is told last and is worth another
try: the cache keeps the rest. Few threads for npm, which is a program of its own each time;
an index or a mirror is asked by THREADS at most.

Fails with UserError (names), PeerLost (the network) and DataError (a file with another hash than its index says).
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
    """The same sources, after all that they name was fetched; what is missing says so when it is listed."""
    wanted = [source for source in sources if isinstance(source, PackageSource)]
    failed = _each(wanted, progress or (lambda what, done, total: None))
    damaged = [error for error in failed.values() if isinstance(error, DataError)]
    if damaged:
        raise damaged[0]
    lost = {word: error for word, error in failed.items() if isinstance(error, PeerError)}
    if lost:
        raise _told(lost, len(wanted), PeerLost, "run the same command again: what was fetched is kept")
    if failed and not skip_missing:
        raise _told(failed, len(wanted), UserError, "leave them out, or pass --skip-missing")
    return [
        replace(source, missing=failed[source.word].found)
        if isinstance(source, PackageSource) and source.word in failed
        else source
        for source in sources
    ]


def _told(failed: Mapping[str, LakhError], total: int, kind: type[LakhError], todo: str) -> LakhError:
    """One error for several; a single one speaks for itself."""
    if len(failed) == 1:
        return next(iter(failed.values()))
    shown = [f"{word} ({error.found})" for word, error in sorted(failed.items())]
    more = f", and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return kind(f"{len(failed)} of {total} packages", f"not fetched: {', '.join(shown[:SHOWN])}{more}", todo)


def _each(wanted: Sequence[PackageSource], progress: Progress) -> dict[str, LakhError]:
    """Fetch all; the errors by word."""
    answers: queue.Queue[tuple[str, LakhError | BaseException | None]] = queue.Queue()
    by_kind: dict[str, queue.Queue[str]] = {}
    for source in wanted:
        by_kind.setdefault(source.word.partition(":")[0], queue.Queue()).put(source.word)
    for kind, words in by_kind.items():
        for _ in range(min(THREADS_OF.get(kind, THREADS), words.qsize())):
            # Daemons: Ctrl-C ends the program, not the last of a thousand downloads.
            threading.Thread(target=_work, args=(words, answers.put), daemon=True).start()
    failed: dict[str, LakhError] = {}
    for done in range(len(wanted)):
        word, error = _await(answers)
        progress("fetching", done + 1, len(wanted))
        if isinstance(error, LakhError):
            failed[word] = error
        elif error is not None:
            raise error  # a bug of ours
    return failed


def _await(
    answers: queue.Queue[tuple[str, LakhError | BaseException | None]],
) -> tuple[str, LakhError | BaseException | None]:
    """The next answer. Each fetch has limits of its own, so one comes; the short waits let Ctrl-C through."""
    while True:
        try:
            return answers.get(timeout=WAIT_S)
        except queue.Empty:
            continue


def _work(words: queue.Queue[str], answer: Callable[[tuple[str, BaseException | None]], None]) -> None:
    while True:
        try:
            word = words.get_nowait()
        except queue.Empty:
            return
        try:
            fetch(word)
        except BaseException as error:  # noqa: BLE001 - told to whoever waits
            answer((word, error))
        else:
            answer((word, None))
