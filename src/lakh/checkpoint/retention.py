"""Remove old checkpoints. Only checkpoints that were verified count as kept, so that a good one is always left."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lakh import storage
from lakh.checkpoint.catalog import base_folder, check_sizes, checkpoints_of, list_complete, verify_chain
from lakh.checkpoint.format import Manifest, step_of
from lakh.errors import DataError

__all__ = ["PruneResult", "prune", "to_remove"]


@dataclass(frozen=True)
class PruneResult:
    """What `prune` did: the good checkpoints that it kept, what it removed, and damaged checkpoints that it kept."""

    kept: list[str]
    removed: list[str]
    damaged: list[str]


def to_remove(
    good: Sequence[int],
    other_complete: Sequence[int],
    incomplete: Sequence[int],
    *,
    keep: int,
    bases: Mapping[int, int] | None = None,
) -> list[int]:
    """Steps whose folders can be removed: everything older than the newest `keep` good checkpoints, except those that
    they are relative to (`bases`: step -> step of its base).

    While there are fewer good ones, only interrupted saves are removed. An incomplete folder newer than the newest good
    checkpoint may be a save in progress, and stays.
    """
    newest = max(good, default=-1)
    gone = {step for step in incomplete if step < newest}
    if len(good) >= keep:
        kept = sorted(good)[-keep:]
        gone |= {step for step in (*good, *other_complete) if step < kept[0]}
        for step in kept:
            base: int | None = step
            while base is not None:
                gone.discard(base)
                base = (bases or {}).get(base)
    return sorted(gone)


def prune(run_dir: str | Path, *, keep: int, known_good: Collection[str] | None = None) -> PruneResult:
    """Remove all but the newest `keep` good checkpoints, and leftovers of interrupted saves.

    Checkpoints are read and verified from the newest on until `keep` of them are good. With `known_good`, the folders
    that this process wrote or verified, nothing is read beyond manifests and sizes, and only these count as good.
    Checkpoints that hold weights alone are never counted, and go when the next older good one goes.
    """
    base = checkpoints_of(run_dir)
    folders = {step: storage.join(base, name) for name in storage.list_dir(base) if (step := step_of(name)) is not None}
    complete = [step for step, _ in list_complete(run_dir)]
    manifests = {step: manifest for step in complete if (manifest := _read(folders[step]))}
    bases = {step: step_of(manifest.base.folder) or 0 for step, manifest in manifests.items() if manifest.base}
    good: list[int] = []
    damaged: list[int] = []
    for step in reversed(complete):
        if len(good) < keep and (step not in manifests or manifests[step].can_resume):
            (good if _is_good(folders[step], known_good) else damaged).append(step)
    others = [step for step in complete if step not in good]
    gone = to_remove(good, others, sorted(folders.keys() - set(complete)), keep=keep, bases=bases)
    for step in reversed(gone):  # what depends on another one goes first
        storage.remove_tree(folders[step])
    return PruneResult(
        kept=[folders[step] for step in sorted(good)],
        removed=[folders[step] for step in gone],
        damaged=[folders[step] for step in sorted(damaged) if known_good is None and step not in gone],
    )


def _read(folder: str) -> Manifest | None:
    try:
        return Manifest.read(folder)
    except DataError:
        return None


def _is_good(folder: str, known_good: Collection[str] | None) -> bool:
    try:
        if known_good is None:
            verify_chain(folder)
            return True
        manifest = check_sizes(folder)
        base = base_folder(folder, manifest)
        return folder in known_good and (base is None or _is_good(base, known_good))
    except DataError:
        return False
