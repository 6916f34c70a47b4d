"""Peak memory of the steps of deduplication for each document of a bucket: the constants of lakh.corpus.build_size.

    python -m bench.corpus.step_memory [--documents 30000 120000]

Each step runs in a process of its own, as on Spark: the payloads of its bucket have arrived, and its output is
committed for 37,253 buckets (a build of 10 TB). Documents are those of 1 KB of text: 16 bands, a sketch of 150 values,
a node of about 70 bytes; as many candidate pairs as documents, and one payload for seven documents. The slope between
the two numbers of documents is the memory of a document. The last step is given documents that are all dropped.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from lakh.corpus.build_plan import CorpusBuildPlan, SourceSurvey
from lakh.corpus.build_steps import _drop_rows
from lakh.corpus.dedup import steps
from lakh.corpus.dedup.near import band_rows
from lakh.corpus.engines import PipelineStep
from lakh.corpus.engines.cluster import call_step
from lakh.corpus.engines.exchange import decode, encode
from lakh.corpus.settings import Settings

NUM_BUCKETS = 37_253
BANDS, SKETCH_VALUES = 16, 150
PAYLOAD_DOCUMENTS = 7
WARM_UP_DOCUMENTS = 64
FUNCTIONS = {
    "places": steps.places,
    "exact": steps.exact,
    "pairs": steps.find_pairs,
    "attach": steps.attach_sketch,
    "verify": steps.verify,
}
DROPPED = "dropped row"


def payloads(step: str, documents: int, rng: np.random.Generator) -> Iterator[tuple[str, bytes]]:
    """(port, Arrow bytes) of a bucket, in small pieces."""
    for first in range(0, documents, PAYLOAD_DOCUMENTS):
        rows = min(PAYLOAD_DOCUMENTS, documents - first)
        nodes = [_node(number) for number in range(first, first + rows)]
        bands = [rng.integers(0, 2**62, BANDS).tobytes() for _ in range(rows)]
        if step in ("places", "exact"):
            digest = [rng.bytes(16) for _ in range(rows)]
            ids = {"id": pa.array([value.hex() for value in digest], pa.large_string())} if step == "places" else {}
            columns = ids | {
                "node": pa.array(nodes, pa.large_string()),
                "digest": pa.array(digest, pa.large_binary()),
                "bands": pa.array(bands, pa.large_binary()),
                "text_bytes": pa.array([1000] * rows, pa.int64()),
            }
            yield "keys" if step == "places" else "unique", encode([pa.record_batch(columns)])
        elif step == "pairs":
            # every band of a document goes to another bucket: a bucket has bands of 16 times as many documents
            several = [_node(number) for number in range(first * BANDS, (first + rows) * BANDS)]
            keys = pa.array([rng.integers(0, 2**62, 1).tobytes() for _ in several], pa.binary())
            table = band_rows(pa.table({"node": several, "bands": keys}))
            yield "bands", encode(table.combine_chunks().to_batches())
        else:
            others = [_node(int(number)) for number in rng.integers(0, documents, rows)]
            a, b = (nodes, others) if step == "attach" else (others, nodes)
            pairs = {"a": pa.array(a, pa.large_string()), "b": pa.array(b, pa.large_string())}
            if step == "verify":
                pairs["sketch_a"] = pa.array([_sketch(rng) for _ in range(rows)], pa.large_binary())
            yield "pairs" if step == "attach" else "attached", encode([pa.record_batch(pairs)])
            sketches = [_sketch(rng) for _ in range(rows)]
            known = {"node": pa.array(nodes, pa.large_string()), "sketch": pa.array(sketches, pa.large_binary())}
            yield "sketches", encode([pa.record_batch(known)])


def drops(documents: int) -> Iterator[Any]:
    for first in range(0, documents, PAYLOAD_DOCUMENTS):
        rows = range(first, min(first + PAYLOAD_DOCUMENTS, documents))
        columns = {
            "row": pa.array(rows, pa.int64()),
            "reason": pa.array(["near-duplicate"] * len(rows), pa.large_string()),
            "detail": pa.array(
                [f"of owner{row:07d}/project/src/module/file{row:09d}.py" for row in rows], pa.large_string()
            ),
        }
        yield from decode(encode([pa.record_batch(columns)]))


def peak_bytes(step: str, documents: int) -> int:
    """How much the peak memory of this process grows when the step runs for a bucket of so many documents."""
    with tempfile.TemporaryDirectory() as folder:
        plan = CorpusBuildPlan(Settings(), SourceSurvey((), "", 0), folder, folder, 2000, NUM_BUCKETS)

        def run(number: int, bucket: int) -> None:
            if step == DROPPED:
                _drop_rows(drops(number))
                return
            made = PipelineStep(step, FUNCTIONS[step], NUM_BUCKETS, (), "comparing")
            for _ in call_step(plan, made, bucket, payloads(step, number, np.random.default_rng(7))):
                pass

        run(WARM_UP_DOCUMENTS, 0)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run(documents, 1)
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def _node(number: int) -> str:
    return f"110owner{number % 99991:07d}/project\0src/module/file{number:09d}.py\0{number % 2000}\0{number}"


def _sketch(rng: np.random.Generator) -> bytes:
    return np.sort(rng.integers(0, 2**32, SKETCH_VALUES, dtype=np.uint32)).tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs=2, default=[30_000, 120_000])
    parser.add_argument("--step", choices=[*FUNCTIONS, DROPPED], help="measure this one in this process, as JSON")
    options = parser.parse_args()
    if options.step:
        print(json.dumps(peak_bytes(options.step, options.documents[0])))
        return
    print("| step | peak, MB | documents | bytes a document |\n|---|---|---|---|")
    for step in [*FUNCTIONS, DROPPED]:
        peaks = []
        for number in options.documents:
            command = [
                sys.executable,
                "-m",
                "bench.corpus.step_memory",
                "--step",
                step,
                "--documents",
                str(number),
                "0",
            ]
            peaks.append(int(subprocess.run(command, capture_output=True, check=True, text=True).stdout))
        slope = (peaks[1] - peaks[0]) / (options.documents[1] - options.documents[0])
        shown = " and ".join(f"{peak / 1e6:.0f}" for peak in peaks)
        print(f"| {step} | {shown} | {' and '.join(f'{n:,}' for n in options.documents)} | {slope:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
