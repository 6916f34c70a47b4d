"""The state of a run: its tensors, the step, the position in the data, and the hash of the data so far.

`restore` fills it from the newest whole checkpoint. A checkpoint is made in two moves: `begin_save` copies the state
and lets a thread write it, `finish_save`, when every rank has written its part, makes it whole; training goes on
between them, unless there is no room for the copy. It carries stream.json beside the weights: the hash of the stream up
to its position, so that a resumed run prints the hash of all of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from lakh import checkpoint, config, storage
from lakh.errors import CorruptCheckpoint, DiskFull, UserError
from lakh.events import AutoChoice, CheckpointSaved, CheckpointSkipped, EventLog, SettingChanged
from lakh.spec import Run
from lakh.tokens.loading.digest import StreamDigest
from lakh.tokens.loading.skips import SkipRanges
from lakh.tokens.loading.training_data import TrainingData
from lakh.trainer.launch.world import World
from lakh.trainer.optim.optimizer import named_state

__all__ = ["TrainState", "skips_from"]

Ranges = tuple[tuple[int, int], ...]

STREAM = "stream.json"
DROP_TIMEOUT_S = 60.0
# Another value of these makes another stream: a position in the one means nothing in the other.
DECIDES_THE_STREAM = ("seed", "data.sequence", "data.packing", "data.fim_rate", "data.fim_spm")


class TrainState:
    def __init__(self, run_dir: str, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, log: EventLog):
        self.run_dir, self.model, self.optimizer, self.world, self.log = run_dir, model, optimizer, world, log
        self.step = 0
        self.position = 0
        """Sequences consumed so far."""
        self.digest: StreamDigest | None = StreamDigest()
        """Of the stream up to the last `restore`, over all ranks; None where an old checkpoint does not say."""
        self.known: tuple[int, StreamDigest | None] = (0, self.digest)
        """A position, not long ago, and the hash of the stream up to there."""
        self.last_saved = ""
        self._saving: checkpoint.CheckpointSave | None = None
        self._copies = checkpoint.HostCopies()
        self._background: bool | None = None
        self._keep = 1
        self._stood_still_s = 0.0

    def restore(self, run: Run, data: TrainingData) -> Run:
        """Fill model and optimizer from the newest whole checkpoint; without one, stay at the beginning.

        The run to go on with: what it passed over behind that place stays passed over.
        """
        newest = checkpoint.newest_usable(self.run_dir) if self.world.rank == 0 else None
        folder, passed = self.world.broadcast(newest)
        for error in passed if self.world.rank == 0 else ():
            self.log.write(CheckpointSkipped(path=error.where, reason=error.found))
        if folder is None:
            if passed:
                raise CorruptCheckpoint(self.run_dir, f"no whole checkpoint is left; {passed[0]}", "train anew")
            return run
        before = checkpoint.read_run(folder)
        position = checkpoint.Manifest.read(folder).sequence_index
        skip = skips_from(before.data.skip, run.data.skip, position)
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, skip=skip))
        changes = config.diff(before, run)
        for path, before, after in changes:
            if path in DECIDES_THE_STREAM:
                raise UserError(
                    f"{path} = {after}",
                    f"the run was started with {before}, and its place in the data would mean something else",
                    "leave it, or start a new run",
                )
        manifest = checkpoint.load(folder, named_state(self.model, self.optimizer))
        if manifest.data_sha256 != data.fingerprint:
            raise UserError(
                run.data.tokens,
                "holds other data than the run was started with (fingerprint differs)",
                "point data.tokens to the shards it was started with, or start a new run",
            )
        for path, before, after in changes if self.world.rank == 0 else ():
            self.log.write(SettingChanged(step=manifest.step, path=path, before=before, after=after))
        self.last_saved, self.step, self.position = folder, manifest.step, manifest.sequence_index
        self.digest = _read_digest(folder) if STREAM in manifest.files else None
        self.known = (self.position, self.digest)
        return run

    def begin_save(self, run: Run, data: TrainingData, read_here: StreamDigest) -> None:
        """Copy what a checkpoint holds and have it written behind the steps to come; `finish_save` makes it whole.

        `read_here` is the hash of what this rank alone has read since the last `restore`. A collective. A save that is
        still under way is finished first.
        """
        self.finish_save()
        began_s = time.monotonic()
        folder = storage.join(self.run_dir, "checkpoints", checkpoint.folder_name(self.step))
        if self.world.rank == 0:  # after a rewind a step is saved once more: the old one ends before its files change
            storage.remove_tree(storage.join(folder, storage.MANIFEST))
        total = self.total_digest(read_here)  # nobody goes on before rank 0 has been here
        self.known = (self.position, total)
        attachments = {
            "run.toml": config.to_toml(run).encode(),
            "tokenizer.json": storage.read_bytes(data.tokenizer_path),
        }
        if total is not None:
            attachments[STREAM] = json.dumps({"rows": total.sequences, "total": f"{total.total:064x}"}).encode()
        self._saving = checkpoint.CheckpointSave(
            folder,
            named_state(self.model, self.optimizer),
            step=self.step,
            sequence_index=self.position,
            run_sha256=config.fingerprint(run),
            data_sha256=data.fingerprint,
            attachments=attachments,
            rank=self.world.rank,
            world=self.world.size,
            writes_whole=run.mesh.resolve(self.world.size).leads_stage(self.world.rank),
        )
        self._keep = run.checkpoint.keep
        if self._in_background(run.checkpoint.background, self._saving.bytes_to_write):
            self._saving.start(self._copies)
            self._stood_still_s = time.monotonic() - began_s
        else:
            with self._told_how_to_go_on():
                self._saving.write()
            self._stood_still_s = time.monotonic() - began_s
            self.finish_save()

    def _in_background(self, wanted: str, own_bytes: int) -> bool:
        """Decided once, by all ranks together: where one has no room for a copy, all of them wait. A collective."""
        if self._background is None:
            free_bytes = checkpoint.free_host_bytes()
            copy_bytes = own_bytes * self.world.local_size
            mine = checkpoint.choose_background(wanted, copy_bytes=copy_bytes, free_bytes=free_bytes)
            votes: list[tuple[bool, str]] = self.world.broadcast(self.world.gather(mine))
            self._background, reason = min(votes)  # a refusal, where there is one
            choice = "behind the steps" if self._background else "waited for"
            if self.world.rank == 0:
                self.log.write(AutoChoice(step=self.step, what="checkpoints", choice=choice, reason=reason))
        return self._background

    @property
    def is_written(self) -> bool:
        """Whether a save is under way and this rank's part of it is written."""
        return self._saving is not None and self._saving.is_written

    def finish_save(self) -> None:
        """Make the save that is under way whole, if there is one; waits for the slowest rank. A collective."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        began_s = time.monotonic()
        with self._told_how_to_go_on():
            manifest = saving.finish(self.world.gather)
        self.last_saved = saving.folder
        if manifest is not None:
            checkpoint.prune(self.run_dir, keep=self._keep)
            seconds = self._stood_still_s + time.monotonic() - began_s
            self.log.write(CheckpointSaved(step=saving.step, path=saving.folder, bytes=manifest.bytes, seconds=seconds))

    @contextlib.contextmanager
    def _told_how_to_go_on(self) -> Iterator[None]:
        try:
            yield
        except DiskFull as error:
            raise DiskFull(error.where, error.found, f"free some space, then: lakh resume {self.run_dir}") from None

    def drop_save(self) -> None:
        """Leave a save that can no longer become whole, because ranks were lost."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait(DROP_TIMEOUT_S)  # its folder is removed later, and nobody should be writing there then

    def total_digest(self, read_here: StreamDigest) -> StreamDigest | None:
        """Of the whole stream so far, on every rank. A collective."""
        parts: Sequence[bytes] | None = self.world.gather(read_here.to_bytes())
        parts = self.world.broadcast(parts)
        if self.digest is None:
            return None
        return sum((StreamDigest.from_bytes(part) for part in parts or ()), self.digest)


def skips_from(before: Ranges, asked: Ranges, position: int) -> Ranges:
    """What is passed over by a run that stands at `position`: behind it what was, ahead of it what is asked now.

    A position counts what was not passed over, so that the past cannot change under it.
    """
    here = SkipRanges(before).index_of(position)
    behind = [(first, min(end, here)) for first, end in before if first < here]
    late = [(first, min(end, here)) for first, end in asked if first < here]
    if SkipRanges([*behind, *late]).ranges != SkipRanges(behind).ranges:
        raise UserError(
            f"data.skip = {[list(part) for part in asked]}",
            f"sequences before {here} have been read already",
            f"name sequences from {here} on, or start a new run",
        )
    return SkipRanges([*behind, *((max(first, here), end) for first, end in asked if end > here)]).ranges


def _read_digest(folder: str) -> StreamDigest | None:
    try:
        stored = json.loads(storage.read_bytes(storage.join(folder, STREAM)))
        return StreamDigest(int(stored["rows"]), int(stored["total"], 16))
    except (ValueError, KeyError, TypeError):
        raise CorruptCheckpoint(storage.join(folder, STREAM), "is damaged", "resume from an earlier one") from None
