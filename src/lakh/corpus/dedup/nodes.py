"""Nodes: keys of documents during deduplication, and the choices made between documents.

A *node* is a string that is different for every document, sorts the preferred copy first and ends in the document's
position in the spool. Of a group of copies the smallest node stays, so the result depends on the documents only: never
on the order of arrival, the number of workers or the engine.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakh.corpus.document import document_id
from lakh.corpus.licences.expressions import classify_expression
from lakh.corpus.parsing.languages import may_be_vendored

__all__ = ["EARLIER", "SizedDocument", "keep_smallest", "node_of", "over_repo_share", "place_of", "slot_of"]

EARLIER = -1
"""The split of a document of an earlier corpus."""


def node_of(*, repo: str, path: str, licence: str = "", split: int = 0, row: int = 0) -> str:
    """The node of a document.

    Preferred first: a document of an earlier corpus (what was trained on once does not move), a permissive licence (a
    copy that the licence filter drops must not remove the others), a path that is not for third-party code, then
    repository and path.
    """
    permissive = bool(licence) and classify_expression(licence).permissive
    flags = (split != EARLIER, not permissive, may_be_vendored(path))
    return f"{''.join('1' if flag else '0' for flag in flags)}{repo}\0{path}\0{split}\0{row}"


def place_of(node: str) -> tuple[str, str]:
    """(repo, path) of a node."""
    repo, _, path = node.rsplit("\0", 2)[0][3:].partition("\0")
    return repo, path


def slot_of(node: str) -> tuple[int, int]:
    """(split, row in the spool) of a node."""
    _, split, row = node.rsplit("\0", 2)
    return int(split), int(row)


def keep_smallest(rows: Any, key: str) -> tuple[Any, Any]:
    """(the row with the smallest node of each key; the other rows, with a column `winner`)."""
    rows = rows.sort_by([(key, "ascending"), ("node", "ascending")]).combine_chunks()
    keys = rows.column(key).combine_chunks()
    first = np.ones(len(keys), dtype=bool)
    if len(keys) > 1:
        first[1:] = np.asarray(pc.not_equal(keys[1:], keys[:-1]))
    winner = np.maximum.accumulate(np.where(first, np.arange(len(keys)), 0))
    losers = rows.take(pa.array(np.flatnonzero(~first)))
    losers = losers.append_column("winner", rows.column("node").take(pa.array(winner[~first])))
    return rows.filter(pa.array(first)), losers


class SizedDocument(NamedTuple):
    repo: str
    path: str
    text_bytes: int


def over_repo_share(documents: Iterable[SizedDocument], per_repo_bytes: int, seed: int) -> frozenset[str]:
    """Ids of the documents that exceed their repository's share.

    A repository's files are accepted in the order of a keyed hash (so that no folder and no letter is favoured) until
    the next one would not fit. A file that alone is larger than the share is skipped.
    """
    if not per_repo_bytes:
        return frozenset()
    by_repo: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for document in documents:
        by_repo[document.repo].append((document_id(document.repo, document.path), document.text_bytes))
    over = []
    key = seed.to_bytes(8, "little")
    for files in by_repo.values():
        files.sort(key=lambda item: hashlib.blake2b(item[0].encode(), key=key).digest())
        used, full = 0, False
        for identity, size in files:
            if size <= per_repo_bytes and not full:
                full = used + size > per_repo_bytes
            if full or size > per_repo_bytes:
                over.append(identity)
            else:
                used += size
    return frozenset(over)
