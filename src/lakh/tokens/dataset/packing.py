"""Pack a corpus into a token set.

Two passes, because documents are written in another order than they are read. The first pass appends every text to one
of several bucket files by the leading bits of its sort key; the second pass loads one bucket at a time, sorts it,
encodes it on all cores and appends it to the shards. The result is independent of the order of the corpus' shards.

    order "document"     by a hash of the document's id: neighbours in the stream are unrelated
    order "repository"   one document per repository: <|repo_name|> name, then for each file <|file_sep|> path, newline
                         and text; files in import order, repositories by a hash of their name

A document is held out by the hash of its text (of its name, for a repository), so that copies of one text are always on
the same side. Memory: one bucket (32 MB of text; more only above 16 GB, or for a larger repository) and a few encoding
batches of 2 MB. Disk: the texts once more, temporarily.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from lakh import storage
from lakh.corpus import read_documents, read_report
from lakh.corpus.document import Progress
from lakh.corpus.parsing.import_order import SourceFile, order_files
from lakh.errors import UserError
from lakh.tokens.dataset.shards import FORMAT, MADE_BY, SHARD_TOKENS, SPLITS, TokenSetWriter, read_token_manifest
from lakh.tokens.dataset.token_set import TokenSet
from lakh.tokens.tokenizer import Tokenizer, threads
from lakh.tokens.tokenizer.parallel_encode import encode_all

__all__ = ["PackingResult", "is_heldout", "pack", "sort_key"]

Ordering = Literal["document", "repository"]
BUCKET_BYTES = 32_000_000  # of text
MAX_BUCKETS = 512  # open files
BATCH_TEXT_BYTES = 2 << 20
KEY_BYTES = 16
HEADER = struct.Struct("<16s?HHI")  # key, held out, bytes of path, of language, of text
BUCKETS = ".buckets"


@dataclass(frozen=True)
class PackingResult:
    """The token set that `pack` made or reused."""

    out: str
    manifest: dict[str, Any]
    reused: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The output of `--json`."""
        splits = self.manifest["splits"]
        counts = {name: splits[name] | {"shards": len(splits[name]["shards"])} for name in SPLITS}
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
    """Whether the hash of a text, read as a number in [0, 1), is below the fraction."""
    return int(text_sha256[:13], 16) < fraction * 16**13  # 52 bits are exact in a float


def sort_key(identity: str, kind: bytes = b"lakh-pack") -> bytes:
    """The sort key of a document in the packed order."""
    return hashlib.blake2b(identity.encode(), digest_size=KEY_BYTES, person=kind).digest()


def pack(
    corpus: str | Path,
    tokenizer: str | Path | Tokenizer,
    out: str | Path,
    *,
    heldout_fraction: float = 0.02,
    order: Ordering = "document",
    shard_tokens: int = SHARD_TOKENS,
    force: bool = False,
    progress: Progress | None = None,
) -> PackingResult:
    """Encode a corpus into the token set `out` (a folder or a URL), or reuse the existing one for the same input."""
    if not 0 <= heldout_fraction < 1:
        raise UserError(f"heldout = {heldout_fraction}", "is not in [0, 1)", "choose 0 up to, not including, 1")
    url = str(storage.local_path(str(out))) if storage.is_local(str(out)) else str(out)
    tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)
    report = read_report(str(corpus))
    if not report.kept:
        raise UserError(str(corpus), "holds no documents", "see the reasons with: lakh corpus report DIR")
    asked = {
        "corpus_sha256": report.output_sha256,
        "tokenizer_sha256": tokenizer.sha256,
        "heldout_fraction": heldout_fraction,
        "shard_tokens": shard_tokens,
        "order": order,
    }
    done = _finished(url, asked, force)
    if done is not None:
        return done
    with ExitStack() as stack:
        buckets = storage.join(url, BUCKETS)
        if storage.is_local(url):
            stack.callback(storage.remove_tree, buckets)
            storage.remove_tree(buckets)
        else:
            buckets = stack.enter_context(tempfile.TemporaryDirectory(prefix="lakh-pack-"))
        storage.require_space(buckets, 2 * report.bytes_out)  # the texts, and half of that at 3-4 bytes per token
        num_buckets = max(1, min(MAX_BUCKETS, -(-report.bytes_out // BUCKET_BYTES)))
        with TokenSetWriter(url, tokenizer, shard_tokens=shard_tokens) as writer, threads():
            _scatter(str(corpus), buckets, num_buckets, heldout_fraction, order, report.bytes_out, progress)
            done_bytes = reported_bytes = 0
            for number in range(num_buckets):
                entries = _sorted_entries(_bucket(buckets, number))
                documents = _by_repository(entries) if order == "repository" else ([entry] for entry in entries)
                for parts, ids in _encoded(tokenizer, documents, order, report.bytes_out):
                    writer.add("heldout" if parts[0].heldout else "train", ids)
                    done_bytes += sum(len(entry.text) for entry in parts)
                    if progress and done_bytes - reported_bytes >= BATCH_TEXT_BYTES:
                        reported_bytes = done_bytes
                        progress("encoding", done_bytes, report.bytes_out)
                storage.remove_tree(_bucket(buckets, number))
            if progress:
                progress("encoding", done_bytes, report.bytes_out)
            _require_documents(writer, heldout_fraction)
            manifest = writer.commit({**asked, "bytes": report.bytes_out})
    return PackingResult(url, manifest)


class _BucketEntry(NamedTuple):
    """One text of a bucket; `text` is a view of the bucket."""

    key: bytes
    heldout: bool
    path: bytes
    language: bytes
    text: Any


def _scatter(
    corpus: str,
    buckets: str,
    num_buckets: int,
    heldout_fraction: float,
    order: Ordering,
    total_bytes: int,
    progress: Progress | None,
) -> None:
    """First pass: append every text to the bucket of its key."""
    done = 0
    with ExitStack() as stack:
        files = [stack.enter_context(storage.create(_bucket(buckets, i))) for i in range(num_buckets)]
        for batch in read_documents(corpus, ["id", "repo", "path", "language", "sha256", "text"]):
            ids, repos, paths, languages, hashes = (batch.column(i).to_pylist() for i in range(5))
            for number, text in enumerate(batch.column(5).cast("large_binary").to_pylist()):
                if order == "repository":
                    key = sort_key(repos[number], b"lakh-repo")
                    heldout = is_heldout(hashlib.sha256(repos[number].encode()).hexdigest(), heldout_fraction)
                    path, language = f"{repos[number]}\0{paths[number]}".encode(), languages[number].encode()
                else:
                    key, path, language = sort_key(ids[number]), b"", b""
                    heldout = is_heldout(hashes[number], heldout_fraction)
                file = files[int.from_bytes(key[:4], "big") * num_buckets >> 32]
                file.write(HEADER.pack(key, heldout, len(path), len(language), len(text)))
                for part in (path, language, text):
                    file.write(part)
                done += len(text)
            if progress:
                progress("sorting", done, total_bytes)


def _sorted_entries(bucket: str) -> list[_BucketEntry]:
    """The entries of one bucket, by key and path."""
    raw = memoryview(storage.read_bytes(bucket))
    entries, at = [], 0
    while at < len(raw):
        key, heldout, path, language, text = HEADER.unpack_from(raw, at)
        edges = np.cumsum([at + HEADER.size, path, language, text]).tolist()
        parts = [raw[a:b] for a, b in itertools.pairwise(edges)]
        entries.append(_BucketEntry(key, heldout, bytes(parts[0]), bytes(parts[1]), parts[2]))
        at = edges[-1]
    entries.sort(key=lambda entry: (entry.key, entry.path))
    return entries


def _by_repository(entries: Sequence[_BucketEntry]) -> Iterator[list[_BucketEntry]]:
    """The files of each repository, imported files before the files that import them."""
    for _, group in itertools.groupby(entries, key=lambda entry: entry.path.partition(b"\0")[0]):
        files = list(group)
        raw = ((entry.path.partition(b"\0")[2], entry.language, bytes(entry.text)) for entry in files)
        order = order_files([SourceFile(*(part.decode() for part in parts)) for parts in raw])
        yield [files[place] for place in order]


def _encoded(
    tokenizer: Tokenizer, documents: Iterator[list[_BucketEntry]], order: Ordering, total_bytes: int
) -> Iterator[tuple[list[_BucketEntry], np.ndarray]]:
    """(entries of one document, its ids)."""
    waiting: deque[list[_BucketEntry]] = deque()

    def batches() -> Iterator[list[bytes]]:
        texts: list[bytes] = []
        size = 0
        for document in documents:
            waiting.append(document)
            parts = _texts(document, order)
            texts += parts
            size += sum(map(len, parts))
            if size >= BATCH_TEXT_BYTES:
                yield texts
                texts, size = [], 0
        if texts:
            yield texts

    names = ("repo_name", "file_sep") if order == "repository" else ()
    marks = [tokenizer.special(f"<|{name}|>") for name in names]
    for found in encode_all(tokenizer, batches(), total_bytes=total_bytes):
        at = 0
        while at < len(found):
            document = waiting.popleft()
            count = len(_texts(document, order))
            parts = found[at : at + count]
            at += count
            if order == "repository":
                special = [marks[0], *[marks[1]] * (count - 1)]
                parts = [np.concatenate([np.array([m], np.int32), ids]) for m, ids in zip(special, parts, strict=True)]
            yield document, np.concatenate(parts)


def _texts(document: Sequence[_BucketEntry], order: Ordering) -> list[bytes]:
    """The texts to encode: the document's text, or the repository's name, then path and text of each file."""
    if order == "document":
        return [bytes(entry.text) for entry in document]
    name = document[0].path.partition(b"\0")[0]
    return [name, *(entry.path.partition(b"\0")[2] + b"\n" + bytes(entry.text) for entry in document)]


def _bucket(buckets: str, number: int) -> str:
    return storage.join(buckets, f"bucket-{number:05d}.bin")


def _require_documents(writer: TokenSetWriter, heldout_fraction: float) -> None:
    """Raise UserError for an empty split, which the trainer would only notice later."""
    for name, split in writer.splits.items():
        if not split.has_documents and (name == "train" or heldout_fraction > 0):
            raise UserError(
                f"{writer.out}, {name}",
                f"no document belongs to it with --heldout {heldout_fraction:g}",
                "choose another fraction (0 holds none out), or a larger corpus",
            )


def _finished(url: str, asked: dict[str, Any], force: bool) -> PackingResult | None:
    if storage.manifest_to_reuse(url, kind=FORMAT, made_by=MADE_BY, force=force) is None:
        return None
    manifest = read_token_manifest(url)
    names = {
        "corpus_sha256": "corpus",
        "tokenizer_sha256": "tokenizer",
        "heldout_fraction": "--heldout fraction",
        "order": "--order",
    }
    manifest.setdefault("order", "document")
    differs = [names.get(name, name) for name, value in asked.items() if manifest.get(name) != value]
    if differs:
        found = f"already holds tokens with another {' and '.join(differs)}"
        raise UserError(url, found, "choose another --out, or replace them with --force")
    for split in SPLITS:
        TokenSet.open(url, split)  # raises if a file is missing or short
    return PackingResult(url, manifest, reused=True)
