"""Full collections of garbage come where nobody waits, and nowhere else."""

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


def forgotten_knot() -> weakref.ref[Knot]:
    """One that outlived its youth: only a full collection finds it."""
    knot = Knot()
    gc.collect(1)
    gc.collect(1)
    return weakref.ref(knot)


def test_a_quiet_process_collects_when_told_and_another_is_left_alone() -> None:
    before = gc.get_threshold()
    with gc_control.full_collections_disabled():
        assert gc.get_threshold()[:2] == before[:2]
        old = forgotten_knot()
        gc.collect(1)
        assert old() is not None
        gc_control.collect_now()
        assert old() is None
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
    old = forgotten_knot()
    gc_control.collect_now()
    assert old() is not None


def test_a_worker_tidies_up_once_it_has_nothing_to_do(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    tidied = threading.Event()
    monkeypatch.setattr(engine_thread, "COLLECT_IDLE_S", 0.01)
    monkeypatch.setattr(engine_thread, "collect_now", tidied.set)
    worker = EngineThread(engine, 4)

    async def ask() -> None:
        over = asyncio.Event()
        worker.submit(
            EngineJob(
                [engine.make_sequence((5, 6), SamplingParams(max_tokens=2))],
                lambda heard: over.set() if not heard else None,
            )
        )
        await asyncio.wait_for(over.wait(), 30)

    try:
        assert not tidied.wait(0.1)  # it has not worked yet
        asyncio.run(ask())
        assert tidied.wait(30)
    finally:
        worker.close(30)
