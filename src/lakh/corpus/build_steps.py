"""The steps of a build, and the order in which they are taken: the same for every engine.

    read       split   -> files become documents, judged one by one; texts into the spool, keys into the exchange
    places     id      -> of several documents with one place, one
    exact      digest  -> of several documents with one normalised text, one
    near       band, node, node -> pairs that share a band, with both sketches, verified; then their components
    share      repo    -> what a repository gives beyond its share is left out          (only where a share is set)
    finish     split   -> the verdicts meet the texts; what is left is judged by the dearer stages, ordered, written

A *node* is how a document is called on the way: a string that sorts by preference (dedup.preference: the smallest of a
group is kept) and ends in the document's place in the spool. A *verdict* is (split, row, reason, detail).

All functions here are pure but for the files that `read` and `finish` write, whose names and bytes depend on the split
alone: a step may run twice, anywhere.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakh import storage
from lakh.corpus.build_plan import CorpusBuildPlan
from lakh.corpus.dedup import copies as dedup
from lakh.corpus.dedup.components import components, directed, large_star, small_star
from lakh.corpus.dedup.copies import SizedDocument, over_repo_share
from lakh.corpus.dedup.near import band_rows, pairs, verify
from lakh.corpus.document import STREAM, Stage, complete, document_id, drop
from lakh.corpus.engines import CorpusEngine, PipelineStep, PortRows, StepFunction, StepInputs
from lakh.corpus.engines.exchange import BUCKET, by_bucket
from lakh.corpus.filters.decontaminate import decontaminate
from lakh.corpus.filters.licence import filter_licences, opt_out, read_opt_out
from lakh.corpus.filters.quality import quality
from lakh.corpus.parsing.read_files import read_files
from lakh.corpus.parsing.reorder import in_import_order
from lakh.corpus.parsing.text_features import analyse
from lakh.corpus.secrets import redact
from lakh.corpus.shards import ParquetShard, read_rows
from lakh.corpus.task_progress import TASK_ATTEMPTS, TaskProgress
from lakh.corpus.writer import CorpusCounts, SplitWriter

__all__ = ["run_steps"]

Output = Iterator[tuple[str, Any]]
RESUME = "run the same command again"
EARLIER = -1
EDGES_AT_ONCE = 500_000
"""Graphs of up to so many edges are joined in one task: about 0.3 GB."""
MAX_ROUNDS = 64
"""Rounds grow with the logarithm of the longest chain; more than a handful are a bug."""


def run_steps(engine: CorpusEngine, plan: CorpusBuildPlan) -> CorpusCounts | None:
    """The whole build on any engine; what it amounts to, or None where another engine of an array sums up."""
    buckets, size = plan.num_buckets, plan.survey.code_bytes
    reading = PipelineStep(
        "read", read, plan.num_splits + len(plan.earlier), ("keys", "sketches"), "reading", total_bytes=size
    )
    came = engine.run(reading, {})
    placing = PipelineStep("places", places, buckets, ("verdicts", "unique"), "comparing")
    placed = engine.run(placing, {"keys": [came["keys"]]})
    exactly = PipelineStep("exact", exact, buckets, ("verdicts", "bands", "alive"), "comparing")
    unique = engine.run(exactly, {"unique": [placed["unique"]]})
    verdicts, losers = [placed["verdicts"], unique["verdicts"]], []
    if plan.settings.near.enabled:
        engine.keep(*verdicts, unique["alive"])
        found = find_near_duplicates(engine, plan, unique["bands"], came["sketches"])
        verdicts.append(found["verdicts"])
        losers.append(found["losers"])
    if plan.settings.per_repo_bytes:
        surviving = PipelineStep("survive", survive, buckets, ("alive",), "comparing")
        alive = engine.run(surviving, {"alive": [unique["alive"]], "losers": losers})
        sharing = PipelineStep("share", share, buckets, ("verdicts",), "comparing")
        verdicts.append(engine.run(sharing, {"alive": [alive["alive"]]})["verdicts"])
    finishing = PipelineStep("finish", finish, plan.num_splits, ("counts",), "writing", is_last=True, total_bytes=size)
    counts = engine.run(finishing, {"verdicts": verdicts})["counts"]
    if not engine.leads:
        return None
    total = CorpusCounts()
    for batch in engine.collect(counts):
        for text in batch.column("counts").to_pylist():
            total.add(CorpusCounts.from_json(text))
    total.files.sort(key=lambda entry: str(entry["file"]))
    return total


def find_near_duplicates(
    engine: CorpusEngine, plan: CorpusBuildPlan, bands: PortRows, sketches: PortRows
) -> dict[str, PortRows]:
    """Verdicts and losers of near deduplication.

    Components are found in one task where that fits one task's memory, and by rounds of two exchanges where it does
    not; both give the smallest node of a component.
    """

    def step(name: str, function: StepFunction, *ports: str, num_buckets: int = plan.num_buckets) -> PipelineStep:
        return PipelineStep(name, function, num_buckets, ports, "comparing")

    paired = engine.run(step("pairs", pair_up, "pairs"), {"bands": [bands]})
    attached = engine.run(step("attach", attach, "attached"), {"pairs": [paired["pairs"]], "sketches": [sketches]})
    checks = {"attached": [attached["attached"]], "sketches": [sketches]}
    checked = engine.run(step("verify", check, "edges", "all", "sums"), checks)
    engine.keep(checked["edges"], checked["all"])
    number, last = _sum(engine, checked["sums"])
    if number <= EDGES_AT_ONCE:
        together = step("components", join_at_once, "verdicts", "losers", num_buckets=1)
        return engine.run(together, {"all": [checked["all"]]})
    edges = checked["edges"]
    for around in range(MAX_ROUNDS):
        large = engine.run(step(f"large-{around:02d}", grow, "edges"), {"edges": [edges]})
        small = engine.run(step(f"small-{around:02d}", shrink, "edges", "stars", "sums"), {"edges": [large["edges"]]})
        edges = small["edges"]
        engine.keep(edges, small["stars"])
        now = _sum(engine, small["sums"])
        if now == (number, last):
            return engine.run(step("settle", settle, "verdicts", "losers"), {"stars": [small["stars"]]})
        number, last = now
    raise AssertionError(f"components did not settle in {MAX_ROUNDS} rounds")


def _sum(engine: CorpusEngine, sums: PortRows) -> tuple[int, int]:
    """(number of edges, their content): equal for equal sets of edges."""
    number = content = 0
    for batch in engine.collect(sums):
        for row in batch.to_pylist():
            number += row["number"]
            content = (content + int(row["content"], 16)) % (1 << 64)
    return number, content


# --- nodes ------------------------------------------------------------------------------------------------------------


def node_of(key: str, split: int, row: int) -> str:
    """The node of a document with that preference key."""
    return f"{key}\0{split}\0{row}"


def place_of(node: str) -> tuple[str, str]:
    """(repo, path) of a node."""
    return dedup.place_of(node.rsplit("\0", 2)[0])


def slot_of(node: str) -> tuple[int, int]:
    """Split and row in the spool; the split of an earlier corpus' document is EARLIER."""
    _, split, row = node.rsplit("\0", 2)
    return int(split), int(row)


# --- steps ------------------------------------------------------------------------------------------------------------


def read(plan: CorpusBuildPlan, split: int, given: StepInputs, task: TaskProgress) -> Output:
    """Files to documents: read, judge one by one, spool the texts, hand on the keys of what is still alive."""
    if split >= plan.num_splits:
        yield from _read_earlier(plan, plan.earlier[split - plan.num_splits])
        return
    licences = plan.settings.licences
    stages: list[Stage] = [filter_licences(licences)]
    if licences.opt_out:
        stages.append(opt_out(read_opt_out(licences.opt_out)))
    stages.append(analyse())
    row = 0
    with ParquetShard(plan.work, plan.spool_name(split), STREAM) as spool:
        remember = plan.settings.dropped_texts
        reading = read_files(plan.settings.filters, dropped_texts=remember, task=task)
        for batch in _chain(reading(plan.listing(split)), stages, task, remember=remember):
            spool.write(batch)
            yield from _keys(batch, split, row, plan.num_buckets)
            row += batch.num_rows
            task(pc.sum(batch.column("size_bytes")).as_py())


def _read_earlier(plan: CorpusBuildPlan, shard: str) -> Output:
    """The keys of an earlier corpus' documents: they take part in every comparison, and win it."""
    for batch in analyse()(complete(rows) for rows in read_rows(shard)):
        yield from _keys(batch, EARLIER, 0, plan.num_buckets)


def places(plan: CorpusBuildPlan, bucket: int, given: StepInputs, task: TaskProgress) -> Output:
    """Of several documents with one repository and path, the one with the smallest node."""
    rows = _table(given("keys"))
    if rows is None:
        return
    winners, losers = _winners(rows, "id")
    yield "verdicts", _verdicts(losers.column("node"), losers.column("winner"), "duplicate-path")
    yield "unique", _with_bucket(winners.drop_columns(["id"]), "digest", plan.num_buckets)


def exact(plan: CorpusBuildPlan, bucket: int, given: StepInputs, task: TaskProgress) -> Output:
    """Of several documents with one normalised text, the one with the smallest node."""
    rows = _table(given("unique"))
    if rows is None:
        return
    winners, losers = _winners(rows, "digest")
    yield "verdicts", _verdicts(losers.column("node"), losers.column("winner"), "exact-duplicate")
    if plan.settings.near.enabled:
        yield "bands", _with_bucket(band_rows(winners.select(["node", "bands"])), "key", plan.num_buckets)
    if plan.settings.per_repo_bytes:
        yield "alive", _with_bucket(winners.select(["node", "text_bytes"]), "node", plan.num_buckets)


def pair_up(plan: CorpusBuildPlan, bucket: int, given: StepInputs, task: TaskProgress) -> Output:
    """Pairs of documents that share a band."""
    rows = _table(given("bands"))
    if rows is not None:
        yield "pairs", _with_bucket(pairs(rows), "a", plan.num_buckets)


def attach(plan: CorpusBuildPlan, bucket: int, given: StepInputs, task: TaskProgress) -> Output:
    """The sketch of a joins its pairs (a, b), each pair once."""
    rows = _table(given("pairs"))
    if rows is not None:
        rows = rows.group_by(["a", "b"]).aggregate([]).sort_by([("a", "ascending"), ("b", "ascending")])
        yield "attached", _with_bucket(_join_sketch(rows, "a", given("sketches")), "b", plan.num_buckets)


def check(plan: CorpusBuildPlan, bucket: int, given: StepInputs, task: TaskProgress) -> Output:
    """The sketch of b joins, and the pairs that are near duplicates become edges."""
    rows = _table(given("attached"))
    if rows is not None:
        edges = verify(_join_sketch(rows, "b", given("sketches")), plan.settings.near).select(["a", "b"])
        yield "edges", _with_bucket(directed(edges, both=True), "key", plan.num_buckets)
        yield "all", _one_batch(edges.append_column(BUCKET, pa.array(np.zeros(len(edges), np.int32))))
        yield "sums", _edges_sum(edges)


def join_at_once(plan: CorpusBuildPlan, bucket: int, given: StepInputs, task: TaskProgress) -> Output:
    """Components of a graph that fits one task."""
    edges = _table(given("all"))
    if edges is not None:
        found = components(edges)
        yield from _near_losers(plan, found.filter(pc.not_equal(found.column("node"), found.column("root"))))


def grow(plan: CorpusBuildPlan, bucket: int, given: StepInputs, task: TaskProgress) -> Output:
    """One half of a round: components.large_star."""
    rows = _table(given("edges"))
    if rows is not None:
        yield "edges", _with_bucket(directed(large_star(rows), both=False), "key", plan.num_buckets)


def shrink(plan: CorpusBuildPlan, bucket: int, given: StepInputs, task: TaskProgress) -> Output:
    """The other half: components.small_star."""
    rows = _table(given("edges"))
    if rows is not None:
        edges = small_star(rows)
        yield "edges", _with_bucket(directed(edges, both=True), "key", plan.num_buckets)
        yield "stars", _with_bucket(edges, "a", plan.num_buckets)
        yield "sums", _edges_sum(edges)


def settle(plan: CorpusBuildPlan, bucket: int, given: StepInputs, task: TaskProgress) -> Output:
    """Stars around the smallest node: every other node is a loser."""
    rows = _table(given("stars"))
    if rows is not None:
        yield from _near_losers(plan, rows.group_by(["a", "b"]).aggregate([]).rename_columns(["node", "root"]))


def _near_losers(plan: CorpusBuildPlan, found: Any) -> Output:
    yield "verdicts", _verdicts(found.column("node"), found.column("root"), "near-duplicate")
    yield "losers", _with_bucket(found.select(["node"]), "node", plan.num_buckets)


def survive(plan: CorpusBuildPlan, bucket: int, given: StepInputs, task: TaskProgress) -> Output:
    """What near deduplication left, by repository."""
    rows, losers = _table(given("alive")), _table(given("losers"))
    if rows is None:
        return
    if losers is not None:
        rows = rows.filter(pc.invert(pc.is_in(rows.column("node"), losers.column("node").combine_chunks())))
    slots = pa.array([slot_of(node)[0] != EARLIER for node in rows.column("node").to_pylist()], pa.bool_())
    rows = rows.filter(slots)
    repos = pa.array([place_of(node)[0] for node in rows.column("node").to_pylist()], pa.string())
    rows = rows.append_column("repo", repos)
    yield "alive", _with_bucket(rows, "repo", plan.num_buckets)


def share(plan: CorpusBuildPlan, bucket: int, given: StepInputs, task: TaskProgress) -> Output:
    """What a repository has beyond its share, chosen by a keyed hash (dedup.over_share)."""
    rows = _table(given("alive"))
    if rows is None:
        return
    nodes, sizes = rows.column("node").to_pylist(), rows.column("text_bytes").to_pylist()
    copies = [SizedDocument(*place_of(node), size) for node, size in zip(nodes, sizes, strict=True)]
    left_out = over_repo_share(copies, plan.settings.per_repo_bytes, plan.settings.seed)
    over = [document_id(copy.repo, copy.path) in left_out for copy in copies]
    losers = rows.column("node").filter(pa.array(over, pa.bool_()))
    yield "verdicts", _verdicts(losers, None, "over-repo-share")


def finish(plan: CorpusBuildPlan, split: int, given: StepInputs, task: TaskProgress) -> Output:
    """The verdicts meet the texts; what is left goes into the shard."""
    spool = storage.join(plan.work, plan.spool_name(split))
    with SplitWriter(plan.out, split) as writer:
        settings = plan.settings
        stages = [
            quality(settings.quality),
            decontaminate(settings.decontaminate),
            writer.sampling(redact(settings.secrets)),
        ]
        remember = settings.dropped_texts
        judged = _chain(read_rows(spool, remedy=RESUME), [_apply(given("verdicts"))], TaskProgress(), remember=remember)
        for batch in in_import_order(_chain(judged, stages, task, remember=remember)):
            writer.write(batch)
            task(pc.sum(batch.column("size_bytes")).as_py())
    yield "counts", pa.record_batch({BUCKET: pa.array([0], pa.int32()), "counts": [writer.counts.to_json()]})


# --- rows -------------------------------------------------------------------------------------------------------------


def _chain(batches: Iterator[Any], stages: list[Stage], task: TaskProgress, *, remember: bool) -> Iterator[Any]:
    """The stages one after the other; where care is needed, for one document at a time."""
    if task.careful:
        return _one_by_one(batches, stages, task, remember)
    for stage in stages:
        batches = _remembering(stage, batches) if remember else stage(batches)
    return batches


def _one_by_one(batches: Iterator[Any], stages: list[Stage], task: TaskProgress, remember: bool) -> Iterator[Any]:
    """The same rows in the same batches; documents that kill whoever works on them are dropped."""
    number = 0
    for batch in batches:
        done = []
        for row in range(batch.num_rows):
            single = batch.slice(row, 1)
            if single.column("reason")[0].as_py():  # no stage looks at it again
                done.append(single)
                continue
            repo, path = single.column("repo")[0].as_py(), single.column("path")[0].as_py()
            place = f"{repo}/{path} row {number + row}"
            if task.skips(place):
                done.append(drop(single, ["crashed"], [f"its worker died {TASK_ATTEMPTS} times"]))
                continue
            task.at(place)
            done += _chain(iter([single]), stages, TaskProgress(), remember=remember)
        number += batch.num_rows
        task.at("")
        yield _one_batch(pa.Table.from_batches(done, schema=batch.schema))


def _remembering(stage: Stage, batches: Iterator[Any]) -> Iterator[Any]:
    """The stage, and the texts of the rows that it drops into `dropped_text`."""
    seen: deque[Any] = deque()

    def watched() -> Iterator[Any]:
        for batch in batches:
            seen.append(batch)
            yield batch

    for after in stage(watched()):
        before = seen.popleft()  # a stage gives one batch for each, with the same rows
        fresh = pc.and_(pc.equal(before.column("reason"), ""), pc.not_equal(after.column("reason"), ""))
        texts = pc.if_else(fresh, before.column("text"), after.column("dropped_text"))
        yield after.set_column(after.schema.get_field_index("dropped_text"), "dropped_text", texts)


def _keys(batch: Any, split: int, first_row: int, num_buckets: int) -> Output:
    """What the exchange needs to know of the documents that are still alive."""
    alive = np.flatnonzero(np.asarray(pc.equal(batch.column("reason"), "")))
    rows = batch.take(pa.array(alive))
    earlier = split == EARLIER
    nodes = [
        node_of(dedup.preference(repo=repo, path=path, licence=licence, earlier=earlier), split, first_row + int(at))
        for repo, path, licence, at in zip(
            *(rows.column(name).to_pylist() for name in ("repo", "path", "licence")), alive, strict=True
        )
    ]
    # A newer version of an earlier corpus' document has its place and is another document.
    ids = pc.binary_join_element_wise("earlier ", rows.column("id"), "") if earlier else rows.column("id")
    columns = {
        "id": ids,
        "node": pa.array(nodes, pa.string()),
        "digest": rows.column("digest"),
        "bands": rows.column("bands"),
        "text_bytes": pc.cast(pc.binary_length(rows.column("text")), pa.int64()),
    }
    table = pa.Table.from_pydict(columns)
    yield "keys", _with_bucket(table, "id", num_buckets)
    has_sketch = pc.greater(pc.binary_length(rows.column("sketch")), 0)
    sketches = pa.Table.from_pydict({"node": columns["node"], "sketch": rows.column("sketch")}).filter(has_sketch)
    yield "sketches", _with_bucket(sketches, "node", num_buckets)


def _join_sketch(rows: Any, side: str, sketches: Iterator[Any]) -> Any:
    """Rows with the sketch of their node `side` as a further column. Sketches that nobody wants are not held."""
    wanted = pc.unique(rows.column(side).combine_chunks())
    held = [batch.filter(pc.is_in(batch.column("node"), wanted)) for batch in sketches]
    known = pa.Table.from_batches(held).combine_chunks()
    at = pc.index_in(rows.column(side).combine_chunks(), known.column("node").combine_chunks())
    return rows.append_column(f"sketch_{side}", known.column("sketch").combine_chunks().take(at))


def _edges_sum(edges: Any) -> Any:
    """How many edges, and the sum of their hashes: the same for the same set, whoever holds which."""
    content = 0
    for a, b in zip(edges.column("a").to_pylist(), edges.column("b").to_pylist(), strict=True):
        content += int.from_bytes(hashlib.blake2b(f"{a}\1{b}".encode(), digest_size=8).digest(), "big")
    return pa.record_batch(
        {
            BUCKET: pa.array([0], pa.int32()),
            "number": pa.array([len(edges)], pa.int64()),
            "content": [f"{content % (1 << 64):016x}"],
        }
    )


def _table(batches: Iterator[Any]) -> Any:
    """All rows of a bucket; None where there are none."""
    found = list(batches)
    return pa.Table.from_batches(found).combine_chunks() if found else None


def _with_bucket(rows: Any, key: str, num_buckets: int) -> Any:
    rows = rows.append_column(BUCKET, pa.array(by_bucket(rows.column(key), num_buckets), pa.int32()))
    return _one_batch(rows)


def _one_batch(rows: Any) -> Any:
    batches = rows.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=rows.schema)


def _winners(rows: Any, key: str) -> tuple[Any, Any]:
    """(the row with the smallest node of each key; the other rows, with a column `winner`)."""
    rows = rows.sort_by([(key, "ascending"), ("node", "ascending")]).combine_chunks()
    keys = rows.column(key).combine_chunks()
    first = np.ones(len(keys), dtype=bool)
    if len(keys) > 1:
        first[1:] = np.asarray(pc.not_equal(keys[1:], keys[:-1]))
    winner = np.maximum.accumulate(np.where(first, np.arange(len(keys)), 0))
    losers = pa.array(np.flatnonzero(~first))
    lost = rows.take(losers)
    lost = lost.append_column("winner", rows.column("node").take(pa.array(winner[~first])))
    return rows.filter(pa.array(first)), lost


def _verdicts(nodes: Any, winners: Any, reason: str) -> Any:
    """Verdict rows, by split; documents of an earlier corpus have none."""
    slots = [slot_of(node) for node in nodes.to_pylist()]
    if winners is None:
        details = [""] * len(slots)
    else:
        details = [f"of {'/'.join(place_of(node))}" for node in winners.to_pylist()]
    rows = pa.record_batch(
        {
            BUCKET: pa.array([split for split, _ in slots], pa.int32()),
            "row": pa.array([row for _, row in slots], pa.int64()),
            "reason": pa.array([reason] * len(slots), pa.string()),
            "detail": pa.array(details, pa.string()),
        }
    )
    return rows.filter(pc.not_equal(rows.column(BUCKET), EARLIER))


def _apply(verdicts: Iterator[Any]) -> Stage:
    """The stage that drops the rows of a split which a verdict names."""
    found: dict[int, tuple[str, str]] = {}
    for batch in verdicts:
        for row, reason, detail in zip(
            *(batch.column(name).to_pylist() for name in ("row", "reason", "detail")), strict=True
        ):
            found[row] = (reason, detail)

    def stage(batches: Iterator[Any]) -> Iterator[Any]:
        first = 0
        for batch in batches:
            fates = [found.get(first + at, ("", "")) for at in range(batch.num_rows)]
            yield drop(batch, [reason for reason, _ in fates], [detail for _, detail in fates])
            first += batch.num_rows

    return stage
