"""A corpus to token shards.

Two passes, because documents leave in another order than they come. The first encodes the corpus in batches
and puts each document's ids into one of a few bucket files, by the leading bits of its sort key; the second
loads one bucket at a time, sorts it and appends it to the shards. The sort key is a hash of the document's
id, so that neighbours in the stream are unrelated and the packed bytes are the same on every run, whatever
the order of the corpus' shards.

A document is held out when the hash of its *text* says so: the choice needs no list, no seed and no luck,
and two copies of one text are never on both sides.

Memory: one encoding batch (8 MB of text) and one bucket: the ids of 256 MB of text, or of 1/256 of the corpus
where that is more. Disk: the ids twice, for a while.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from lakh import storage
from lakh.corpus import read_documents, read_report
from lakh.corpus.document import Progress
from lakh.errors import UserError
from lakh.tokens.loader import TokenSet
from lakh.tokens.shards import DTYPES, FORMAT, MADE_BY, SHARD_TOKENS, SPLITS, Writer, dtype_for, read_token_manifest
from lakh.tokens.tokenizer import Tokenizer, threads

__all__ = ["Packed", "is_heldout", "pack", "sort_key"]

BUCKET_BYTES = 256_000_000  # of text: some 70 M tokens
MAX_BUCKETS = 256  # open files
BATCH_TEXT_BYTES = 8 << 20
KEY_BYTES = 16
BUCKETS = ".buckets"


@dataclass(frozen=True)
class Packed:
    """What `pack` made, or found."""

    out: str
    manifest: dict[str, Any]
    reused: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The form that `--json` prints."""
        splits = self.manifest["splits"]
        counts = {
            name: {key: split[key] for key in ("tokens", "documents")} | {"shards": len(split["shards"])}
            for name, split in ((name, splits[name]) for name in SPLITS)
        }
        kept = ("vocab", "dtype", "bytes", "corpus_sha256", "tokenizer_sha256", "heldout_fraction", "fingerprint")
        tokens = sum(split["tokens"] for split in splits.values())
        return {
            "out": self.out,
            "reused": self.reused,
            "tokens": tokens,
            "bytes_per_token": self.manifest["bytes"] / tokens,
            "splits": counts,
            **{name: self.manifest[name] for name in kept},
        }


def is_heldout(text_sha256: str, fraction: float) -> bool:
    """A pure function of the text: its hash, read as a number in [0, 1), is below the fraction."""
    return int(text_sha256[:13], 16) < fraction * 16**13  # 52 bits are exact in a float


def sort_key(identity: str) -> bytes:
    """Where a document stands in the packed order."""
    return hashlib.blake2b(identity.encode(), digest_size=KEY_BYTES, person=b"lakh-pack").digest()


def pack(
    corpus: str | Path,
    tokenizer: str | Path | Tokenizer,
    out: str | Path,
    *,
    heldout_fraction: float = 0.02,
    shard_tokens: int = SHARD_TOKENS,
    force: bool = False,
    progress: Progress | None = None,
) -> Packed:
    """Encode a corpus and write the token set `out`, or return the one that is already there for the same
    input.
    """
    if not 0 <= heldout_fraction < 1:
        raise UserError(f"heldout = {heldout_fraction}", "is no fraction", "choose 0 up to, not including, 1")
    url = str(storage.local_path(str(out)))  # readers map the files into memory, so they live on this machine
    tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)
    report = read_report(str(corpus))
    if not report.kept:
        raise UserError(str(corpus), "holds no documents", "see why with: lakh corpus report DIR")
    asked = {
        "corpus_sha256": report.output_sha256,
        "tokenizer_sha256": tokenizer.sha256,
        "heldout_fraction": heldout_fraction,
        "shard_tokens": shard_tokens,
    }
    done = _finished(url, asked, force)
    if done is not None:
        return done
    storage.require_space(url, report.bytes_out)  # at 3-4 bytes a token, 2 bytes twice
    buckets = storage.join(url, BUCKETS)
    try:
        storage.remove_tree(buckets)
        num_buckets = min(MAX_BUCKETS, -(-report.bytes_out // BUCKET_BYTES))
        with Writer(url, tokenizer, shard_tokens=shard_tokens) as writer:
            _scatter(str(corpus), tokenizer, buckets, num_buckets, heldout_fraction, report.bytes_out, progress)
            for number in range(num_buckets):
                for split, ids in _gather(_bucket(buckets, number), DTYPES[writer.dtype]):
                    writer.add(split, ids)
                if progress:
                    progress("packing", (number + 1) * report.bytes_out // num_buckets, report.bytes_out)
            _require_documents(writer, heldout_fraction)
            manifest = writer.commit({**asked, "bytes": report.bytes_out})
    finally:
        storage.remove_tree(buckets)
    return Packed(url, manifest)


def _scatter(
    corpus: str,
    tokenizer: Tokenizer,
    buckets: str,
    num_buckets: int,
    heldout_fraction: float,
    total_bytes: int,
    progress: Progress | None,
) -> None:
    """Encode every document and append (key, split, length, ids) to the bucket of its key."""
    dtype = DTYPES[dtype_for(tokenizer.vocab_size)]
    done = 0
    with threads(), ExitStack() as stack:
        files = [stack.enter_context(storage.create(_bucket(buckets, i))) for i in range(num_buckets)]
        for batch in _text_batches(corpus):
            for (identity, sha256, _), ids in zip(batch, tokenizer.encode_batch([t for *_, t in batch]), strict=True):
                key = sort_key(identity)
                file = files[int.from_bytes(key[:4], "big") * num_buckets >> 32]
                header = np.array([is_heldout(sha256, heldout_fraction), len(ids)], "<u8").tobytes()
                file.write(key + header + np.asarray(ids, dtype).tobytes())
            done += sum(len(text.encode()) for *_, text in batch)
            if progress:
                progress("encoding", done, total_bytes)


def _text_batches(corpus: str) -> Iterator[list[tuple[str, str, str]]]:
    """(id, sha256, text) in lists of about BATCH_TEXT_BYTES."""
    rows: list[tuple[str, str, str]] = []
    size = 0
    for batch in read_documents(corpus, ["id", "sha256", "text"]):
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            rows.append(row)
            size += len(row[2])
            if size >= BATCH_TEXT_BYTES:
                yield rows
                rows, size = [], 0
    if rows:
        yield rows


def _gather(bucket: str, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """(split, ids) of a bucket in the order of the keys."""
    with storage.open_read(bucket) as file:
        rows = sorted(_records(file, np.dtype(dtype)), key=lambda row: row[0])
    for _, heldout, ids in rows:
        yield "heldout" if heldout else "train", ids


def _records(file: IO[bytes], dtype: np.dtype[Any]) -> Iterator[tuple[bytes, bool, np.ndarray]]:
    while key := file.read(KEY_BYTES):
        heldout, length = (int(value) for value in np.frombuffer(file.read(16), "<u8"))
        yield key, bool(heldout), np.frombuffer(file.read(length * dtype.itemsize), dtype)


def _bucket(buckets: str, number: int) -> str:
    return storage.join(buckets, f"bucket-{number:05d}.bin")


def _require_documents(writer: Writer, heldout_fraction: float) -> None:
    """An empty split would only be noticed hours later, by the trainer."""
    for name, split in writer.splits.items():
        if not split.has_documents and (name == "train" or heldout_fraction > 0):
            raise UserError(
                f"{writer.out}, {name}",
                f"no document falls into it with --heldout {heldout_fraction:g}",
                "choose another fraction (0 holds none out), or a larger corpus",
            )


def _finished(url: str, asked: dict[str, Any], force: bool) -> Packed | None:
    if storage.manifest_to_reuse(url, kind=FORMAT, made_by=MADE_BY, force=force) is None:
        return None
    manifest = read_token_manifest(url)
    names = {"corpus_sha256": "corpus", "tokenizer_sha256": "tokenizer", "heldout_fraction": "--heldout fraction"}
    differs = [names.get(name, name) for name, value in asked.items() if manifest.get(name) != value]
    if differs:
        found = f"already holds tokens with another {' and '.join(differs)}"
        raise UserError(url, found, "choose another --out, or replace them with --force")
    for split in SPLITS:
        TokenSet.open(url, split)  # raises where a file is missing or short
    return Packed(url, manifest, reused=True)
