"""The manifest of a checkpoint: which file holds which slice of which tensor.

A slice is a box inside a global tensor: an offset and a shape. Each rank stores its slices; the manifest lists the file
of every slice. A reader copies the overlap of the stored slices with the slice it needs, so the number of ranks may
change between saving and loading.

Files are hashed in chunks of CHUNK_BYTES, so that many ranks can verify one file, and the manifest is hashed itself.
Format 1 has one hash per file and none of the manifest; it is still read. Independent of what the tensors mean.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace

from lakh import storage
from lakh.checkpoint.format_check import ManifestField, check_tiling
from lakh.errors import CorruptCheckpoint, DataError

__all__ = [
    "CHUNK_BYTES",
    "FORMAT",
    "MAX_CHAIN",
    "MODES",
    "BaseCheckpoint",
    "EncodingError",
    "Manifest",
    "StoredFile",
    "StoredSlice",
    "StoredTensor",
    "folder_name",
    "step_of",
]

FORMAT = "lakh-checkpoint/2"
FORMAT_1 = "lakh-checkpoint/1"
CHUNK_BYTES = 16 << 20
MODES = ("full", "exact", "bounded", "weights")
MAX_CHAIN = 8
"""Incremental checkpoints after a full one: a restore reads all of them, and damage of one loses those behind it."""
RESUME_EARLIER = "resume from an earlier checkpoint (lakh checkpoint list shows them)"
_FOLDER = re.compile(r"^step-(\d{8,})$")


@dataclass(frozen=True)
class StoredFile:
    """Size and hashes of one file: the SHA-256 of each `chunk_bytes` of it."""

    bytes: int
    sha256: tuple[str, ...]
    chunk_bytes: int


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
class BaseCheckpoint:
    """The checkpoint that an incremental one is relative to, in the same folder."""

    folder: str
    sha256: str
    """Of its manifest: a checkpoint that was written again is another base."""
    chain: int
    """Number of incremental checkpoints from the last full one up to this one."""


@dataclass(frozen=True)
class EncodingError:
    """The stated bound of an encoding and the error that was measured when it was written."""

    block_bound: float | None
    """Largest error of a value, as a share of the largest magnitude in its block; None if there is no bound."""
    relative_rms: float
    """Root mean square of the errors over that of the values."""


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint except the values of its tensors."""

    step: int
    sequence_index: int
    run_sha256: str
    data_sha256: str
    world: int
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]
    versions: dict[str, str] = field(default_factory=dict)
    mode: str = "full"
    """full; exact or bounded: encoded relative to `base`; weights: bf16 weights alone, which cannot resume."""
    base: BaseCheckpoint | None = None
    errors: dict[str, EncodingError] = field(default_factory=dict)
    """What the encodings of a bounded checkpoint cost, by kind of encoding."""
    format: str = FORMAT
    sha256: str = ""
    """Of the manifest; empty in format 1."""

    @property
    def can_resume(self) -> bool:
        return self.mode != "weights"

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    @property
    def is_hashed(self) -> bool:
        """Whether damage of the manifest itself is detected; not in checkpoints of format 1."""
        return self.format != FORMAT_1

    def write(self, folder: str) -> Manifest:
        """Complete the checkpoint in `folder`; returns the manifest with its hash."""
        document = asdict(self)
        del document["sha256"]
        if self.mode == "full":
            del document["base"], document["errors"]
        return replace(self, sha256=storage.commit(folder, document, hashed=True))

    @staticmethod
    def read(folder: str) -> Manifest:
        """Read and check every field. Raises CorruptCheckpoint, which names the field."""
        try:
            data = storage.read_manifest(folder, made_by="lakh train")
        except DataError as error:
            raise CorruptCheckpoint(error.where, error.found, RESUME_EARLIER) from None
        where = storage.join(folder, storage.MANIFEST)
        if data.get("format") not in (FORMAT, FORMAT_1):
            found = f"has the format {data.get('format')!r}"
            raise CorruptCheckpoint(where, found, f"this version of lakh reads {FORMAT!r} and {FORMAT_1!r}")
        if data["format"] == FORMAT and storage.MANIFEST_HASH not in data:
            raise CorruptCheckpoint(where, "has lost its hash", RESUME_EARLIER)
        try:
            manifest = _parse(ManifestField("manifest", data))
            _check_tiles(manifest)
            named = step_of(folder.rstrip("/").rpartition("/")[2])
            if named is not None and named != manifest.step:
                raise ValueError(f"step is {manifest.step}, and the folder is of step {named}")
        except ValueError as error:
            raise CorruptCheckpoint(where, f"is damaged: {error}", RESUME_EARLIER) from None
        return manifest


def _parse(root: ManifestField) -> Manifest:
    root.require_keys(
        {"step", "sequence_index", "run_sha256", "data_sha256", "world", "files", "tensors", "format"},
        optional={"versions", "mode", "base", "errors", storage.MANIFEST_HASH},
    )
    mode = root["mode"].text() if "mode" in root else "full"
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}, not one of {', '.join(MODES)}")
    step = root["step"].count()
    return Manifest(
        step=step,
        sequence_index=root["sequence_index"].count(),
        run_sha256=root["run_sha256"].text(),
        data_sha256=root["data_sha256"].text(),
        world=root["world"].count(at_least=1),
        files={name: _parse_file(name, entry) for name, entry in root["files"].items()},
        tensors={name: _parse_tensor(entry) for name, entry in root["tensors"].items()},
        versions={name: entry.text() for name, entry in root["versions"].items()} if "versions" in root else {},
        mode=mode,
        base=_parse_base(root["base"], step) if mode in ("exact", "bounded") else None,
        errors=_parse_errors(root["errors"]) if "errors" in root else {},
        format=root["format"].text(),
        sha256=root[storage.MANIFEST_HASH].sha256() if storage.MANIFEST_HASH in root else "",
    )


def _parse_base(entry: ManifestField, step: int) -> BaseCheckpoint:
    entry.require_keys({"folder", "sha256", "chain"})
    base = BaseCheckpoint(entry["folder"].text(), entry["sha256"].sha256(), entry["chain"].count(at_least=1))
    base_step = step_of(base.folder)
    if base_step is None or base_step >= step or base.chain > MAX_CHAIN:
        raise ValueError(f"base is {base}, which is not an earlier checkpoint in a chain of at most {MAX_CHAIN}")
    return base


def _parse_errors(entry: ManifestField) -> dict[str, EncodingError]:
    errors = {}
    for name, error in entry.items():
        error.require_keys({"block_bound", "relative_rms"})
        bound = error["block_bound"]
        errors[name] = EncodingError(None if bound.value is None else bound.number(), error["relative_rms"].number())
    return errors


def _parse_file(name: str, entry: ManifestField) -> StoredFile:
    entry.require_file_name(name)
    size = entry["bytes"].count()
    if "chunk_bytes" not in entry:  # format 1: one hash for the whole file
        entry.require_keys({"bytes", "sha256"})
        return StoredFile(size, (entry["sha256"].sha256(),), max(1, size))
    entry.require_keys({"bytes", "sha256", "chunk_bytes"})
    chunk_bytes = entry["chunk_bytes"].count(at_least=1)
    hashes = tuple(chunk.sha256() for chunk in entry["sha256"].elements())
    if len(hashes) != max(1, -(-size // chunk_bytes)):
        raise ValueError(f"{entry.path} has {len(hashes)} hashes for {size:,} bytes in chunks of {chunk_bytes:,}")
    return StoredFile(size, hashes, chunk_bytes)


def _parse_tensor(entry: ManifestField) -> StoredTensor:
    entry.require_keys({"dtype", "shape", "slices"})
    slices = []
    for part in entry["slices"].elements():
        part.require_keys({"file", "offset", "shape"})
        slices.append(StoredSlice(part["file"].text(), part["offset"].counts(), part["shape"].counts()))
    return StoredTensor(entry["dtype"].dtype(), entry["shape"].counts(), tuple(slices))


def _check_tiles(manifest: Manifest) -> None:
    """Raise ValueError unless the slices of each tensor lie in known files and tile the tensor."""
    if not manifest.files:
        raise ValueError("files is empty")
    for name, tensor in manifest.tensors.items():
        for part in tensor.slices:
            if part.file not in manifest.files:
                raise ValueError(f"tensors.{name} names the file {part.file!r}, which is not in files")
        check_tiling(f"tensors.{name}", tensor.shape, [(part.offset, part.shape) for part in tensor.slices])


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step in a folder name, or None if the folder is not a checkpoint."""
    match = _FOLDER.match(name)
    return int(match[1]) if match else None
