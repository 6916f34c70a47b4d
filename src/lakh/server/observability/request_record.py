"""What is recorded about each completion request, for logs, traces and costs. Never its prompt or its text.

RequestLog   one JSON line per request, to a file or to standard error
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from lakh.errors import UserError
from lakh.server.backend import PhaseTimes, Usage
from lakh.server.request import CompletionRequest

__all__ = ["RequestLog", "RequestObserver", "RequestRecord"]

log = logging.getLogger(__name__)

DIGITS = 6  # of seconds in a log
WARN_EVERY_S = 60.0


@dataclass
class RequestRecord:
    path: str
    """The HTTP path or gRPC method."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Of the request, for the trace that it belongs to."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    began_at_s: float = field(default_factory=time.time)
    _began_s: float = field(default_factory=time.monotonic)
    status: int = 200
    """499 if the client disconnected."""
    error: str | None = None
    request: CompletionRequest | None = None
    """None if it was invalid."""
    model: str | None = None
    finish_reasons: list[str] = field(default_factory=list)
    first_text_s: float | None = None
    total_s: float = 0.0
    usage: Usage | None = None
    trace_id: str | None = None

    @property
    def phases(self) -> PhaseTimes | None:
        """In the engine; None for a cached completion and in a gateway."""
        return None if self.usage is None else self.usage.phases

    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def as_dict(self) -> dict[str, Any]:
        """Flat and JSON-safe; fields that are not known are left out."""
        began = datetime.datetime.fromtimestamp(self.began_at_s, datetime.UTC)
        request, usage, phases = self.request, self.usage, self.phases
        fields: dict[str, Any] = {
            "time": began.isoformat(timespec="milliseconds"),
            "event": "completion",
            "id": self.id,
            "trace_id": self.trace_id,
            "path": self.path,
            "status": self.status,
            "error": self.error,
            "model": self.model,
            "tenant": None if request is None else request.tenant,
            "stream": None if request is None else request.stream,
            "n": None if request is None else request.n,
            "max_tokens": None if request is None else request.max_tokens,
            "chars": None if request is None else request.num_chars,
            "finish_reasons": self.finish_reasons or None,
            "prompt_tokens": None if usage is None else usage.prompt_tokens,
            "cached_tokens": None if usage is None else usage.cached_tokens,
            "completion_tokens": None if usage is None else usage.completion_tokens,
            "from_cache": None if usage is None else usage.is_cached,
            "first_text_s": self.first_text_s,
            "queue_s": None if phases is None else phases.queue_s,
            "prefill_s": None if phases is None else phases.prefill_s,
            "decode_s": None if phases is None else phases.decode_s,
            "total_s": self.total_s,
        }
        return {
            name: round(value, DIGITS) if isinstance(value, float) else value
            for name, value in fields.items()
            if value is not None
        }


class RequestObserver(Protocol):
    """Told about every completion request: when it begins and when it has ended. Must not raise."""

    def begin(self, record: RequestRecord) -> None: ...

    def finish(self, record: RequestRecord) -> None: ...


class RequestLog:
    """Lines that cannot be written (the disk is full) are lost: requests go on."""

    def __init__(self, path: str) -> None:
        """`path`: a file that is appended to, or - for standard error."""
        self._path = path
        self._lock = threading.Lock()
        self._file: BinaryIO = sys.stderr.buffer if path == "-" else _open(path)
        self.num_lost = 0
        self._warn_at_s = 0.0

    def begin(self, record: RequestRecord) -> None:
        """A line is written at the end only."""

    def finish(self, record: RequestRecord) -> None:
        line = json.dumps(record.as_dict(), separators=(",", ":"))
        with self._lock:
            try:
                self._file.write(f"{line}\n".encode())
                self._file.flush()
            except (OSError, ValueError) as error:
                self._lost(error)

    def _lost(self, error: Exception) -> None:
        self.num_lost += 1
        if time.monotonic() >= self._warn_at_s:
            self._warn_at_s = time.monotonic() + WARN_EVERY_S
            log.warning("--request-log %s cannot be written (%s): %d lines are lost", self._path, error, self.num_lost)

    def reopen(self) -> None:
        """After the file was moved away (log rotation)."""
        if self._path != "-":
            new = _open(self._path)
            with self._lock:
                self._file, old = new, self._file
            old.close()


def _open(path: str) -> BinaryIO:
    try:
        return Path(path).open("ab", buffering=0)  # a buffer would keep lines that cannot be written
    except OSError as error:
        todo = "give a file in a folder that exists and is writable, or - for standard error"
        raise UserError(f"--request-log {path}", f"cannot be written ({error.strerror})", todo) from None
