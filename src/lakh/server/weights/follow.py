"""Serves a run that is still training: loads each new complete checkpoint into the engine.

A thread polls the run's folder. Incomplete checkpoints are invisible (their manifest is written last); one that cannot
be read is logged and tried again. Reading and conversion run beside the engine's steps; the swap happens between two
steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from lakh import checkpoint
from lakh.errors import LakhError, UserError
from lakh.server.engine import Engine
from lakh.server.model import weights as model_weights

__all__ = ["CheckpointFollower"]

log = logging.getLogger(__name__)
CLOSE_S = 5.0


class CheckpointFollower:
    def __init__(
        self,
        engine: Engine,
        path: str,
        *,
        every_s: float = 5.0,
        on_swap: Callable[[str, float], None] = lambda folder, seconds: None,
    ) -> None:
        """Calls `on_swap` with the checkpoint's folder and the seconds of the swap."""
        self._engine, self._path, self._every_s, self._on_swap = engine, path, every_s, on_swap
        self.current = checkpoint.find(path)
        if self.current == path:
            raise UserError(path, "is a single checkpoint, which does not change", "follow the run's folder")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="lakh-follow", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(CLOSE_S)

    def poll(self) -> bool:
        """Load the newest checkpoint if it is not the current one; returns whether it did."""
        newest = checkpoint.find(self._path)
        if newest == self.current:
            return False
        loaded = model_weights.read(newest)
        if loaded.spec != self._engine.spec:
            self.current = newest  # report it once
            raise UserError(newest, "is a model of another shape", "restart the server to serve it")
        staged = self._engine.stage()
        staged.load(loaded.weights)
        self.current = newest  # also where the engine refuses it: report it once
        began_s = time.perf_counter()
        version = self._engine.swap(staged)
        took_s = time.perf_counter() - began_s
        log.info("weights of %s are version %d; swapped in %.1f ms", newest, version, took_s * 1e3)
        self._on_swap(newest, took_s)
        return True

    def _loop(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self.poll()
            except (LakhError, OSError) as error:
                log.warning("following %s: %s", self._path, error)
            except Exception as error:  # noqa: BLE001 - the thread must survive to read the next checkpoint
                log.error("following %s: %s: %s", self._path, type(error).__name__, error)
