"""Full garbage collections run only while the process is idle."""

import asyncio
import gc
import threading
import weakref

import pytest

from lakh.server import gc_control
from lakh.server.backends import engine_thread
from lakh.server.backends.engine_thread import EngineJob, EngineThread
from lakh.server.engine import Engine, SamplingParams


class Knot:
    def __init__(self) -> None:
        self.itself = self


def garbage_cycle() -> weakref.ref[Knot]:
    """A cycle in the oldest generation: only a full collection finds it."""
    garbage = Knot()
    gc.collect(1)
    gc.collect(1)
    return weakref.ref(garbage)


def test_collect_now_collects_only_where_automatic_collections_are_disabled() -> None:
    before = gc.get_threshold()
    with gc_control.full_collections_disabled():
        assert gc.get_threshold()[:2] == before[:2]
        old = garbage_cycle()
        gc.collect(1)
        assert old() is not None
        gc_control.collect_now()
        assert old() is None
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
    old = garbage_cycle()
    gc_control.collect_now()
    assert old() is not None


def test_an_idle_engine_thread_collects_garbage(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    collected = threading.Event()
    monkeypatch.setattr(engine_thread, "COLLECT_IDLE_S", 0.01)
    monkeypatch.setattr(engine_thread, "collect_now", collected.set)
    worker = EngineThread(engine, 4)

    async def ask() -> None:
        over = asyncio.Event()
        worker.submit(
            EngineJob(
                [engine.make_sequence((5, 6), SamplingParams(max_tokens=2))],
                lambda update: over.set() if not update else None,
            )
        )
        await asyncio.wait_for(over.wait(), 30)

    try:
        assert not collected.wait(0.1)  # it has had no work yet
        asyncio.run(ask())
        assert collected.wait(30)
    finally:
        worker.close(30)
