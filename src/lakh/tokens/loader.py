"""Token shards to rows of training data.

A *window* of sequence length T is T + 1 consecutive tokens of one shard; consecutive windows share one
token, so each token (but a shard's first, and fewer than T at its end) is predicted exactly once. Windows
never cross shards.

The stream is a function of one integer: row i of the training stream is window `Order(i)`, whoever asks, on
however many ranks, after however many restarts. State to save: the index, the seed, and the token set's
fingerprint.

Files are mapped into memory, not read: opening costs nothing and many ranks share one copy. Opening
compares sizes with the manifest; `verify` reads every byte. Damage is a CorruptShard.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lakh import storage
from lakh.errors import CorruptShard, UserError
from lakh.tokens.order import Order
from lakh.tokens.prefetch import Prefetcher
from lakh.tokens.shards import DTYPES, REBUILD, SPLITS, STARTS_DTYPE, read_token_manifest

__all__ = ["Loader", "Order", "Prefetcher", "TokenSet"]


@dataclass(frozen=True)
class TokenSet:
    """One split of a finished token set, mapped into memory."""

    url: str
    split: str
    fingerprint: str
    """Of the whole set: what a checkpoint stores to know its data again."""
    vocab: int
    num_tokens: int
    num_documents: int
    tokenizer_path: str
    shards: tuple[dict[str, Any], ...] = field(repr=False)
    _tokens: tuple[np.ndarray, ...] = field(repr=False, compare=False)
    _starts: tuple[np.ndarray, ...] = field(repr=False, compare=False)
    _ends: dict[int, np.ndarray] = field(default_factory=dict, repr=False, compare=False)
    """Sequence length -> for each shard, how many windows it and the shards before it hold."""

    @staticmethod
    def open(url: str | Path, split: str) -> TokenSet:
        """Map a split; checks that its files are there and have the sizes that the manifest gives."""
        if split not in SPLITS:
            raise UserError(f"split {split!r}", "no such split", f"choose one of: {', '.join(SPLITS)}")
        text = str(url)
        folder = str(storage.local_path(text))
        manifest = read_token_manifest(folder)
        entry, dtype = manifest["splits"][split], DTYPES[manifest["dtype"]]
        tokens = [_map(folder, shard["file"], shard["tokens"], dtype) for shard in entry["shards"]]
        starts = [_map(folder, shard["starts"], shard["documents"], STARTS_DTYPE) for shard in entry["shards"]]
        return TokenSet(
            url=text,
            split=split,
            fingerprint=manifest["fingerprint"],
            vocab=manifest["vocab"],
            num_tokens=entry["tokens"],
            num_documents=entry["documents"],
            tokenizer_path=storage.join(folder, manifest["tokenizer"]),
            shards=tuple(entry["shards"]),
            _tokens=tuple(tokens),
            _starts=tuple(starts),
        )

    def windows(self, sequence: int) -> int:
        """How many windows of sequence + 1 tokens there are."""
        ends = self._window_ends(sequence)
        return int(ends[-1]) if len(ends) else 0

    def window(self, sequence: int, index: int) -> np.ndarray:
        """sequence + 1 tokens, in the type of the shards; a view, not a copy."""
        number, start = self._locate(sequence, index)
        return self._tokens[number][start : start + sequence + 1]

    def document_starts(self, sequence: int, index: int) -> np.ndarray:
        """Positions inside a window at which a document starts, ascending."""
        number, start = self._locate(sequence, index)
        starts = self._starts[number]
        low, high = np.searchsorted(starts, [start, start + sequence + 1])
        return starts[low:high].astype(np.int64) - start

    def verify(self) -> int:
        """Read every byte of the split and compare hashes; returns the number of files checked."""
        folder = str(storage.local_path(self.url))
        pairs = [(shard["file"], shard["sha256"]) for shard in self.shards]
        pairs += [(shard["starts"], shard["starts_sha256"]) for shard in self.shards]
        for name, expected in pairs:
            if storage.sha256(storage.join(folder, name)) != expected:
                raise CorruptShard(storage.join(folder, name), "its bytes do not match its manifest", REBUILD)
        return len(pairs)

    def _locate(self, sequence: int, index: int) -> tuple[int, int]:
        """(shard, first token) of a window."""
        ends = self._window_ends(sequence)
        if not 0 <= index < self.windows(sequence):
            raise IndexError(f"window {index} of {self.windows(sequence)}")
        number = int(np.searchsorted(ends, index, side="right"))
        before = int(ends[number - 1]) if number else 0
        return number, (index - before) * sequence

    def _window_ends(self, sequence: int) -> np.ndarray:
        if sequence < 1:
            raise ValueError(f"sequence {sequence} is below 1")
        if sequence not in self._ends:
            counts = [max(0, len(shard) - 1) // sequence for shard in self._tokens]
            self._ends[sequence] = np.cumsum(counts, dtype=np.int64)
        return self._ends[sequence]


class Loader:
    """The training stream: rows by their global sequence index. Holds no position; safe to share between
    threads.
    """

    def __init__(self, tokens: TokenSet, *, sequence: int, seed: int) -> None:
        self.tokens, self.sequence, self.seed = tokens, sequence, seed
        self.num_windows = tokens.windows(sequence)
        """Rows in one epoch."""
        if not self.num_windows:
            raise UserError(
                f"{tokens.url}, {tokens.split}",
                f"holds {tokens.num_tokens} tokens, less than one sequence of {sequence} + 1",
                "choose a shorter sequence or pack more text",
            )
        self._order = Order(self.num_windows, seed)

    def rows(self, first_index: int, count: int) -> np.ndarray:
        """Rows first_index .. first_index + count - 1 of the stream: (count, sequence + 1), int64."""
        indexes = np.arange(first_index, first_index + count, dtype=np.int64)
        result = np.empty((count, self.sequence + 1), np.int64)
        for row, window in zip(result, self._order.windows(indexes), strict=True):
            row[:] = self.tokens.window(self.sequence, int(window))
        return result

    def window_of(self, index: int) -> int:
        """The window that row `index` of the stream shows, for `TokenSet.document_starts`."""
        return int(self._order.windows(np.array([index]))[0])


def _map(folder: str, name: str, length: int, dtype: str) -> np.ndarray:
    path = Path(folder) / name
    expected = length * np.dtype(dtype).itemsize
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise CorruptShard(str(path), "is missing", REBUILD) from None
    if size != expected:
        raise CorruptShard(str(path), f"has {size} bytes, its manifest says {expected}", REBUILD)
    return np.memmap(path, dtype, mode="r") if length else np.empty(0, dtype)
