"""The steps of deduplication: which documents are dropped as copies, or because their repository exceeds its share.

    places     by id      -> one document per repository and path
    exact      by digest  -> one document per normalised text
    pairs, attach, verify -> pairs that share a band, joined with both sketches and verified
    gather, components    -> groups of near copies, of which one document stays
    survive, share        -> documents beyond their repository's share                   (only if a share is set)

Each step receives all rows of one bucket and yields (port, rows). The port `drops` carries (split, row, reason, detail)
of dropped documents. All functions are pure, so a step may run twice, anywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakh.corpus.build_plan import CorpusBuildPlan
from lakh.corpus.dedup.components import components, directed, large_star, small_star
from lakh.corpus.dedup.near import band_rows, candidate_pairs, verify_pairs
from lakh.corpus.dedup.nodes import (
    EARLIER,
    SizedDocument,
    keep_smallest,
    node_of,
    over_repo_share,
    place_of,
    slot_of,
)
from lakh.corpus.document import document_id, one_batch, rows_of, wide
from lakh.corpus.engines import CorpusEngine, PipelineStep, PortRows, StepFunction, StepInputs, StepOutput
from lakh.corpus.engines.exchange import BUCKET, by_bucket
from lakh.corpus.task_progress import TaskProgress

__all__ = ["deduplicate", "document_keys"]

MAX_EDGES_IN_ONE_TASK = 500_000
"""Larger graphs are solved by rounds of exchanges; this many edges take about 0.3 GB."""
MAX_ROUNDS = 64
"""Rounds grow with the logarithm of the longest chain; more than a handful is a bug."""


def deduplicate(engine: CorpusEngine, plan: CorpusBuildPlan, keys: PortRows, sketches: PortRows) -> list[PortRows]:
    """Run all steps of deduplication; the result is the ports that carry dropped documents."""
    run = partial(_run, engine, plan.num_buckets)
    placed = run("places", places, "drops unique", keys=[keys])
    unique = run("exact", exact, "drops bands alive", unique=[placed["unique"]])
    drops, losers = [placed["drops"], unique["drops"]], []
    if plan.settings.near.enabled:
        engine.keep(*drops, unique["alive"])
        found = find_near_duplicates(engine, plan, unique["bands"], sketches)
        drops.append(found["drops"])
        losers.append(found["losers"])
    if plan.settings.per_repo_bytes:
        alive = run("survive", survive, "alive", alive=[unique["alive"]], losers=losers)
        drops.append(run("share", share, "drops", alive=[alive["alive"]])["drops"])
    return drops


def find_near_duplicates(
    engine: CorpusEngine, plan: CorpusBuildPlan, bands: PortRows, sketches: PortRows
) -> dict[str, PortRows]:
    """The ports `drops` and `losers` of near deduplication.

    Components are found in one task if its memory suffices, else by rounds of two exchanges; both give the smallest
    node of a component.
    """
    run = partial(_run, engine, plan.num_buckets)
    paired = run("pairs", find_pairs, "pairs", bands=[bands])
    attached = run("attach", attach_sketch, "attached", pairs=[paired["pairs"]], sketches=[sketches])
    verified = run("verify", verify, "edges sums", attached=[attached["attached"]], sketches=[sketches])
    engine.keep(verified["edges"])
    checksum = _edge_checksum(engine, verified["sums"])
    if checksum[0] <= MAX_EDGES_IN_ONE_TASK:  # only then does one task receive all edges
        gathered = run("gather", gather, "all", edges=[verified["edges"]])
        return _run(engine, 1, "components", components_in_one_task, "drops losers", all=[gathered["all"]])
    edges = verified["edges"]
    for number in range(MAX_ROUNDS):
        large = run(f"large-{number:02d}", large_star_round, "edges", edges=[edges])
        small = run(f"small-{number:02d}", small_star_round, "edges stars sums", edges=[large["edges"]])
        edges, before = small["edges"], checksum
        engine.keep(edges, small["stars"])
        checksum = _edge_checksum(engine, small["sums"])
        if checksum == before:
            return run("settle", drop_all_but_centres, "drops losers", stars=[small["stars"]])
    raise AssertionError(f"components did not settle in {MAX_ROUNDS} rounds")


def _run(
    engine: CorpusEngine, num_buckets: int, name: str, function: StepFunction, ports: str, **inputs: Sequence[PortRows]
) -> dict[str, PortRows]:
    return engine.run(PipelineStep(name, function, num_buckets, tuple(ports.split()), "comparing"), inputs)


def document_keys(batch: Any, split: int, first_row: int, num_buckets: int) -> StepOutput:
    """The ports `keys` and `sketches`: what deduplication needs of the documents that are not dropped yet."""
    alive = np.flatnonzero(np.asarray(pc.equal(batch.column("reason"), "")))
    rows = batch.take(pa.array(alive))
    nodes = [
        node_of(repo=repo, path=path, licence=licence, split=split, row=first_row + int(at))
        for (repo, path, licence), at in zip(rows_of(rows, "repo", "path", "licence"), alive, strict=True)
    ]
    # A newer version of an earlier corpus' document has the same place and is another document.
    ids = rows.column("id")
    columns = {
        "id": pc.binary_join_element_wise("earlier ", ids, "") if split == EARLIER else ids,
        "node": pa.array(nodes, pa.string()),
        "digest": rows.column("digest"),
        "bands": rows.column("bands"),
        "text_bytes": pc.cast(pc.binary_length(rows.column("text")), pa.int64()),
    }
    yield "keys", _with_bucket(pa.Table.from_pydict(columns), "id", num_buckets)
    has_sketch = pc.greater(pc.binary_length(rows.column("sketch")), 0)
    sketches = pa.Table.from_pydict({"node": columns["node"], "sketch": rows.column("sketch")}).filter(has_sketch)
    yield "sketches", _with_bucket(sketches, "node", num_buckets)


# --- steps ------------------------------------------------------------------------------------------------------------


def _step(port: str) -> Callable[[Callable[[CorpusBuildPlan, Any, StepInputs], StepOutput]], StepFunction]:
    """A step that gets all rows of one input port as a table, and yields nothing for an empty bucket."""

    def decorate(function: Callable[[CorpusBuildPlan, Any, StepInputs], StepOutput]) -> StepFunction:
        @wraps(function)
        def step(plan: CorpusBuildPlan, bucket: int, inputs: StepInputs, task: TaskProgress) -> StepOutput:
            rows = _table(inputs(port))
            if rows is not None:
                yield from function(plan, rows, inputs)

        return step

    return decorate


@_step("keys")
def places(plan: CorpusBuildPlan, rows: Any, inputs: StepInputs) -> StepOutput:
    """Keep the smallest node of each repository and path."""
    winners, losers = keep_smallest(rows, "id")
    yield "drops", _drops(losers.column("node"), losers.column("winner"), "duplicate-path")
    yield "unique", _with_bucket(winners.drop_columns(["id"]), "digest", plan.num_buckets)


@_step("unique")
def exact(plan: CorpusBuildPlan, rows: Any, inputs: StepInputs) -> StepOutput:
    """Keep the smallest node of each normalised text."""
    winners, losers = keep_smallest(rows, "digest")
    yield "drops", _drops(losers.column("node"), losers.column("winner"), "exact-duplicate")
    if plan.settings.near.enabled:
        yield "bands", _with_bucket(band_rows(winners.select(["node", "bands"])), "key", plan.num_buckets)
    if plan.settings.per_repo_bytes:
        yield "alive", _with_bucket(winners.select(["node", "text_bytes"]), "node", plan.num_buckets)


@_step("bands")
def find_pairs(plan: CorpusBuildPlan, rows: Any, inputs: StepInputs) -> StepOutput:
    """Pairs of documents that share a band."""
    yield "pairs", _with_bucket(candidate_pairs(rows), "a", plan.num_buckets)


@_step("pairs")
def attach_sketch(plan: CorpusBuildPlan, rows: Any, inputs: StepInputs) -> StepOutput:
    """Join the sketch of a to its distinct pairs (a, b)."""
    rows = rows.group_by(["a", "b"]).aggregate([]).sort_by([("a", "ascending"), ("b", "ascending")])
    yield "attached", _with_bucket(_join_sketch(rows, "a", inputs("sketches")), "b", plan.num_buckets)


@_step("attached")
def verify(plan: CorpusBuildPlan, rows: Any, inputs: StepInputs) -> StepOutput:
    """Join the sketch of b; the pairs that are near duplicates become edges."""
    edges = verify_pairs(_join_sketch(rows, "b", inputs("sketches")), plan.settings.near)
    yield "edges", _with_bucket(directed(edges, both=True), "key", plan.num_buckets)
    yield "sums", _checksum_row(edges)


@_step("edges")
def gather(plan: CorpusBuildPlan, rows: Any, inputs: StepInputs) -> StepOutput:
    """Each edge once, for one task: of its two directions, the one from the smaller node."""
    rows = rows.filter(pc.less(rows.column("key"), rows.column("other"))).rename_columns(["a", "b"])
    yield "all", one_batch(rows.append_column(BUCKET, pa.array(np.zeros(len(rows), np.int32))))


@_step("all")
def components_in_one_task(plan: CorpusBuildPlan, edges: Any, inputs: StepInputs) -> StepOutput:
    found = components(edges)
    yield from _near_losers(plan, found.filter(pc.not_equal(found.column("node"), found.column("root"))))


@_step("edges")
def large_star_round(plan: CorpusBuildPlan, rows: Any, inputs: StepInputs) -> StepOutput:
    yield "edges", _with_bucket(directed(large_star(rows), both=False), "key", plan.num_buckets)


@_step("edges")
def small_star_round(plan: CorpusBuildPlan, rows: Any, inputs: StepInputs) -> StepOutput:
    edges = small_star(rows)
    yield "edges", _with_bucket(directed(edges, both=True), "key", plan.num_buckets)
    yield "stars", _with_bucket(edges, "a", plan.num_buckets)
    yield "sums", _checksum_row(edges)


@_step("stars")
def drop_all_but_centres(plan: CorpusBuildPlan, rows: Any, inputs: StepInputs) -> StepOutput:
    """Of each star, drop every node except its centre, which is the smallest."""
    yield from _near_losers(plan, rows.group_by(["a", "b"]).aggregate([]).rename_columns(["node", "root"]))


@_step("alive")
def survive(plan: CorpusBuildPlan, rows: Any, inputs: StepInputs) -> StepOutput:
    """The documents that near deduplication left, by repository."""
    losers = _table(inputs("losers"))
    if losers is not None:
        rows = rows.filter(pc.invert(pc.is_in(rows.column("node"), losers.column("node").combine_chunks())))
    is_new = [slot_of(node)[0] != EARLIER for node in rows.column("node").to_pylist()]
    rows = rows.filter(pa.array(is_new, pa.bool_()))
    repos = pa.array([place_of(node)[0] for node in rows.column("node").to_pylist()], pa.string())
    yield "alive", _with_bucket(rows.append_column("repo", repos), "repo", plan.num_buckets)


@_step("alive")
def share(plan: CorpusBuildPlan, rows: Any, inputs: StepInputs) -> StepOutput:
    """Drop what a repository has beyond its share, chosen by a keyed hash."""
    documents = [SizedDocument(*place_of(node), size) for node, size in rows_of(rows, "node", "text_bytes")]
    over = over_repo_share(documents, plan.settings.per_repo_bytes, plan.settings.seed)
    is_over = [document_id(document.repo, document.path) in over for document in documents]
    yield "drops", _drops(rows.column("node").filter(pa.array(is_over, pa.bool_())), None, "over-repo-share")


# --- rows -------------------------------------------------------------------------------------------------------------


def _near_losers(plan: CorpusBuildPlan, found: Any) -> StepOutput:
    yield "drops", _drops(found.column("node"), found.column("root"), "near-duplicate")
    yield "losers", _with_bucket(found.select(["node"]), "node", plan.num_buckets)


def _drops(nodes: Any, winners: Any, reason: str) -> Any:
    """Rows (row, reason, detail) by split; documents of an earlier corpus have none."""
    slots = [slot_of(node) for node in nodes.to_pylist()]
    kept = winners.to_pylist() if winners is not None else []
    details = [f"of {'/'.join(place_of(node))}" for node in kept] or [""] * len(slots)
    rows = pa.record_batch(
        {
            BUCKET: pa.array([split for split, _ in slots], pa.int32()),
            "row": pa.array([row for _, row in slots], pa.int64()),
            "reason": pa.array([reason] * len(slots), pa.large_string()),
            "detail": pa.array(details, pa.large_string()),
        }
    )
    return rows.filter(pc.not_equal(rows.column(BUCKET), EARLIER))


def _join_sketch(rows: Any, side: str, sketches: Iterator[Any]) -> Any:
    """Rows with the sketch of their node `side` as an extra column. Only the sketches of these nodes stay in memory."""
    wanted = pc.unique(rows.column(side).combine_chunks())
    found = [batch.filter(pc.is_in(batch.column("node"), wanted)) for batch in sketches]
    known = wide(pa.Table.from_batches(found)).combine_chunks()
    at = pc.index_in(rows.column(side).combine_chunks(), known.column("node").combine_chunks())
    return rows.append_column(f"sketch_{side}", known.column("sketch").combine_chunks().take(at))


def _checksum_row(edges: Any) -> Any:
    """The number of edges and the sum of their hashes: equal for equal sets of edges, however they are divided."""
    total = 0
    for a, b in rows_of(edges, "a", "b"):
        total += int.from_bytes(hashlib.blake2b(f"{a}\1{b}".encode(), digest_size=8).digest(), "big")
    numbers = pa.array([len(edges)], pa.int64())
    return pa.record_batch({BUCKET: pa.array([0], pa.int32()), "number": numbers, "content": [f"{total % 2**64:016x}"]})


def _edge_checksum(engine: CorpusEngine, sums: PortRows) -> tuple[int, int]:
    """(number, sum of hashes) over all tasks."""
    rows = [row for batch in engine.collect(sums) for row in rows_of(batch, "number", "content")]
    return sum(number for number, _ in rows), sum(int(content, 16) for _, content in rows) % 2**64


def _table(batches: Iterator[Any]) -> Any:
    """All rows of a bucket; None if there are none."""
    found = list(batches)
    return wide(pa.Table.from_batches(found)).combine_chunks() if found else None


def _with_bucket(rows: Any, key: str, num_buckets: int) -> Any:
    return one_batch(wide(rows).append_column(BUCKET, pa.array(by_bucket(rows.column(key), num_buckets), pa.int32())))
