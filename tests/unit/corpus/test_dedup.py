from __future__ import annotations

import random

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from lakh.corpus.dedup import Copies, Copy, cap_repositories, digest_of, keep_one_copy, over_share
from lakh.corpus.document import STREAM, document_id, drop

Row = tuple[str, str, str]  # repo, path, text
ROWS = st.lists(
    st.tuples(
        st.sampled_from("abc"), st.sampled_from(["x.py", "y.py", "z.py"]), st.sampled_from(["1", "2", "2 ", "3"])
    ),
    unique_by=lambda row: row[:2],
    max_size=9,
)


def batch_of(rows: list[Row]) -> pa.RecordBatch:
    columns: dict[str, list[object]] = {name: [] for name in STREAM.names}
    for repo, path, text in rows:
        values = {"id": document_id(repo, path), "repo": repo, "path": path, "text": text, "digest": digest_of(text)}
        for name in STREAM.names:
            columns[name].append(values.get(name, 0 if name == "size_bytes" else ""))
    return pa.record_batch([pa.array(columns[f.name], f.type) for f in STREAM], schema=STREAM)


def kept_of(batches: list[pa.RecordBatch]) -> set[tuple[str, str]]:
    rows = [row for batch in batches for row in batch.to_pylist()]
    return {(row["repo"], row["path"]) for row in rows if not row["reason"]}


def test_texts_that_differ_only_in_blanks_and_line_ends_are_equal() -> None:
    same = {digest_of(text) for text in ("a\n  b\n", "a\r\n  b\r\n", "a  \n\n  b", "\na\r  b\t\r")}
    assert len(same) == 1
    assert digest_of("a\nb") not in same  # indentation is meaning


@given(ROWS, st.randoms())
def test_one_copy_of_each_text_survives_and_never_by_arrival(rows: list[Row], shuffle: random.Random) -> None:
    other = list(rows)
    shuffle.shuffle(other)
    results = []
    for order in (rows, other):
        batches = [batch_of(order[:4]), batch_of(order[4:])]
        copies = Copies()
        for batch in batches:
            copies.add(batch)
        results.append(kept_of(list(keep_one_copy(copies)(iter(batches)))))
    assert results[0] == results[1]
    best = {}
    for repo, path, text in sorted(rows):
        best.setdefault(digest_of(text), (repo, path))
    assert results[0] == set(best.values())


@given(ROWS, st.integers(0, 9))
def test_workers_that_merge_their_copies_agree_with_one_worker(rows: list[Row], cut: int) -> None:
    alone, left, right = Copies(), Copies(), Copies()
    alone.add(batch_of(rows))
    left.add(batch_of(rows[:cut]))
    right.add(batch_of(rows[cut:]))
    right.merge(left)
    assert right == alone


def test_a_duplicate_names_the_copy_that_was_kept_and_loses_its_text() -> None:
    batch = batch_of([("b", "x.py", "same"), ("a", "y.py", "same")])
    copies = Copies()
    copies.add(batch)
    rows = [row for result in keep_one_copy(copies)(iter([batch])) for row in result.to_pylist()]
    assert [(row["reason"], row["detail"], row["text"]) for row in rows] == [
        ("exact-duplicate", "of a/y.py", ""),
        ("", "", "same"),
    ]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 200), st.integers(0, 3))
def test_a_repository_never_gives_more_than_its_share(sizes: list[int], share: int, seed: int) -> None:
    copies = [Copy("r", f"{i}.py", size) for i, size in enumerate(sizes)]
    left_out = over_share(copies, share, seed)
    kept = [copy for copy in copies if document_id(copy.repo, copy.path) not in left_out]
    assert sum(copy.text_bytes for copy in kept) <= share
    assert kept or min(sizes) > share or len(left_out) == len(sizes) == 0
    assert over_share(reversed(copies), share, seed) == left_out  # order of arrival does not matter
    if sum(sizes) <= share:
        assert not left_out


def test_the_share_counts_per_repository_and_zero_means_no_limit() -> None:
    copies = [Copy(repo, f"{i}.py", 10) for repo in "ab" for i in range(5)]
    assert len(over_share(copies, 30, 0)) == 4
    assert over_share(copies, 30, 0) != over_share(copies, 30, 1)  # another seed, another choice
    assert over_share(copies, 0, 0) == frozenset()


def test_the_first_reason_stays() -> None:
    batch = drop(batch_of([("a", "x.py", "1")]), ["empty"], [""])
    capped = next(cap_repositories(frozenset({document_id("a", "x.py")}))(iter([batch])))
    assert capped.column("reason").to_pylist() == ["empty"]
