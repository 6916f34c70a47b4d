"""One copy of each text, which copy that is, and a cap on each repository's share.

Copies are compared by `preference`: a string that sorts the better copy first and is different for every document.
`exact_losers` and near.py's components both keep the smallest, so the result depends on the documents alone: never on
the order of arrival, the number of workers or the engine.

Pure functions over tables: the engines bring the rows of one key together (exchange.py) and call these.
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
from lakh.corpus.licences.metadata import classify_expression
from lakh.corpus.parsing.languages import may_be_vendored

__all__ = ["LOSERS", "SizedDocument", "exact_losers", "over_repo_share", "place_of", "preference"]

LOSERS = pa.schema([("node", pa.string()), ("root", pa.string())])


def preference(*, repo: str, path: str, licence: str = "", earlier: bool = False) -> str:
    """The smallest of several copies' keys is the copy to keep; `place_of` gives its place back.

    In this order: a document of an earlier corpus (what was trained on once is not moved), a permissive licence (a
    copy that the licence policy drops must not take the others with it), a place that is not for other people's code,
    then repository and path.
    """
    permissive = bool(licence) and classify_expression(licence).permissive
    marks = (not earlier, not permissive, may_be_vendored(path))
    return f"{''.join('1' if mark else '0' for mark in marks)}{repo}\0{path}"


def place_of(node: str) -> tuple[str, str]:
    """(repo, path) of a preference key."""
    repo, _, path = node[3:].partition("\0")
    return repo, path


def exact_losers(table: Any) -> Any:
    """LOSERS of (digest, node) with all rows of each digest present: every copy but the smallest, and that one."""
    digests = _array(table.column("digest")).dictionary_encode()
    nodes = _array(table.column("node"))
    codes = np.asarray(digests.indices)
    if not len(codes):
        return LOSERS.empty_table()
    rank = np.empty(len(nodes), np.int64)
    rank[np.asarray(pc.sort_indices(nodes))] = np.arange(len(nodes))
    order = np.lexsort((rank, codes))
    first = np.r_[True, codes[order][1:] != codes[order][:-1]]
    best = order[np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))]
    losers = pa.table({"node": nodes.take(pa.array(order[~first])), "root": nodes.take(pa.array(best[~first]))})
    return losers.sort_by("node")


def _array(column: Any) -> Any:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


class SizedDocument(NamedTuple):
    """A document and its size, for `over_share`."""

    repo: str
    path: str
    text_bytes: int


def over_repo_share(copies: Iterable[SizedDocument], per_repo_bytes: int, seed: int) -> frozenset[str]:
    """Ids of the documents for which their repository has no room.

    A repository's files are taken in the order of a keyed hash (so that no folder and no letter is favoured)
    until the next one would not fit. A file that alone is larger than the share is passed over.
    """
    if not per_repo_bytes:
        return frozenset()
    by_repo: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for copy in copies:
        by_repo[copy.repo].append((document_id(copy.repo, copy.path), copy.text_bytes))
    left_out = []
    key = seed.to_bytes(8, "little")
    for files in by_repo.values():
        files.sort(key=lambda item: hashlib.blake2b(item[0].encode(), key=key).digest())
        taken, full = 0, False
        for identity, size in files:
            if size <= per_repo_bytes and not full:
                full = taken + size > per_repo_bytes
            if full or size > per_repo_bytes:
                left_out.append(identity)
            else:
                taken += size
    return frozenset(left_out)
