"""Save and restore the training state: tensors, step, position in the data, and the hash of the data so far.

`begin_save` copies the state and starts a thread that writes it; when every rank has written its part, `advance_save`
starts the manifest on rank 0, and when that is written too, it ends the save. `finish_save` waits for all of this.
Training continues in between and does not wait for storage, unless there is no memory for the copy. It also continues
after a save that failed, which writes a CheckpointFailed event; the next save tries again, and the last save of a run
must succeed (`require_saved`). stream.json in the checkpoint holds the hash of the stream up to its position.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable

from torch import Tensor

from lakh import checkpoint, config, storage
from lakh.checkpoint.memory_copies import CopyFacts
from lakh.checkpoint.slices import TensorSlice, slice_of
from lakh.errors import CorruptCheckpoint, DiskFull, LakhError, UserError
from lakh.events import (
    AutoChoice,
    CheckpointFailed,
    CheckpointSaved,
    CheckpointSkipped,
    MemoryCopied,
    MemoryRestored,
    SettingChanged,
)
from lakh.spec import Checkpoints, Run
from lakh.tokens.loading.digest import StreamDigest
from lakh.trainer.data import DataFeed, merge_skips
from lakh.trainer.launch.world import World
from lakh.trainer.observability.event_writer import EventWriter
from lakh.trainer.optim.optimizer import role_of
from lakh.trainer.recovery.peer_memory import PeerMemory, memory_folder
from lakh.trainer.recovery.resume_rules import check_changes
from lakh.trainer.run_folder import read_run_id

__all__ = ["Checkpointer"]

STREAM = "stream.json"
DROP_TIMEOUT_S = 60.0


class Checkpointer:
    def __init__(
        self,
        run_dir: str,
        settings: Checkpoints,
        state: Callable[[], dict[str, Tensor | TensorSlice]],
        world: World,
        events: EventWriter,
    ) -> None:
        """`state` returns this rank's part of the tensors by name."""
        self._run_dir, self._settings, self._world, self._events = run_dir, settings, world, events
        self._home = settings.url or run_dir
        self._state = state
        self.last_saved = ""
        """Folder of the last complete checkpoint."""
        self._good: set[str] = set()  # checkpoints that this process restored or wrote
        self._complete: dict[str, int] | None = None  # on rank 0: step of each folder with a manifest, if known
        self._save: checkpoint.CheckpointSave | None = None
        self._copies = checkpoint.HostCopies()
        self._chain = _delta_chain(settings.incremental)
        self._in_background: bool | None = None
        self._paused_s = 0.0
        self._failure: LakhError | None = None  # of the last save
        self._run_id, self._memory = "", None
        if settings.memory_every:
            self._run_id = world.broadcast(read_run_id(run_dir) if world.rank == 0 else None)
            self._memory = PeerMemory(memory_folder(self._run_id), world)

    @property
    def tensors(self) -> dict[str, Tensor | TensorSlice]:
        return self._state()

    def is_due(self, step: int) -> bool:
        return bool(self._settings.every) and step % self._settings.every == 0

    def restore(self, run: Run, data: DataFeed, *, from_memory: bool = True) -> tuple[Run, int]:
        """Load the newest copy in memory, or the newest undamaged checkpoint, if there is one. Returns the run, with
        the skipped sequences of the checkpoint, and the step."""
        if self._chain is not None:
            self._chain.reset()  # after a rewind its base is ahead
        if self._world.rank == 0:
            with contextlib.suppress(LakhError):  # storage that fails now does not keep the run from its copies
                self._complete = {folder: step for step, folder in checkpoint.list_complete(self._home)}
        if self._memory is not None and from_memory:
            step = self._restore_from_memory(self._memory, run, data)
            if step is not None:
                return run, step
        folder, damaged = checkpoint.newest_usable(
            self._home,
            rank=self._world.rank,
            world=self._world.size,
            gather=self._world.gather,
            broadcast=self._world.broadcast,
        )
        for error in damaged:
            self._events.write(CheckpointSkipped(path=error.where, reason=error.found))
        if folder is None:
            if damaged:
                found = f"every checkpoint is damaged; {damaged[0]}"
                raise CorruptCheckpoint(self._home, found, "train again from the start")
            return run, 0
        saved = checkpoint.read_run(folder)
        position = checkpoint.Manifest.read(folder).sequence_index
        skip = merge_skips(saved.data.skip, run.data.skip, position)
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, skip=skip))
        changes = check_changes(saved, run)
        manifest = checkpoint.load(folder, self.tensors)
        if manifest.data_sha256 != data.fingerprint:
            raise UserError(
                data.source.url,
                "is not the data that the run started with (its fingerprint differs)",
                f"set {data.source.setting} to the original data, or start a new run",
            )
        for path, before, after in changes:
            self._events.write(SettingChanged(step=manifest.step, path=path, before=before, after=after))
        self.last_saved = folder
        self._good.add(folder)
        digest = _read_digest(folder) if STREAM in manifest.files else None
        data.stream.restore(manifest.sequence_index, digest)
        return run, manifest.step

    def _restore_from_memory(self, memory: PeerMemory, run: Run, data: DataFeed) -> int | None:
        """The step of the restored copy; None if there is none, or if a checkpoint is newer. A collective."""
        began_s = time.monotonic()
        saved = ((step, folder) for folder, step in (self._complete or {}).items())
        after_step, newest = self._world.broadcast(max(saved, default=(-1, "")))
        tensors = {name: slice_of(tensor).local for name, tensor in self.tensors.items()}
        found = memory.restore(self._facts_of_copy(run, 0, data, ""), after_step, tensors)
        if found is None:
            return None
        facts, received = found
        self.last_saved = newest
        data.stream.restore(facts.sequence_index, _parse_digest(facts.stream) if facts.stream else None)
        seconds = time.monotonic() - began_s
        self._events.write(MemoryRestored(step=facts.step, received=tuple(received), seconds=seconds))
        return facts.step

    def is_copy_due(self, step: int) -> bool:
        return self._memory is not None and step % self._settings.memory_every == 0

    def copy_to_memory(self, run: Run, step: int, data: DataFeed) -> None:
        """Copy the state to the memory of this node and of another one. A collective."""
        assert self._memory is not None
        began_s = time.monotonic()
        total = data.stream.total_digest(self._world, data.digest)
        data.stream.known = (data.stream.position, total)
        facts = self._facts_of_copy(run, step, data, _format_digest(total) if total is not None else "")
        try:
            size = self._memory.begin(facts, {name: slice_of(tensor).local for name, tensor in self.tensors.items()})
        except LakhError as error:
            self._events.write(CheckpointFailed(step=step, path=error.where, reason=error.found, last=self.last_saved))
            return
        self._events.write(MemoryCopied(step=step, bytes=size, seconds=time.monotonic() - began_s))

    def finish_copy(self) -> None:
        """Wait for the copy to memory in progress, if there is one."""
        if self._memory is not None:
            self._memory.finish()

    def forget_memory(self) -> None:
        """Remove the copies in memory: the run has ended and is saved."""
        self.finish_copy()
        if self._memory is not None:
            with contextlib.suppress(LakhError):
                memory_folder(self._run_id).clear()

    def _facts_of_copy(self, run: Run, step: int, data: DataFeed, stream: str) -> CopyFacts:
        return CopyFacts(
            step=step,
            rank=self._world.rank,
            world=self._world.size,
            mesh=str(run.mesh.resolve(self._world.size)),
            run_id=self._run_id,
            run_sha256=config.fingerprint(run),
            data_sha256=data.fingerprint,
            sequence_index=data.stream.position,
            stream=stream,
            skip=run.data.skip,
        )

    def begin_save(self, run: Run, step: int, data: DataFeed) -> None:
        """Copy the state and write it in the background; `finish_save` completes it. A collective.

        Finishes an earlier save first.
        """
        self.finish_save()
        began_s = time.monotonic()
        folder = storage.join(self._home, "checkpoints", checkpoint.folder_name(step))
        if self._world.rank == 0 and (self._complete is None or folder in self._complete):
            # After a rewind a step is saved again: the old checkpoint must not look complete.
            with contextlib.suppress(LakhError):  # storage that fails now fails the save too, which reports it
                storage.remove_tree(storage.join(folder, storage.MANIFEST))
        total = data.stream.total_digest(self._world, data.digest)  # also a barrier behind the removal
        data.stream.known = (data.stream.position, total)
        attachments = {"run.toml": config.to_toml(run).encode(), **data.source.attachments()}
        if total is not None:
            attachments[STREAM] = _format_digest(total).encode()
        self._save = checkpoint.CheckpointSave(
            folder,
            self.tensors,
            step=step,
            sequence_index=data.stream.position,
            run_sha256=config.fingerprint(run),
            data_sha256=data.fingerprint,
            attachments=attachments,
            rank=self._world.rank,
            world=self._world.size,
            writes_whole=run.mesh.resolve(self._world.size).leads_stage(self._world.rank),
            chain=self._chain,
            on_complete=lambda: self._prune(folder, step),
        )
        if self._saves_in_background(step, self._save.bytes_to_write):
            self._save.start(self._copies)
            self._paused_s = time.monotonic() - began_s
        else:
            self._chain = None  # there is no memory for its base
            self._save.leave_chain()
            self._save.write_now()
            self._paused_s = time.monotonic() - began_s
            self.finish_save()

    def _saves_in_background(self, step: int, own_bytes: int) -> bool:
        """Decided once by all ranks: if one has no memory for a copy, all of them wait. A collective."""
        if self._in_background is None:
            mine = checkpoint.choose_background(
                self._settings.background,
                copy_bytes=own_bytes * self._world.local_size * (2 if self._chain is not None else 1),
                free_bytes=checkpoint.free_host_bytes(),
            )
            votes: list[tuple[bool, str]] = self._world.broadcast(self._world.gather(mine))
            self._in_background, reason = min(votes)  # False, if any rank says so
            choice = "in the background" if self._in_background else "blocking"
            self._events.write(AutoChoice(step=step, what="checkpoints", choice=choice, reason=reason))
        return self._in_background

    @property
    def is_saving(self) -> bool:
        return self._save is not None

    @property
    def phases_done(self) -> int:
        """Phases of the save in progress that this rank has ended (CheckpointSave.phases_done)."""
        return self._save.phases_done if self._save is not None else 0

    def advance_save(self, phases_done: int) -> bool:
        """Go on to the phase after those that every rank has ended. False if there is nothing to do. A collective."""
        if self._save is None or phases_done == 0:
            return False
        if phases_done == 2:
            self.finish_save()
        elif not self._save.is_gathered:
            began_s = time.monotonic()
            self._save.start_manifest(self._world.gather)
            self._paused_s += time.monotonic() - began_s
        else:
            return False
        return True

    def finish_save(self) -> None:
        """Complete the save in progress, if there is one; waits for the slowest rank. A collective."""
        save, self._save = self._save, None
        if save is None:
            return
        began_s = time.monotonic()
        outcome = save.try_finish(self._world.gather, self._world.broadcast)
        self._failure = outcome if isinstance(outcome, LakhError) else None
        if isinstance(outcome, LakhError):
            failed = CheckpointFailed(step=save.step, path=outcome.where, reason=outcome.found, last=self.last_saved)
            self._events.write(failed)
            return
        self.last_saved = save.folder
        if self._world.rank == 0:
            seconds = self._paused_s + time.monotonic() - began_s
            self._events.write(CheckpointSaved(step=save.step, path=save.folder, bytes=outcome.bytes, seconds=seconds))

    def _prune(self, folder: str, step: int) -> None:
        """Remove old checkpoints after `folder` is complete. On rank 0."""
        self._good.add(folder)
        if self._complete is not None:
            self._complete[folder] = step
        with contextlib.suppress(LakhError):  # storage that fails now fails the next save too, which reports it
            checkpoint.prune(self._home, keep=self._settings.keep, known_good=self._good)

    def require_saved(self) -> None:
        """Raise the error of the last save, if it failed."""
        if self._failure is not None:
            todo = "free some space" if isinstance(self._failure, DiskFull) else self._failure.todo
            self._failure.todo = f"{todo}, then: lakh resume {self._run_dir}"
            raise self._failure

    def drop_save(self) -> None:
        """Abandon a save that cannot be completed because ranks were lost."""
        save, self._save = self._save, None
        if save is not None:
            save.wait(DROP_TIMEOUT_S)  # its folder is removed later, and must not be written to then


def _delta_chain(incremental: str) -> checkpoint.DeltaChain | None:
    if incremental == "off":
        return None
    mode = "bounded" if incremental == "factored" else incremental
    return checkpoint.DeltaChain(mode, role_of, factored=incremental == "factored")


def _format_digest(digest: StreamDigest) -> str:
    return json.dumps({"rows": digest.sequences, "total": f"{digest.total:064x}"})


def _parse_digest(text: str) -> StreamDigest:
    stored = json.loads(text)
    return StreamDigest(int(stored["rows"]), int(stored["total"], 16))


def _read_digest(folder: str) -> StreamDigest:
    try:
        return _parse_digest(storage.read_bytes(storage.join(folder, STREAM)).decode())
    except (ValueError, KeyError, TypeError):
        raise CorruptCheckpoint(storage.join(folder, STREAM), "is damaged", "resume from an earlier one") from None
