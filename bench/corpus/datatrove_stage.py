"""datatrove's filters and MinHash deduplication on the same records, combined as in its examples.

Run as `python -m bench.corpus.datatrove_stage RAW WORK STAGE`: one process per stage.

    signature   read -> filters -> MinHash signatures (14 buckets of 8 hashes, word 5-grams: its defaults)
    buckets     signatures -> duplicate pairs
    cluster     pairs -> documents to remove
    filter      read -> filters -> remove -> Parquet
"""

from __future__ import annotations

import sys

__all__ = ["STAGES", "run_stage"]

STAGES = ("signature", "buckets", "cluster", "filter")


def run_stage(raw: str, work: str, stage: str) -> None:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.pipeline.filters import LambdaFilter
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.pipeline.writers import ParquetWriter

    config = MinhashConfig()
    # datatrove has no filters for code; this one has the line and letter limits of lakh's parse stage.
    read = [ParquetReader(raw, text_key="content", glob_pattern="*.parquet"), LambdaFilter(_looks_like_code)]
    pipelines = {
        "signature": [*read, MinhashDedupSignature(f"{work}/signatures", config=config)],
        "buckets": [MinhashDedupBuckets(f"{work}/signatures", f"{work}/buckets", config=config)],
        "cluster": [MinhashDedupCluster(f"{work}/buckets", f"{work}/remove", config=config)],
        "filter": [*read, MinhashDedupFilter(f"{work}/remove"), ParquetWriter(f"{work}/out")],
    }
    tasks = config.num_buckets if stage == "buckets" else 1
    LocalPipelineExecutor(pipelines[stage], tasks=tasks, workers=1, logging_dir=f"{work}/logs/{stage}").run()


def _looks_like_code(document: object) -> bool:
    text: str = document.text  # type: ignore[attr-defined]
    lines = text.splitlines()
    if not lines or max(map(len, lines)) > 1000 or sum(map(len, lines)) / len(lines) > 100:
        return False
    return sum(character.isalnum() for character in text) >= 0.25 * len(text)


if __name__ == "__main__":
    run_stage(*sys.argv[1:4])
