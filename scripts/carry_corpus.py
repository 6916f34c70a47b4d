"""Take a corpus to a machine behind a narrow door: pieces of xz there, the same corpus again on the other side.

    python scripts/carry_corpus.py pack CORPUS PIECES [--heldout 0.015] [--per-repo-mb 1] [--piece-mb 96]
    python scripts/carry_corpus.py unpack PIECES CORPUS [--part train|heldout]

Code compresses to a fifth or better, token shards hardly at all: tokenise on the other side. Documents go in the order
of their repositories, which is what the compressor likes best. What is held out is whole repositories, by the hash of
their names (tokens.packing.is_heldout); both parts become corpora of their own, `train` and `heldout`.

`unpack` adds up the content hash of what it wrote and compares it with the one that `pack` noted: the corpus on the
other side is the one that was built, or there is none. Needs what `lakh tokens pack` needs (pyarrow), no more.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pyarrow as pa

from lakh import storage
from lakh.corpus import read_documents, read_report
from lakh.corpus.document import DOCUMENT, document_id
from lakh.corpus.reports.report import content_sum
from lakh.corpus.shards import create_shard
from lakh.errors import CorruptShard, LakhError, UserError
from lakh.tokens.dataset.packing import is_heldout

PARTS = ("train", "heldout")
CARRIED = ("repo", "licence", "source", "licence_evidence", "provenance", "marks", "language")
"""Columns that mostly repeat: a header names only those that differ from the document before."""
INDEX = "pieces.json"
ROW_GROUP_BYTES = 8_000_000


def pack(
    corpus: str, out: Path, *, heldout: float, piece_bytes: int, per_repo_bytes: int = 0, jobs: int = 2
) -> dict[str, Any]:
    """Write OUT/train-00.xz ..., OUT/heldout-00.xz and OUT/pieces.json, last; holds the texts in memory."""
    began_s = time.monotonic()
    report = read_report(corpus)
    out.mkdir(parents=True, exist_ok=True)
    names = [name for name in DOCUMENT.names if name not in ("id", "sha256")]
    rows = [row for batch in read_documents(corpus, names) for row in batch.to_pylist()]
    rows = sorted(_share(rows, per_repo_bytes), key=lambda row: (row["repo"], row["path"]))
    parts: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
    for row in rows:
        held = is_heldout(hashlib.sha256(row["repo"].encode()).hexdigest(), heldout)
        parts["heldout" if held else "train"].append(row)
    entries: dict[str, Any] = {}
    pieces: dict[str, list[str]] = {part: [] for part in PARTS}
    with ProcessPoolExecutor(jobs) as pool:
        waiting = []
        for part, documents in parts.items():
            content = content_sum((document_id(row["repo"], row["path"]), _sha256(row["text"])) for row in documents)
            size = sum(len(row["text"].encode()) for row in documents)
            entries[part] = {"documents": len(documents), "bytes": size, "content": f"{content:064x}"}
            for number, raw in enumerate(_streams(documents, piece_bytes)):
                name = f"{part}-{number:02d}.xz"
                pieces[part].append(name)
                waiting.append(pool.submit(_compress, raw, out / name))
        for done in as_completed(waiting):
            print(done.result(), f"{time.monotonic() - began_s:.0f} s", flush=True)
    for part in PARTS:
        entries[part]["pieces"] = pieces[part]
        entries[part]["xz_bytes"] = sum((out / name).stat().st_size for name in pieces[part])
    index = {"corpus": report.manifest(), "heldout_fraction": heldout, "parts": entries}
    storage.write_bytes(out / INDEX, json.dumps(index).encode())
    return entries


def unpack(pieces: Path, out: str, part: str) -> dict[str, Any]:
    """Make the corpus of one part again; its manifest is written last, and only for the right content."""
    if not (pieces / INDEX).exists():
        raise UserError(str(pieces), f"has no {INDEX}", "make it with: carry_corpus.py pack")
    index = json.loads((pieces / INDEX).read_bytes())
    entry = index["parts"][part]
    storage.make_dir(out)
    content, documents, size, shards = 0, 0, 0, []
    with ProcessPoolExecutor() as pool:
        jobs = [(str(pieces / name), out, f"docs-{number:05d}.parquet") for number, name in enumerate(entry["pieces"])]
        for shard, partial, rows, text_bytes in pool.map(_expand, jobs):
            shards.append(shard)
            content, documents, size = (content + partial) % (1 << 256), documents + rows, size + text_bytes
    if f"{content:064x}" != entry["content"]:
        raise CorruptShard(str(pieces), "the documents are not those that were packed", "carry the pieces again")
    manifest = index["corpus"] | {
        "shards": shards, "dropped_files": [], "kept": documents, "bytes_out": size, "output_sha256": f"{content:064x}",
    }  # fmt: skip
    storage.commit(out, manifest)
    return {"out": out, "documents": documents, "bytes": size, "content": entry["content"]}


def _share(rows: list[dict[str, Any]], per_repo_bytes: int) -> Iterator[dict[str, Any]]:
    """At most so many bytes of each repository (0: all), its files in the order of a hash: many rather than much."""
    taken: dict[str, int] = {}
    for row in sorted(rows, key=lambda row: _sha256(document_id(row["repo"], row["path"]))):
        size = len(row["text"].encode())
        if not per_repo_bytes or taken.get(row["repo"], 0) + size <= per_repo_bytes:
            taken[row["repo"]] = taken.get(row["repo"], 0) + size
            yield row


def _streams(documents: Sequence[dict[str, Any]], piece_bytes: int) -> Iterator[bytes]:
    """Documents as bytes, cut between repositories: [path, bytes of text, what changed] as a line, then the text."""
    parts: list[bytes] = []
    size, before = 0, dict[str, Any]()
    for row in documents:
        if size >= piece_bytes and row["repo"] != before.get("repo"):
            yield b"".join(parts)
            parts, size, before = [], 0, {}
        text = row["text"].encode()
        changed = {name: row[name] for name in CARRIED if row[name] != before.get(name)}
        header = [row["path"], len(text), *([changed] if changed else [])]
        parts += [json.dumps(header, separators=(",", ":")).encode(), b"\n", text]
        size += len(text)
        before = row
    if parts:
        yield b"".join(parts)


def _compress(raw: bytes, path: Path) -> str:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 128 << 20, "nice_len": 160, "lc": 4, "lp": 0}]
    packed = lzma.compress(raw, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC32, filters=filters)
    storage.write_bytes(path, packed)
    return f"{path.name}: {len(raw) / 1e6:.1f} MB to {len(packed) / 1e6:.1f} MB ({len(raw) / len(packed):.2f} to 1)"


def _expand(job: tuple[str, str, str]) -> tuple[dict[str, Any], int, int, int]:
    """One piece to one shard: (its manifest entry, content sum, documents, bytes of text)."""
    piece, out, name = job
    raw = memoryview(lzma.decompress(Path(piece).read_bytes()))
    rows: list[dict[str, Any]] = []
    content = total = waiting = at = 0
    known: dict[str, Any] = {}
    with create_shard(out, name, DOCUMENT) as file:
        while at < len(raw):
            line = bytes(raw[at : at + 65536]).partition(b"\n")[0]
            path, size, *changed = json.loads(line)
            known.update(changed[0] if changed else {})
            start = at + len(line) + 1
            text = bytes(raw[start : start + size]).decode()
            at = start + size
            row = {**known, "path": path, "text": text, "id": document_id(known["repo"], path), "sha256": _sha256(text)}
            content = content_sum([(row["id"], row["sha256"])], content)
            rows.append(row)
            total, waiting = total + size, waiting + size
            if waiting >= ROW_GROUP_BYTES or at >= len(raw):
                file.write(pa.RecordBatch.from_pylist(rows, schema=DOCUMENT))
                rows, waiting = [], 0
    return file.entry(), content, file.rows, total


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description="Take a corpus to another machine as pieces of xz.")
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("corpus")
    packing.add_argument("out", type=Path)
    packing.add_argument("--heldout", type=float, default=0.015)
    packing.add_argument("--per-repo-mb", type=float, default=0.0, help="of each repository; 0: all")
    packing.add_argument("--piece-mb", type=float, default=96.0)
    packing.add_argument("--jobs", type=int, default=2)
    expanding = commands.add_parser("unpack")
    expanding.add_argument("pieces", type=Path)
    expanding.add_argument("out")
    expanding.add_argument("--part", choices=PARTS, default="train")
    asked = parser.parse_args()
    try:
        if asked.command == "pack":
            made = pack(
                asked.corpus,
                asked.out,
                heldout=asked.heldout,
                piece_bytes=int(asked.piece_mb * 1e6),
                per_repo_bytes=int(asked.per_repo_mb * 1e6),
                jobs=asked.jobs,
            )
        else:
            made = unpack(asked.pieces, asked.out, asked.part)
    except LakhError as error:
        raise SystemExit(f"error: {error}") from None
    print(json.dumps(made))


if __name__ == "__main__":
    main()
