"""One split of a complete token set, opened for reading.

Local files are memory-mapped, so that ranks share one copy; files on an object store are read in blocks (remote.py).
Opening compares sizes with the manifest; `verify` also compares hashes. Damage raises CorruptShard.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lakh import storage
from lakh.errors import CorruptShard, UserError
from lakh.tokens.dataset.remote import RemoteArray
from lakh.tokens.dataset.shards import DTYPES, REBUILD, SPLITS, STARTS_DTYPE, read_token_manifest

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

    @staticmethod
    def open(url: str | Path, split: str, *, cache: str = "") -> TokenSet:
        """Open a split and check the sizes of its files."""
        if split not in SPLITS:
            raise UserError(f"split {split!r}", "no such split", f"choose one of: {', '.join(SPLITS)}")
        text = str(url)
        folder = str(storage.local_path(text)) if storage.is_local(text) else text
        manifest = read_token_manifest(folder)
        entry, dtype = manifest["splits"][split], DTYPES[manifest["dtype"]]
        tokens = [_open(folder, s["file"], s["tokens"], dtype, s["sha256"], cache) for s in entry["shards"]]
        starts = [
            _open(folder, s["starts"], s["documents"], STARTS_DTYPE, s["starts_sha256"], cache)[:]
            for s in entry["shards"]
        ]
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
        )

    def count_sequences(self, sequence: int) -> int:
        """The number of sequences of sequence + 1 tokens; neighbours share one token, none crosses a shard."""
        if sequence < 1:
            raise ValueError(f"sequence {sequence} is below 1")
        return sum(max(0, len(shard) - 1) // sequence for shard in self.tokens)

    def verify(self) -> int:
        """Compare the hash of every file; returns the number of files."""
        pairs = [(shard["file"], shard["sha256"]) for shard in self.shards]
        pairs += [(shard["starts"], shard["starts_sha256"]) for shard in self.shards]
        for name, expected in pairs:
            if storage.sha256(storage.join(self.url, name)) != expected:
                raise CorruptShard(storage.join(self.url, name), "its bytes do not match its manifest", REBUILD)
        return len(pairs)


def _open(folder: str, name: str, length: int, dtype: str, sha256: str, cache: str) -> Any:
    url = storage.join(folder, name)
    if not length:
        return np.empty(0, dtype)
    if not storage.is_local(url):
        return RemoteArray(url, length, dtype, sha256=sha256, cache=cache, remedy=REBUILD)
    path, expected = Path(url), length * np.dtype(dtype).itemsize
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise CorruptShard(str(path), "is missing", REBUILD) from None
    if size != expected:
        raise CorruptShard(str(path), f"has {size} bytes, its manifest says {expected}", REBUILD)
    return np.asarray(np.memmap(path, dtype, mode="r"))  # a plain array slices faster than a memmap
