"""Save and restore the training state: tensors, step, position in the data, and the hash of the data so far.

A checkpoint is saved in two phases: `begin_save` copies the state and starts a thread that writes it; `finish_save`
completes it when every rank has written its part. Training continues in between, unless there is no memory for the
copy. It also continues after a save that failed, which writes a CheckpointFailed event; the next save tries again, and
the last save of a run must succeed (`require_saved`). stream.json in the checkpoint holds the hash of the stream up to
its position.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time

import torch
from torch import Tensor, nn

from lakh import checkpoint, config, storage
from lakh.errors import CorruptCheckpoint, DiskFull, LakhError, UserError
from lakh.events import AutoChoice, CheckpointFailed, CheckpointSaved, CheckpointSkipped, SettingChanged
from lakh.spec import Checkpoints, Run
from lakh.tokens.loading.digest import StreamDigest
from lakh.trainer.data import DataFeed, merge_skips
from lakh.trainer.launch.world import World
from lakh.trainer.observability.event_writer import EventWriter
from lakh.trainer.optim.optimizer import named_state, role_of
from lakh.trainer.recovery.resume_rules import check_changes

__all__ = ["Checkpointer"]

STREAM = "stream.json"
DROP_TIMEOUT_S = 60.0


class Checkpointer:
    def __init__(
        self,
        run_dir: str,
        settings: Checkpoints,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        events: EventWriter,
    ) -> None:
        self._run_dir, self._settings, self._world, self._events = run_dir, settings, world, events
        self._home = settings.url or run_dir
        self._model, self._optimizer = model, optimizer
        self.last_saved = ""
        """Folder of the last complete checkpoint."""
        self._good: set[str] = set()  # checkpoints that this process restored or wrote
        self._save: checkpoint.CheckpointSave | None = None
        self._copies = checkpoint.HostCopies()
        self._chain = _delta_chain(settings.incremental)
        self._in_background: bool | None = None
        self._paused_s = 0.0
        self._failure: LakhError | None = None  # of the last save

    @property
    def tensors(self) -> dict[str, Tensor]:
        return named_state(self._model, self._optimizer)

    def is_due(self, step: int) -> bool:
        return bool(self._settings.every) and step % self._settings.every == 0

    def restore(self, run: Run, data: DataFeed) -> tuple[Run, int]:
        """Load the newest undamaged checkpoint, if there is one. Returns the run, with the skipped sequences of the
        checkpoint, and the step."""
        if self._chain is not None:
            self._chain.reset()  # after a rewind its base is ahead
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
                run.data.tokens,
                "is not the data that the run started with (its fingerprint differs)",
                "set data.tokens to the original token set, or start a new run",
            )
        for path, before, after in changes:
            self._events.write(SettingChanged(step=manifest.step, path=path, before=before, after=after))
        self.last_saved = folder
        self._good.add(folder)
        digest = _read_digest(folder) if STREAM in manifest.files else None
        data.stream.restore(manifest.sequence_index, digest)
        return run, manifest.step

    def begin_save(self, run: Run, step: int, data: DataFeed) -> None:
        """Copy the state and write it in the background; `finish_save` completes it. A collective.

        Finishes an earlier save first.
        """
        self.finish_save()
        began_s = time.monotonic()
        folder = storage.join(self._home, "checkpoints", checkpoint.folder_name(step))
        if self._world.rank == 0:  # after a rewind a step is saved again: the old checkpoint must not look complete
            with contextlib.suppress(LakhError):  # storage that fails now fails the save too, which reports it
                storage.remove_tree(storage.join(folder, storage.MANIFEST))
        total = data.stream.total_digest(self._world, data.digest)  # also a barrier behind the removal
        data.stream.known = (data.stream.position, total)
        attachments = {
            "run.toml": config.to_toml(run).encode(),
            "tokenizer.json": storage.read_bytes(data.tokenizer_path),
        }
        if total is not None:
            attachments[STREAM] = json.dumps({"rows": total.sequences, "total": f"{total.total:064x}"}).encode()
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
    def is_written(self) -> bool:
        """Whether a save is in progress and this rank has written its part."""
        return self._save is not None and self._save.is_written

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
            self._good.add(save.folder)
            seconds = self._paused_s + time.monotonic() - began_s
            self._events.write(CheckpointSaved(step=save.step, path=save.folder, bytes=outcome.bytes, seconds=seconds))
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


def _read_digest(folder: str) -> StreamDigest:
    try:
        stored = json.loads(storage.read_bytes(storage.join(folder, STREAM)))
        return StreamDigest(int(stored["rows"]), int(stored["total"], 16))
    except (ValueError, KeyError, TypeError):
        raise CorruptCheckpoint(storage.join(folder, STREAM), "is damaged", "resume from an earlier one") from None
