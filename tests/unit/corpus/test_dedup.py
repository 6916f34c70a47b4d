from __future__ import annotations

import random
from collections.abc import Iterator
from typing import cast

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from lakh.corpus.build_plan import CorpusBuildPlan, SourceSurvey
from lakh.corpus.dedup.nodes import EARLIER, SizedDocument, keep_smallest, node_of, over_repo_share, place_of
from lakh.corpus.dedup.steps import MAX_EDGES_IN_ONE_TASK, find_near_duplicates
from lakh.corpus.document import document_id
from lakh.corpus.engines import CorpusEngine, PipelineStep
from lakh.corpus.settings import Settings

ROWS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["x.py", "vendor/y.py", "z.py"]), st.sampled_from([b"1", b"2"])),
    unique_by=lambda row: row[:2],
    max_size=9,
)


def losers_of(rows: list[tuple[str, str, bytes]]) -> dict[str, str]:
    nodes = [node_of(repo=repo, path=path) for repo, path, _ in rows]
    table = pa.table({"digest": pa.array([row[2] for row in rows], pa.binary()), "node": pa.array(nodes, pa.string())})
    found = keep_smallest(table, "digest")[1]
    return dict(zip(found["node"].to_pylist(), found["winner"].to_pylist(), strict=True))


@given(ROWS, st.randoms())
def test_only_the_preferred_copy_stays_in_any_order(rows, shuffle: random.Random) -> None:
    other = list(rows)
    shuffle.shuffle(other)
    assert losers_of(rows) == losers_of(other)
    best: dict[bytes, str] = {}
    for repo, path, digest in rows:
        node = node_of(repo=repo, path=path)
        best[digest] = min(best.get(digest, node), node)
    expected = {
        node_of(repo=repo, path=path): best[digest]
        for repo, path, digest in rows
        if best[digest] != node_of(repo=repo, path=path)
    }
    assert losers_of(rows) == expected


def test_kept_copy_is_earlier_then_permissive_then_not_vendored_then_the_smallest_place() -> None:
    keys = [
        node_of(repo="z", path="z.py", licence="GPL-3.0-only", split=EARLIER),
        node_of(repo="y", path="vendor/a.py", licence="MIT"),
        node_of(repo="a", path="a.py", licence="GPL-3.0-only"),
        node_of(repo="a", path="b.py"),
        node_of(repo="a", path="third_party/a.py"),
    ]
    assert keys == sorted(keys)


@given(st.text(st.characters(exclude_characters="\0")), st.text(st.characters(exclude_characters="\0")))
def test_node_contains_its_place(repo: str, path: str) -> None:
    assert place_of(node_of(repo=repo, path=path)) == (repo, path)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 200), st.integers(0, 3))
def test_repository_never_exceeds_its_share(sizes: list[int], share: int, seed: int) -> None:
    copies = [SizedDocument("r", f"{i}.py", size) for i, size in enumerate(sizes)]
    over = over_repo_share(copies, share, seed)
    kept = [copy for copy in copies if document_id(copy.repo, copy.path) not in over]
    assert sum(copy.text_bytes for copy in kept) <= share
    assert kept or min(sizes) > share
    assert over_repo_share(reversed(copies), share, seed) == over  # order of arrival does not matter
    if sum(sizes) <= share:
        assert not over


def test_share_counts_per_repository_and_zero_means_no_limit() -> None:
    copies = [SizedDocument(repo, f"{i}.py", 10) for repo in "ab" for i in range(5)]
    assert len(over_repo_share(copies, 30, 0)) == 4
    assert over_repo_share(copies, 30, 0) != over_repo_share(copies, 30, 1)  # another seed, another choice
    assert over_repo_share(copies, 0, 0) == frozenset()


class RecordingEngine:
    """Runs nothing: it records the steps, and reports a number of edges that stays the same."""

    def __init__(self, num_edges: int) -> None:
        self.num_edges, self.steps = num_edges, []

    def run(self, step: PipelineStep, inputs: object) -> dict[str, str]:
        self.steps.append((step.name, step.num_buckets))
        return {port: f"{step.name}.{port}" for port in step.ports}

    def keep(self, *rows: str) -> None:
        pass

    def collect(self, rows: str) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"number": pa.array([self.num_edges]), "content": ["0"]})


def test_one_task_receives_all_edges_only_if_there_are_few() -> None:
    plan = CorpusBuildPlan(Settings(), SourceSurvey((), "", 0), "out", "work", 400, 100)
    few, many = RecordingEngine(MAX_EDGES_IN_ONE_TASK), RecordingEngine(MAX_EDGES_IN_ONE_TASK + 1)
    for engine in (few, many):
        find_near_duplicates(cast(CorpusEngine, engine), plan, "bands", "sketches")
    assert few.steps[-2:] == [("gather", 100), ("components", 1)]
    assert all(num_buckets == 100 for _, num_buckets in many.steps)
