"""One split of a finished token set, opened for reading.

Local files are mapped into memory, not read: opening costs nothing and many ranks share one copy. Files on an object
store are read in pieces (remote.py). Opening compares sizes with the manifest; `verify` reads every byte. Damage is a
CorruptShard. Knows documents and tokens; knows nothing of rows or of their order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lakh import storage
from lakh.errors import CorruptShard, UserError
from lakh.tokens.remote import RemoteArray
from lakh.tokens.shards import DTYPES, REBUILD, SPLITS, STARTS_DTYPE, read_token_manifest

__all__ = ["TokenSet"]


@dataclass(frozen=True)
class TokenSet:
    url: str
    split: str
    fingerprint: str
    """Of the whole set: what a checkpoint stores to know its data again."""
    vocab: int
    num_tokens: int
    num_documents: int
    tokenizer_path: str
    tokenizer_sha256: str
    shards: tuple[dict[str, Any], ...] = field(repr=False)
    tokens: tuple[Any, ...] = field(repr=False, compare=False)
    """For each shard its token ids, as something that can be sliced."""
    starts: tuple[Any, ...] = field(repr=False, compare=False)
    """For each shard where its documents start, ascending."""

    @staticmethod
    def open(url: str | Path, split: str, *, cache: str = "") -> TokenSet:
        """Open a split; checks that its files are there and have the sizes that the manifest gives."""
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

    def windows(self, sequence: int) -> int:
        """How many windows of sequence + 1 tokens there are, neighbours sharing one token, none across shards."""
        if sequence < 1:
            raise ValueError(f"sequence {sequence} is below 1")
        return sum(max(0, len(shard) - 1) // sequence for shard in self.tokens)

    def verify(self) -> int:
        """Read every byte of the split and compare hashes; returns the number of files checked."""
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
    return np.asarray(np.memmap(path, dtype, mode="r"))  # a plain array: slicing a memmap costs more than a short read
