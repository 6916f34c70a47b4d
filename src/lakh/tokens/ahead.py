"""Reading ahead: a process of its own fills a ring of batches in shared memory while the trainer works.

The trainer's process makes the ring, starts `python -m lakh.tokens.ahead` with the question as one line of JSON on its
stdin, and takes batches strictly in order. Words on the pipes:

    to the reader     one byte for each slot that is free again; the end of the pipe means: stop
    from the reader   u64 step of a slot that is full; or FAILED and one line of JSON, an error of lakh.errors

The reader imports no torch. It ignores SIGINT and SIGTERM: a trainer that was asked to stop still wants its last
batch, and the end of the pipe ends the reader however the trainer went. A reader that dies is a PeerLost; a batch that
does not come within `timeout_s` is a PeerTimeout. Time spent waiting is counted (`wait_s`), and so are the batches
that were not there when they were asked for (`starved`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from lakh import config, errors
from lakh.errors import LakhError, PeerLost, PeerTimeout
from lakh.spec import Data
from lakh.tokens.digest import StreamDigest, digest_rows
from lakh.tokens.loader import Stream, document_numbers

__all__ = ["Question", "ReadAhead", "Taken"]

TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 5.0
FAILED = 2**64 - 1
DIGEST_BYTES = 40


@dataclass(frozen=True)
class Question:
    """Which rows a rank reads: at step s, `rows` rows from position first_position + (s - first_step) * batch + offset
    on."""

    data: Data
    seed: int
    first_step: int
    last_step: int
    first_position: int
    offset: int
    rows: int

    def position(self, step: int) -> int:
        return self.first_position + (step - self.first_step) * self.data.batch + self.offset


@dataclass(frozen=True)
class Taken:
    """One batch. The arrays are views of the ring: copy what must outlive the next `take`."""

    tokens: np.ndarray
    lengths: np.ndarray
    documents: np.ndarray | None
    digest: StreamDigest


class _Ring:
    """Slots of equal size in one shared memory: tokens, lengths, document numbers, digest."""

    def __init__(self, question: Question, descriptor: int) -> None:
        data, rows = question.data, question.rows
        self.depth = max(1, min(data.prefetch, question.last_step - question.first_step))
        self.shapes = [(rows, data.sequence + 1), (rows,), (rows, data.sequence) if data.document_mask else (0,)]
        sizes = [4 * int(np.prod(shape)) for shape in self.shapes]
        self.slot_bytes = -(-(sum(sizes) + DIGEST_BYTES) // 64) * 64
        self.size_bytes = self.depth * self.slot_bytes
        if os.fstat(descriptor).st_size < self.size_bytes:
            os.ftruncate(descriptor, self.size_bytes)
        self.memory = mmap.mmap(descriptor, self.size_bytes)

    def slot(self, number: int) -> tuple[list[np.ndarray], int]:
        """The arrays of a slot, and where its digest lies."""
        place = (number % self.depth) * self.slot_bytes
        arrays = []
        for shape in self.shapes:
            count = int(np.prod(shape))
            arrays.append(np.frombuffer(self.memory, np.int32, count, place).reshape(shape))
            place += 4 * count
        return arrays, place


class ReadAhead:
    """Batches first_step, first_step + 1, ... of a question, up to data.prefetch of them ahead."""

    def __init__(self, question: Question, *, timeout_s: float = TIMEOUT_S) -> None:
        self.question, self.timeout_s = question, timeout_s
        self.wait_s = 0.0
        """Seconds that the caller has waited in `take` so far."""
        self.starved = 0
        """Batches, after the first, that were not ready when they were asked for."""
        self.ready = 0
        """Batches that are ready now."""
        self._next, self._open, self._buffer = question.first_step, False, b""
        with _anonymous_file() as file:
            self._ring = _Ring(question, file.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lakh.tokens.ahead", str(file.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[file.fileno()],
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        os.set_blocking(self._from.fileno(), False)
        self._say((json.dumps(_to_plain(question)) + "\n").encode())

    def take(self, step: int) -> Taken:
        """The batch of `step`, which must be the next one."""
        if step != self._next or step >= self.question.last_step:
            raise IndexError(f"asked for step {step}; the next is {self._next} of {self.question.last_step}")
        if self._open:
            self._say(b".")
            self._open = False
        self._listen(0.0)
        if not self.ready:
            self.starved += step > self.question.first_step
            began_s = time.monotonic()
            while not self.ready:
                left_s = self.timeout_s - (time.monotonic() - began_s)
                if left_s <= 0:
                    raise PeerTimeout(
                        f"data of step {step}",
                        f"nothing came within {self.timeout_s:g} s",
                        "check the disk or network that holds the data, then try again",
                    )
                self._listen(left_s)
            self.wait_s += time.monotonic() - began_s
        self.ready -= 1
        self._next, self._open = step + 1, True
        (tokens, lengths, documents), place = self._ring.slot(step - self.question.first_step)
        digest = StreamDigest.from_bytes(self._ring.memory[place : place + DIGEST_BYTES])
        return Taken(tokens, lengths, documents if self.question.data.document_mask else None, digest)

    def close(self) -> None:
        """End the reader. What it has read ahead is thrown away."""
        for pipe in (self._to, self._from):
            with contextlib.suppress(OSError):  # it went first
                pipe.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _say(self, words: bytes) -> None:
        try:
            self._to.write(words)
            self._to.flush()
        except OSError:  # it has gone; what it said last, if anything, tells why
            self._listen(0.0)

    def _listen(self, timeout_s: float) -> None:
        """Take in what the reader says; waits up to `timeout_s` for a first word."""
        if not select.select([self._from], [], [], timeout_s)[0]:
            return
        while chunk := _read_now(self._from):
            self._buffer += chunk
        while len(self._buffer) >= 8:
            (step,) = struct.unpack_from("<Q", self._buffer)
            if step == FAILED:
                if self.ready:
                    return  # the batches before the failure are good
                self._raise_theirs()
            self._buffer = self._buffer[8:]
            self.ready += 1
        if chunk == b"" and not self.ready:
            code = self._process.wait(CLOSE_TIMEOUT_S)
            if self._next < self.question.last_step:
                found = f"the reading process ended with exit code {code}"
                raise PeerLost(f"data of step {self._next}", found, "see its last words above; lakh resume goes on")

    def _raise_theirs(self) -> None:
        os.set_blocking(self._from.fileno(), True)
        document = json.loads(self._buffer[8:] + self._from.read())
        raise errors.from_dict(document)


def _read_now(pipe: Any) -> bytes | None:
    """What is there; None where nothing is, b"" at the end."""
    try:
        return os.read(pipe.fileno(), 1 << 16)
    except BlockingIOError:
        return None


def _anonymous_file() -> BinaryIO:
    """Memory that two processes can map: no name, no limit of /dev/shm, gone with its last user."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("lakh-ahead"), "r+b")
    return tempfile.TemporaryFile()


def _to_plain(question: Question) -> dict[str, Any]:
    fields = {f.name: getattr(question, f.name) for f in dataclasses.fields(question)}
    return {**fields, "data": config.to_dict(question.data)}


def _from_plain(plain: dict[str, Any]) -> Question:
    return Question(**{**plain, "data": config.from_dict(Data, plain["data"], origin="trainer")})


def _serve(question: Question, descriptor: int, to: BinaryIO) -> None:
    """The reader's work: fill slots until the last step, or until the other end hangs up."""
    ring = _Ring(question, descriptor)
    stream = Stream.open(question.data, question.seed)
    for number, step in enumerate(range(question.first_step, question.last_step)):
        if number >= ring.depth and not sys.stdin.buffer.read(1):
            return
        position = question.position(step)
        rows = stream.rows(position, question.rows)
        (tokens, lengths, documents), place = ring.slot(number)
        tokens[:], lengths[:] = rows.tokens, rows.lengths
        if question.data.document_mask:
            documents[:] = document_numbers(rows)
        ring.memory[place : place + DIGEST_BYTES] = digest_rows(position, rows.tokens, rows.lengths).to_bytes()
        to.write(struct.pack("<Q", step))
        to.flush()
    sys.stdin.buffer.read()  # the ring must live until the last batch was taken


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    to = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not look like a step
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    try:
        _serve(_from_plain(json.loads(line)), int(sys.argv[1]), to)
    except BrokenPipeError:
        return 0
    except LakhError as error:
        to.write(struct.pack("<Q", FAILED) + json.dumps(error.as_dict()).encode())
        to.flush()
        return error.exit_code
    except Exception:  # noqa: BLE001 - the outermost frame of this process: a bug of ours
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdin = None  # its buffered reader may hold a lock that exit would wait for
    os._exit(code)
