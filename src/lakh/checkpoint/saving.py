"""Write a checkpoint: every rank writes its slices, then rank 0 writes the manifest.

    save              write a checkpoint and wait for it
    CheckpointSave    write in background threads; blocks the caller only while the tensors are copied

A CheckpointSave has two phases, each with a thread: `start` writes the files, `start_manifest` the manifest. A caller
that never blocks on storage waits for each with `phases_done`. Each distinct slice is written once, by the first rank
that holds it. `finish` raises on every rank if writing failed on any of them; the incomplete folder is ignored, and the
next save of that step overwrites it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lakh import __version__, storage
from lakh.checkpoint.chunk_hashes import hash_content
from lakh.checkpoint.format import Manifest, StoredFile, StoredSlice, StoredTensor
from lakh.checkpoint.host_copies import HostCopies
from lakh.checkpoint.incremental import DeltaChain, EncodedState, Squares, combine_errors
from lakh.checkpoint.slices import TensorSlice, dtype_name, slice_of
from lakh.checkpoint.tensor_file import write_tensors
from lakh.errors import LakhError, PeerLost, PeerTimeout

__all__ = ["CheckpointSave", "save"]

WRITE_TIMEOUT_S = 3600.0  # for one rank's file, and for the manifest; a slower disk counts as hanging

Gather = Callable[[Any], list[Any] | None]
"""Gathers one value of each rank on rank 0; returns None on the others."""
Broadcast = Callable[[Any], Any]
"""Returns rank 0's value on every rank."""


def save(folder: str, tensors: Mapping[str, Tensor | TensorSlice], **facts: Any) -> Manifest:
    """Write a checkpoint from one process. `facts` are the keyword arguments of CheckpointSave."""
    saving = CheckpointSave(folder, tensors, **facts)
    saving.write()
    return saving.finish()


class CheckpointSave:
    """One rank's part of a checkpoint that is being written."""

    def __init__(
        self,
        folder: str,
        tensors: Mapping[str, Tensor | TensorSlice],
        *,
        step: int,
        sequence_index: int,
        run_sha256: str,
        data_sha256: str,
        attachments: Mapping[str, bytes],
        rank: int = 0,
        world: int = 1,
        writes_whole: bool | None = None,
        chain: DeltaChain | None = None,
        on_complete: Callable[[], None] = lambda: None,
    ) -> None:
        """`writes_whole`: this rank writes the plain tensors, which several ranks hold. One rank of each pipeline
        stage does so; by default rank 0. `chain`: write an incremental checkpoint when it is time for one.
        `on_complete`: rank 0 calls it after the manifest, in the same thread."""
        self.folder, self.step = folder, step
        self._file, self._attachments = f"rank-{rank:05d}.safetensors", attachments if rank == 0 else {}
        self._facts: dict[str, Any] = {
            "step": step,
            "sequence_index": sequence_index,
            "run_sha256": run_sha256,
            "data_sha256": data_sha256,
            "world": world,
            "mode": chain.next_mode if chain else "full",
            "base": chain.next_base if chain else None,
        }
        self._chain, self._copies = chain, HostCopies()
        writes_whole = rank == 0 if writes_whole is None else writes_whole
        held = {name: slice_of(tensor) for name, tensor in tensors.items() if chain is None or chain.is_kept(name)}
        mine = {name: part for name, part in held.items() if (writes_whole if part.writes is None else part.writes)}
        self._boxes = {
            name: (self._stored_dtype(part.local.dtype), part.shape, part.offset, tuple(part.local.shape))
            for name, part in mine.items()
        }
        self._tensors = {name: part.local for name, part in mine.items()}
        self._entries: dict[str, StoredFile] = {}
        self._decoded: dict[str, Tensor] = {}
        self._squares: Squares = {}
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._on_complete = on_complete
        self._manifest_thread: threading.Thread | None = None  # on rank 0
        self.is_gathered = False
        """Whether `start_manifest` was called."""
        self._outcome: Manifest | LakhError | None = None

    @property
    def bytes_to_write(self) -> int:
        """Bytes of this rank's tensors that are not written yet."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def leave_chain(self) -> None:
        """Write a full checkpoint that no other one will be relative to. Only for the first one of a chain."""
        assert self._facts["mode"] == "full"
        self._chain = None

    def start(self, copies: HostCopies) -> None:
        """Copy the tensors and write the copies in a thread. The copies stay in use until `finish`."""
        self._tensors, self._copies = copies.take(self._tensors), copies
        # A daemon thread, so that the process can exit while a disk hangs.
        self._thread = threading.Thread(target=self._write_or_fail, name="lakh-checkpoint", daemon=True)
        self._thread.start()

    @property
    def phases_done(self) -> int:
        """1 when this rank's file is written; 2 when the manifest is, on the other ranks when it was started."""
        return int(not _is_alive(self._manifest_thread if self.is_gathered else self._thread)) + self.is_gathered

    def wait(self, timeout_s: float) -> bool:
        """Wait until writing has ended or failed; False if it is still running after `timeout_s`."""
        threads = self._thread, self._manifest_thread
        for thread in threads:
            if thread is not None:
                thread.join(timeout_s)
        return not any(_is_alive(thread) for thread in threads)

    def write_now(self) -> None:
        """Write this rank's file and wait; `finish` raises what failed."""
        self._write_or_fail()

    def write(self) -> None:
        """Write this rank's file, and on rank 0 the attachments."""
        storage.make_dir(self.folder)
        if self._chain is not None and self._thread is None:  # the chain keeps what it writes
            self._tensors = self._copies.take(self._tensors)
        tensors = {name: tensor.detach().cpu() for name, tensor in self._tensors.items()}
        encoded = self._encode(tensors)
        self._entries[self._file] = write_tensors(storage.join(self.folder, self._file), encoded.data)
        self._tensors, self._decoded, self._squares = {}, encoded.decoded, encoded.squares
        if self._chain is not None and self._thread is not None and self._chain.keeps_copies:
            self._copies.prepare_spare(encoded.decoded)
        for name, content in self._attachments.items():
            storage.write_bytes(storage.join(self.folder, name), content)
            self._entries[name] = hash_content(content)

    def _stored_dtype(self, dtype: torch.dtype) -> str:
        return dtype_name(torch.bfloat16 if self._facts["mode"] == "weights" else dtype)

    def _encode(self, tensors: dict[str, Tensor]) -> EncodedState:
        if self._facts["mode"] == "weights":
            return EncodedState({name: tensor.bfloat16() for name, tensor in tensors.items()}, {})
        if self._chain is None or self._facts["base"] is None:
            return EncodedState(tensors, tensors if self._chain else {})
        return self._chain.encode(tensors)

    def _write_or_fail(self) -> None:
        try:
            self.write()
        except BaseException as failure:  # noqa: BLE001 - `finish` raises it in the caller's thread
            self._failure = failure

    def finish(self, gather: Gather = lambda value: [value], broadcast: Broadcast = lambda value: value) -> Manifest:
        """Complete the checkpoint, as `try_finish` does; every rank raises the error of a rank that failed."""
        outcome = self.try_finish(gather, broadcast)
        if isinstance(outcome, LakhError):
            raise outcome
        return outcome

    def start_manifest(self, gather: Gather) -> None:
        """Wait until this rank's file is written; on rank 0 write the manifest in a thread. A collective."""
        failure = self._failure_of(self._file)
        gathered = gather((failure, self._file, self._entries, self._boxes, self._squares))
        self.is_gathered = True
        if gathered is not None:
            self._manifest_thread = threading.Thread(
                target=self._complete_or_fail, args=(gathered,), name="lakh-manifest", daemon=True
            )
            self._manifest_thread.start()

    def try_finish(self, gather: Gather, broadcast: Broadcast) -> Manifest | LakhError:
        """Wait until this rank's file is written, then complete the checkpoint. A collective.

        Returns the manifest, or on every rank the error of a rank that failed; then the checkpoint stays incomplete.
        """
        if not self.is_gathered:
            self.start_manifest(gather)
        failure = self._failure_of(storage.MANIFEST) if self._manifest_thread is not None else None
        outcome: Manifest | LakhError = broadcast(failure or self._outcome)
        if self._failure is not None and not isinstance(self._failure, LakhError):
            raise self._failure  # a bug: with its traceback
        if self._chain is not None and isinstance(outcome, Manifest):
            self._chain.saved(self.folder, outcome, self._decoded, self._copies)
        elif self._chain is not None:
            self._chain.reset()
        return outcome

    def _failure_of(self, file: str) -> LakhError | None:
        """Wait for the thread that runs; why `file` was not written."""
        where = storage.join(self.folder, file)
        if not self.wait(WRITE_TIMEOUT_S):
            found = f"is still being written after {WRITE_TIMEOUT_S:g} s"
            self._failure = PeerTimeout(where, found, "check the disk, then: lakh resume")
        if self._failure is None or isinstance(self._failure, LakhError):
            return self._failure
        return PeerLost(where, f"was not written ({self._failure!r})", "see the output of that rank")

    def _complete_or_fail(self, gathered: Sequence[tuple[LakhError | None, str, Any, Any, Any]]) -> None:
        try:
            self._outcome = self._complete(gathered)
            if isinstance(self._outcome, Manifest):
                self._on_complete()
        except BaseException as failure:  # noqa: BLE001 - `try_finish` raises it in the caller's thread
            self._failure = failure

    def _complete(self, gathered: Sequence[tuple[LakhError | None, str, Any, Any, Any]]) -> Manifest | LakhError:
        """On rank 0: write the manifest, or return the first error."""
        failures = [failure for failure, *_ in gathered if failure is not None]
        if failures:
            return failures[0]
        manifest = Manifest(
            **self._facts,
            files={name: entry for _, _, entries, _, _ in gathered for name, entry in entries.items()},
            tensors=_collect([(file, boxes) for _, file, _, boxes, _ in gathered]),
            errors=combine_errors([squares for *_, squares in gathered]),
            versions={"lakh": __version__, "torch": torch.__version__},
        )
        try:
            return manifest.write(self.folder)
        except LakhError as error:
            return error


def _is_alive(thread: threading.Thread | None) -> bool:
    return thread is not None and thread.is_alive()


def _collect(written: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, StoredTensor]:
    """The stored slices of each tensor."""
    tensors: dict[str, StoredTensor] = {}
    for file, boxes in written:
        for name, (dtype, shape, offset, size) in boxes.items():
            before = tensors[name].slices if name in tensors else ()
            tensors[name] = StoredTensor(dtype, shape, (*before, StoredSlice(file, offset, size)))
    return tensors
