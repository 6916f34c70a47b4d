"""A run that is still training, served: each new complete checkpoint becomes the engine's weights.

A thread looks into the run's folder every few seconds. What is not complete is not seen (its manifest comes last); what
cannot be read is logged and looked at again. EncodeOptions and rounding happen beside the work; the change itself between two
steps. Knows folders and an engine; knows nothing of trainers.
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
        swapped: Callable[[str, float], None] = lambda folder, seconds: None,
    ) -> None:
        """`swapped` hears the checkpoint's folder and the seconds in which no step was taken."""
        self._engine, self._path, self._every_s, self._swapped = engine, path, every_s, swapped
        self.current = checkpoint.find(path)
        if self.current == path:
            raise UserError(path, "is one checkpoint, which does not change", "follow the run's folder")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="lakh-follow", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(CLOSE_S)

    def look(self) -> bool:
        """Take over the newest checkpoint if it is another; True if it was."""
        newest = checkpoint.find(self._path)
        if newest == self.current:
            return False
        loaded = model_weights.read(newest)
        if loaded.spec != self._engine.spec:
            self.current = newest  # said once
            raise UserError(newest, "is a model of another shape", "serve it anew")
        staged = self._engine.stage()
        staged.load(loaded.weights)
        began_s = time.perf_counter()
        version = self._engine.swap(staged)
        took_s = time.perf_counter() - began_s
        self.current = newest
        log.info("weights of %s are version %d; no step for %.1f ms", newest, version, took_s * 1e3)
        self._swapped(newest, took_s)
        return True

    def _loop(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self.look()
            except (LakhError, OSError) as error:
                log.warning("following %s: %s", self._path, error)
            except Exception as error:  # noqa: BLE001 - the next checkpoint may be read; a thread that ended reads none
                log.error("following %s: %s: %s", self._path, type(error).__name__, error)
