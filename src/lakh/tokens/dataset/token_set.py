"""One split of a complete token set, opened for reading.

Local files are memory-mapped, so that ranks share one copy; files on an object store are read in blocks (remote.py).
Opening compares sizes and hashes with the manifest, and ids with the vocabulary: local files once per machine
(shard_check.py), remote ones block by block when they are read. `verify` compares all hashes again. Damage raises
CorruptShard, and so does a local shard that changes while it is in use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lakh import storage
from lakh.errors import CorruptShard, UserError
from lakh.tokens.dataset.remote import RemoteArray
from lakh.tokens.dataset.shard_check import (
    FileIdentity,
    ShardFile,
    check_unchanged,
    identity_of,
    scan,
    verify_files,
)
from lakh.tokens.dataset.shards import BLOCK_BYTES, CONTEXT, DTYPES, REBUILD, SPLITS, STARTS_DTYPE, read_token_manifest

__all__ = ["TokenSet"]


@dataclass(frozen=True)
class TokenSet:
    url: str
    split: str
    fingerprint: str
    """Identifies the token set; checkpoints store it."""
    vocab: int
    num_tokens: int
    num_documents: int
    tokenizer_path: str
    tokenizer_sha256: str
    shards: tuple[dict[str, Any], ...] = field(repr=False)
    tokens: tuple[Any, ...] = field(repr=False, compare=False)
    """The token ids of each shard, sliceable."""
    starts: tuple[Any, ...] = field(repr=False, compare=False)
    """The start of each document of each shard, ascending."""
    identities: tuple[FileIdentity | None, ...] = field(repr=False, compare=False)
    """Of the file of each local shard, when it was opened."""
    marks_context: bool = False
    """Some tokens have the bit CONTEXT (shards.py)."""

    @staticmethod
    def open(url: str | Path, split: str, *, cache: str = "") -> TokenSet:
        """Open a split and verify its files."""
        if split not in SPLITS:
            raise UserError(f"split {split!r}", "no such split", f"choose one of: {', '.join(SPLITS)}")
        text = str(url)
        folder = str(storage.local_path(text)) if storage.is_local(text) else text
        manifest = read_token_manifest(folder)
        entry, dtype, vocab = manifest["splits"][split], DTYPES[manifest["dtype"]], manifest["vocab"]
        marks_context = manifest.get("marks_context") is True
        limit = CONTEXT + vocab if marks_context else vocab
        id_files, start_files = [], []
        for shard in entry["shards"]:
            url, count = storage.join(folder, shard["file"]), shard["tokens"]
            id_files.append(ShardFile(url, count, dtype, shard["sha256"], limit, ascends=False, remedy=REBUILD))
            url, hashed = storage.join(folder, shard["starts"]), shard["starts_sha256"]
            start_files.append(ShardFile(url, shard["documents"], STARTS_DTYPE, hashed, count, True, REBUILD))
        identities = [_check_size(file) for file in (*id_files, *start_files)]
        verify_files([file for file in (*id_files, *start_files) if storage.is_local(file.url) and file.length])
        tokens = [_open(file, shard, cache) for file, shard in zip(id_files, entry["shards"], strict=True)]
        starts = [
            _open(file, {"block_bytes": file.size_bytes, "block_sha256": [file.sha256]}, cache)[:]
            for file in start_files
        ]
        for file, numbers in zip(start_files, starts, strict=True):
            if not storage.is_local(file.url) and file.length:
                file.check_limit(scan(file, [numbers.tobytes()]))
        return TokenSet(
            url=text,
            split=split,
            fingerprint=manifest["fingerprint"],
            vocab=manifest["vocab"],
            num_tokens=entry["tokens"],
            num_documents=entry["documents"],
            tokenizer_path=storage.join(folder, manifest["tokenizer"]),
            tokenizer_sha256=manifest.get("tokenizer_sha256", ""),
            shards=tuple(entry["shards"]),
            tokens=tuple(tokens),
            starts=tuple(starts),
            identities=tuple(identities[: len(id_files)]),
            marks_context=marks_context,
        )

    @property
    def folder(self) -> str:
        return str(storage.local_path(self.url)) if storage.is_local(self.url) else self.url

    def count_sequences(self, sequence: int) -> int:
        """The number of sequences of sequence + 1 tokens; neighbours share one token, none crosses a shard."""
        if sequence < 1:
            raise ValueError(f"sequence {sequence} is below 1")
        return sum(max(0, len(shard) - 1) // sequence for shard in self.tokens)

    def check_unchanged(self, shards: Iterable[int]) -> None:
        """Raise CorruptShard if the file of a shard was changed since it was opened. Costs one stat per shard."""
        for shard in shards:
            identity = self.identities[shard]
            if identity is not None:
                check_unchanged(Path(storage.join(self.folder, self.shards[shard]["file"])), identity)

    def verify(self) -> int:
        """Compare the hash of every file; returns the number of files."""
        pairs = [(shard["file"], shard["sha256"]) for shard in self.shards]
        pairs += [(shard["starts"], shard["starts_sha256"]) for shard in self.shards]
        for name, expected in pairs:
            if storage.sha256(storage.join(self.folder, name)) != expected:
                raise CorruptShard(storage.join(self.folder, name), "its bytes do not match its manifest", REBUILD)
        return len(pairs)


def _check_size(file: ShardFile) -> FileIdentity | None:
    """Compare the size of a local file; returns its identity."""
    if not file.length or not storage.is_local(file.url):
        return None
    try:
        identity = identity_of(Path(file.url))
        size = Path(file.url).stat().st_size
    except FileNotFoundError:
        raise file.damaged("is missing") from None
    if size != file.size_bytes:
        raise file.damaged(f"has {size} bytes, its manifest says {file.size_bytes}")
    return identity


def _open(file: ShardFile, shard: dict[str, Any], cache: str) -> Any:
    if not file.length:
        return np.empty(0, file.dtype)
    if not storage.is_local(file.url):
        block_bytes = shard.get("block_bytes", BLOCK_BYTES)
        return RemoteArray(file, block_bytes=block_bytes, block_sha256=shard.get("block_sha256", ()), cache=cache)
    return np.asarray(np.memmap(file.url, file.dtype, mode="r"))  # a plain array slices faster than a memmap
