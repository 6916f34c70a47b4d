"""Token shards: the files of a token set, and their writer.

    DIR/train/tokens-00000.bin   token ids, little-endian uint16 (uint32 where the vocabulary needs it), no header;
                                 documents one after the other, each followed by <|endoftext|>
    DIR/train/starts-00000.bin   little-endian uint64: start of each document in tokens-00000.bin
    DIR/heldout/...              the same for held-out documents
    DIR/tokenizer.json           the tokenizer that made the ids
    DIR/generation_config.json   its end and padding ids, where the files of a checkpoint state them
    DIR/manifest.json            counts and hashes; written last, marks the set as complete

In a set for instruction tuning (`marks_context`), ids are uint32, and the bit CONTEXT marks a token that is read and
not predicted, such as one of a question: losses count the other tokens only.

A document never spans two shards. `fingerprint` is the SHA-256 of the number type and of the hashes of the shards in
order: everything that determines the stream of tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

from lakh import storage
from lakh.errors import DataError, UserError
from lakh.tokens.tokenizer import FILE, Tokenizer

__all__ = [
    "CONTEXT",
    "FORMAT",
    "MADE_BY",
    "SPLITS",
    "TokenSetWriter",
    "dtype_for",
    "fingerprint_of",
    "read_token_manifest",
]

FORMAT = "lakh-tokens/1"
MADE_BY = "lakh tokens pack CORPUS --tokenizer DIR --out DIR"
REBUILD = f"pack it again with: {MADE_BY} --force"
SPLITS = ("train", "heldout")
BLOCK_BYTES = 4 << 20  # of one range read from an object store, and of one hash
SHARD_TOKENS = 1 << 26  # 128 MiB of uint16: large enough to stream, small enough to move
DTYPES = {"uint16": "<u2", "uint32": "<u4"}  # manifest -> numpy, little-endian on every machine
STARTS_DTYPE = "<u8"
CONTEXT = 1 << 30  # above every id, and positive in the int32 of a batch
OUR_FILES = re.compile(r"\.?(tokens|starts)-\d+\.bin(\..*\.part)?")


def dtype_for(vocab: int) -> str:
    """The smallest type that holds every id of a vocabulary."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


def fingerprint_of(dtype: str, splits: Mapping[str, Any]) -> str:
    shards = {
        name: [[shard["sha256"], shard["starts_sha256"]] for shard in split["shards"]] for name, split in splits.items()
    }
    canonical = json.dumps([FORMAT, dtype, shards], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def read_token_manifest(url: str) -> dict[str, Any]:
    """The manifest of a complete token set."""
    manifest = storage.read_manifest(url, made_by=MADE_BY)
    if manifest.get("format") != FORMAT:
        found = f"is not a token set: its format is {manifest.get('format')!r}"
        raise UserError(url, found, f"make them with: {MADE_BY}")
    try:
        expected = fingerprint_of(manifest["dtype"], manifest["splits"])
        complete = set(SPLITS) <= set(manifest["splits"]) and manifest["dtype"] in DTYPES
    except (KeyError, TypeError, AttributeError):
        expected, complete = "", False
    where = storage.join(url, storage.MANIFEST)
    if not complete or manifest.get("fingerprint") != expected:
        raise DataError(where, "is damaged: its fingerprint does not match", REBUILD)
    for name in SPLITS:
        problem = _find_problem(name, manifest["splits"][name], np.dtype(DTYPES[manifest["dtype"]]).itemsize)
        if problem or not _is_count(manifest.get("vocab")) or not isinstance(manifest.get("tokenizer"), str):
            raise DataError(where, f"is damaged: {problem or 'vocab or tokenizer is not one'}", REBUILD)
    return manifest


def _find_problem(split: str, entry: dict[str, Any], item_bytes: int) -> str:
    """What is wrong with the entry of a split; sets of earlier versions have no hash of the manifest."""
    for number, shard in enumerate(entry["shards"]):
        names = {"file": f"{split}/tokens-{number:05d}.bin", "starts": f"{split}/starts-{number:05d}.bin"}
        for key, name in names.items():
            if shard.get(key) != name:
                return f"{key} of shard {number} is {shard.get(key)!r} instead of {name!r}"
    for key in ("tokens", "documents"):
        counts = [shard.get(key) for shard in entry["shards"]]
        if not all(map(_is_count, (entry.get(key), *counts))) or entry[key] != sum(counts):
            return f"{key} of {split} are {entry.get(key)!r} and {counts} in its shards"
    for number, shard in enumerate(entry["shards"]):
        blocks, block_bytes = shard.get("block_sha256", []), shard.get("block_bytes", BLOCK_BYTES)
        if not _is_count(block_bytes) or block_bytes % item_bytes or not isinstance(blocks, list):
            return f"block_bytes or block_sha256 of shard {number} is not one"
        if blocks and len(blocks) != -(-shard["tokens"] * item_bytes // max(1, block_bytes)):
            return f"shard {number} has {len(blocks)} hashes of blocks of {block_bytes} bytes"
    return ""


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


class TokenSetWriter:
    """A context manager: `add` documents in order, and `commit` at the end; without it the set stays incomplete."""

    def __init__(
        self, out: str, tokenizer: Tokenizer, *, shard_tokens: int = SHARD_TOKENS, marks_context: bool = False
    ) -> None:
        """`marks_context`: documents may have tokens with the bit CONTEXT."""
        self.out, self.tokenizer, self.shard_tokens = out, tokenizer, shard_tokens
        self.marks_context = marks_context
        self.dtype = "uint32" if marks_context else dtype_for(tokenizer.vocab_size)
        self.splits: dict[str, _SplitWriter] = {name: _SplitWriter(self, name) for name in SPLITS}

    def __enter__(self) -> TokenSetWriter:
        storage.remove_tree(storage.join(self.out, storage.MANIFEST))
        for split in SPLITS:
            folder = storage.join(self.out, split)
            for name in storage.list_dir(folder):
                if OUR_FILES.fullmatch(name):
                    storage.remove_tree(storage.join(folder, name))
        self.tokenizer.save(self.out)
        self.tokenizer.save_roles(self.out)
        return self

    def __exit__(self, *error: Any) -> None:
        with ExitStack() as stack:
            for split in self.splits.values():
                stack.push(split.close)
            stack.__exit__(*error)

    def add(self, split: str, ids: Any) -> None:
        """Append one document (without <|endoftext|>) to a split."""
        self.splits[split].add(np.asarray(ids, DTYPES[self.dtype]))

    def commit(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Close the shards and write the manifest with the additional entries `facts`."""
        for split in self.splits.values():
            split.close(None, None, None)
        splits = {name: split.entry() for name, split in self.splits.items()}
        manifest = {
            **facts,
            "format": FORMAT,
            "vocab": self.tokenizer.vocab_size,
            "dtype": self.dtype,
            **({"marks_context": True} if self.marks_context else {}),
            "tokenizer": FILE,
            "tokenizer_sha256": self.tokenizer.sha256,
            "splits": splits,
            "fingerprint": fingerprint_of(self.dtype, splits),
        }
        storage.commit(self.out, manifest, hashed=True)
        return manifest


class _SplitWriter:
    """The shards of one split; at most one is open."""

    def __init__(self, writer: TokenSetWriter, name: str) -> None:
        self.writer, self.name = writer, name
        self.shards: list[dict[str, Any]] = []
        self._open: ExitStack | None = None
        self._end = np.array([writer.tokenizer.eot], DTYPES[writer.dtype])

    @property
    def has_documents(self) -> bool:
        return bool(self.shards) or self._open is not None

    def add(self, ids: np.ndarray) -> None:
        if self._open is not None and self._num_tokens + len(ids) + 1 > self.writer.shard_tokens:
            self.close(None, None, None)
        if self._open is None:
            self._begin()
        self._starts.append(self._num_tokens)
        for part in (ids, self._end):
            data = np.ascontiguousarray(part).data
            self._file.write(data)
            self._blocks.update(data)
        self._num_tokens += len(ids) + 1

    def _begin(self) -> None:
        self._name = f"{self.name}/tokens-{len(self.shards):05d}.bin"
        self._open = ExitStack()
        file = self._open.enter_context(storage.create(storage.join(self.writer.out, self._name)))
        self._file, self._blocks = storage.HashingFile(file), _BlockHashes()
        self._num_tokens = 0
        self._starts: list[int] = []

    def close(self, kind: Any, error: Any, trace: Any) -> None:
        """Close the open shard, if any; with an error, discard it."""
        opened, self._open = self._open, None
        if opened is None:
            return
        opened.__exit__(kind, error, trace)
        if error is not None:
            return
        starts = np.array(self._starts, STARTS_DTYPE).tobytes()
        name = self._name.replace("/tokens-", "/starts-")
        storage.write_bytes(storage.join(self.writer.out, name), starts)
        self.shards.append(
            {
                "file": self._name,
                "starts": name,
                "tokens": self._num_tokens,
                "documents": len(self._starts),
                "sha256": self._file.sha256,
                "block_bytes": BLOCK_BYTES,
                "block_sha256": self._blocks.finish(),
                "starts_sha256": hashlib.sha256(starts).hexdigest(),
            }
        )

    def entry(self) -> dict[str, Any]:
        totals = {what: sum(shard[what] for shard in self.shards) for what in ("tokens", "documents")}
        return {**totals, "shards": self.shards}


class _BlockHashes:
    """The SHA-256 of each BLOCK_BYTES of a file, so that readers of a part of it can check what they read."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._block, self._free = hashlib.sha256(), BLOCK_BYTES

    def update(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            part, view = view[: self._free], view[self._free :]
            self._block.update(part)
            self._free -= len(part)
            if not self._free:
                self._done.append(self._block.hexdigest())
                self._block, self._free = hashlib.sha256(), BLOCK_BYTES

    def finish(self) -> list[str]:
        return self._done if self._free == BLOCK_BYTES else [*self._done, self._block.hexdigest()]
