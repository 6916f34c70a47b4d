"""Remove old checkpoints. Only checkpoints that were verified count as kept, so that a good one is always left."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from lakh import storage
from lakh.checkpoint.catalog import check_sizes, checkpoints_of, list_complete, verify
from lakh.checkpoint.format import step_of
from lakh.errors import DataError

__all__ = ["PruneResult", "prune", "to_remove"]


@dataclass(frozen=True)
class PruneResult:
    """What `prune` did: the good checkpoints that it kept, what it removed, and damaged checkpoints that it kept."""

    kept: list[str]
    removed: list[str]
    damaged: list[str]


def to_remove(good: Sequence[int], other_complete: Sequence[int], incomplete: Sequence[int], *, keep: int) -> list[int]:
    """Steps whose folders can be removed: everything older than the newest `keep` good checkpoints.

    While there are fewer good ones, only interrupted saves are removed. An incomplete folder newer than the newest good
    checkpoint may be a save in progress, and stays.
    """
    newest = max(good, default=-1)
    gone = {step for step in incomplete if step < newest}
    if len(good) >= keep:
        oldest_kept = sorted(good)[-keep]
        gone |= {step for step in (*good, *other_complete) if step < oldest_kept}
    return sorted(gone)


def prune(run_dir: str | Path, *, keep: int, known_good: Collection[str] | None = None) -> PruneResult:
    """Remove all but the newest `keep` good checkpoints, and leftovers of interrupted saves.

    Checkpoints are read and verified from the newest on until `keep` of them are good. With `known_good`, the folders
    that this process wrote or verified, nothing is read beyond manifests and sizes, and only these count as good.
    """
    base = checkpoints_of(run_dir)
    folders = {step: storage.join(base, name) for name in storage.list_dir(base) if (step := step_of(name)) is not None}
    complete = [step for step, _ in list_complete(run_dir)]
    good: list[int] = []
    damaged: list[int] = []
    for step in reversed(complete):
        if len(good) < keep:
            (good if _is_good(folders[step], known_good) else damaged).append(step)
    others = [step for step in complete if step not in good]
    gone = to_remove(good, others, sorted(folders.keys() - set(complete)), keep=keep)
    for step in gone:
        storage.remove_tree(folders[step])
    return PruneResult(
        kept=[folders[step] for step in sorted(good)],
        removed=[folders[step] for step in gone],
        damaged=[folders[step] for step in sorted(damaged) if known_good is None and step not in gone],
    )


def _is_good(folder: str, known_good: Collection[str] | None) -> bool:
    try:
        if known_good is None:
            verify(folder)
            return True
        return folder in known_good and bool(check_sizes(folder))
    except DataError:
        return False
