"""The manifest of a checkpoint: which file holds which slice of which tensor.

A slice is a box inside a global tensor: an offset and a shape. Each rank stores its slices; the manifest lists the file
of every slice. A reader copies the overlap of the stored slices with the slice it needs, so the number of ranks may
change between saving and loading.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

from lakh import storage
from lakh.errors import CorruptCheckpoint

__all__ = ["FORMAT", "Manifest", "StoredSlice", "StoredTensor", "folder_name", "step_of"]

FORMAT = "lakh-checkpoint/1"
_FOLDER = re.compile(r"^step-(\d{8,})$")


@dataclass(frozen=True)
class StoredSlice:
    """One slice of a tensor, stored in one file under the tensor's name."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    dtype: str
    shape: tuple[int, ...]
    slices: tuple[StoredSlice, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint except the values of its tensors."""

    step: int
    sequence_index: int
    run_sha256: str
    data_sha256: str
    world: int
    files: dict[str, dict[str, Any]]
    tensors: dict[str, StoredTensor]
    versions: dict[str, str] = field(default_factory=dict)
    format: str = FORMAT

    @property
    def bytes(self) -> int:
        return sum(entry["bytes"] for entry in self.files.values())

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def read(folder: str) -> Manifest:
        data = storage.read_manifest(folder, made_by="lakh train")
        try:
            if data["format"] != FORMAT:
                found = f"has the format {data['format']!r}"
                raise CorruptCheckpoint(folder, found, f"this version of lakh reads {FORMAT!r}")
            tensors = {
                name: StoredTensor(
                    entry["dtype"],
                    tuple(entry["shape"]),
                    tuple(StoredSlice(s["file"], tuple(s["offset"]), tuple(s["shape"])) for s in entry["slices"]),
                )
                for name, entry in data["tensors"].items()
            }
            return Manifest(**{**data, "tensors": tensors})
        except (KeyError, TypeError, AttributeError) as error:
            found = f"has a damaged manifest ({error!r})"
            raise CorruptCheckpoint(folder, found, "resume from an earlier checkpoint") from None


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step in a folder name, or None if the folder is not a checkpoint."""
    match = _FOLDER.match(name)
    return int(match[1]) if match else None
