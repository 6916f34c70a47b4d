"""Accuracy and speed of the corpus stages, from known changes planted in real files.

    python -m bench.corpus.accuracy --files DIR... --labels DIR --benchmarks DIR [--megabytes 2] [--only near,speed]

--files are folders of real source in any languages, --labels holds licensee/fixtures(.yml), --benchmarks
HumanEval.jsonl.gz and mbpp.jsonl. --clean are folders that contain no benchmark, all of whose files are searched for
one. `exact` covers the languages for which lakh has no grammar if tree-sitter-language-pack (before 1.0) is installed.
Prints a table; intervals are Wilson's, 95 %. Runs on one core. Secrets have a measurement of their own,
secret_recall.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench.corpus.planted import SourceFile, edit_lines, mutate, real_files, reindented, rename_some, renamed
from bench.corpus.relayout import relayout, respelt, unparsed
from bench.corpus.rewritten import other_program, same_program
from lakh.corpus.dedup.near import NearDedupSettings, band_rows, candidate_pairs, verify_pairs
from lakh.corpus.filters.benchmark_files import read_records
from lakh.corpus.filters.decontaminate import DecontaminationSettings, read_benchmarks
from lakh.corpus.filters.quality import LIMITS
from lakh.corpus.filters.syntax import error_share, parser_of
from lakh.corpus.licences.detect import header_licence, repository_licence
from lakh.corpus.licences.spdx_texts import identify_text
from lakh.corpus.parsing.import_order import SourceFile as CorpusSource
from lakh.corpus.parsing.import_order import order_files
from lakh.corpus.parsing.languages import language_of
from lakh.corpus.parsing.text_features import TextFeatures, text_features, tokens_of
from lakh.corpus.secrets import SecretSettings, scanner_of

SYNTAX = ("python", "javascript", "typescript", "java", "go", "rust", "c", "cpp")
Row = tuple[str, str, str]
MAX_CLEAN_BYTES = 1_000_000  # the default limit of a build
MAX_SHOWN = 20


def interval(hits: int, total: int) -> str:
    """hits/total with its 95 % Wilson interval."""
    if not total:
        return "0 of 0"
    z, p = 1.96, hits / total
    middle = (p + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    return f"{p:.4f} ({hits} of {total}; {max(0, middle - half):.3f}-{min(1, middle + half):.3f})"


def exact(files: list[SourceFile], rng: random.Random, _: argparse.Namespace) -> Iterator[Row]:
    changes: list[tuple[str, Callable[[str, str], str | None]]] = [
        ("layout and comments", lambda text, language: relayout(text, language, rng)),
        ("quotes, parentheses, trailing commas", lambda text, language: respelt(text, language, rng)),
        ("printed by ast.unparse", lambda text, language: unparsed(text) if language == "python" else None),
    ]
    # a line end in a string is part of its value, and the rewritten files have \n
    files = [replace(file, text=file.text.replace("\r\n", "\n")) for file in files]
    for language in SYNTAX:
        mine = [(file.text, text_features(file.text, language).digest) for file in files if file.language == language]
        for name, change in changes:
            others = [(change(text, language), digest) for text, digest in mine]
            same = [text_features(other, language).digest == digest for other, digest in others if other is not None]
            if same:
                yield f"exact dedup, {language}: {name}", interval(sum(same), len(same)), "0.99"
    for language in sorted({file.language for file in files} - set(SYNTAX)):
        mine = [(file.text, text_features(file.text, language).digest) for file in files if file.language == language]
        for name, layout in (("layout and comments", True), ("quotes, parentheses, trailing commas", False)):
            rewritten = [(same_program(text, language, rng, layout=layout), digest) for text, digest in mine]
            same = [text_features(new, language).digest == digest for new, digest in rewritten if new is not None]
            if same:
                yield f"exact dedup, {language}: {name}", interval(sum(same), len(same)), "0.99"
    for language in sorted({file.language for file in files}):
        mine = [(file.text, text_features(file.text, language).digest) for file in files if file.language == language]
        changed = [(other_program(text, language, rng), digest) for text, digest in mine for _ in range(3)]
        equal = [text_features(new, language).digest == digest for new, digest in changed if new is not None]
        if equal:
            yield f"exact dedup, {language}: different programs merged", f"{sum(equal)} of {len(equal)}", "0"
    distinct: dict[bytes, set[bytes]] = defaultdict(set)
    for file in files:
        # compared with: all characters but blanks, comments included
        distinct[text_features(file.text, file.language).digest].add(re.sub(rb"\s+", b"", file.text.encode()))
    merged = sum(len(texts) - 1 for texts in distinct.values())
    yield (
        "files merged although their non-blank characters differ",
        f"{merged} of {len(files)}",
        "comments or commas alone",
    )


def near(files: list[SourceFile], rng: random.Random, _: argparse.Namespace) -> Iterator[Row]:
    copies = [mutate(file.text, rng) for file in files]
    found, known, num_candidates = _found_pairs(files, copies, NearDedupSettings())
    sets = [(_shingles(file), _shingles(replace(file, text=copy))) for file, copy in zip(files, copies, strict=True)]

    def true(x: str, y: str) -> float:
        left, right = (sets[int(node[:-1])][node[-1] == "b"] for node in (x, y))
        return len(left & right) / max(1, len(left | right))

    planted = [(f"{n:06}a", f"{n:06}b") for n in range(len(files))]
    # exact deduplication has these already: only comments and layout changed
    planted = [pair for pair in planted if known[pair[0]].digest != known[pair[1]].digest]
    for low, high, bar in ((0.8, 0.85, "-"), (0.85, 1.01, "0.95"), (0.9, 1.01, "0.99")):
        band = [pair for pair in planted if low <= true(*pair) < high]
        yield (
            f"near dedup, recall at true Jaccard {low} and above" + (" (to 0.85)" if high < 1 else ""),
            interval(sum(pair in found for pair in band), len(band)),
            bar,
        )
    right = sum(true(*pair) >= NearDedupSettings().threshold for pair in found)
    yield "near dedup, precision (true Jaccard >= 0.8), all verified pairs", interval(right, len(found)), "0.99"
    yield "near dedup, candidates for each verified pair", f"{num_candidates / max(1, len(found)):.2f}", "-"


def edits(files: list[SourceFile], rng: random.Random, options: argparse.Namespace) -> Iterator[Row]:
    """Recall of near deduplication by kind of edit, threshold and `ignore_names`."""
    files = [file for file in files if file.language in SYNTAX]
    changes: list[tuple[str, Callable[[SourceFile], str]]] = [
        ("5 % of lines edited", lambda file: edit_lines(file.text, 0.05, rng)),
        ("10 % of lines edited", lambda file: edit_lines(file.text, 0.1, rng)),
        ("10 % of names renamed", lambda file: rename_some(file.text, file.language, 0.1, rng)),
        ("20 % of names renamed", lambda file: rename_some(file.text, file.language, 0.2, rng)),
        ("all names renamed", lambda file: rename_some(file.text, file.language, 1.0, rng)),
    ]
    copies = {name: [change(file) for file in files] for name, change in changes}
    for ignore_names in (False, True):
        for threshold in (0.8, 0.7, 0.6, 0.5):
            settings = NearDedupSettings(threshold=threshold, ignore_names=ignore_names)
            mode = f"threshold {threshold}" + (", names ignored" if ignore_names else "")
            others = 0
            for name, texts in copies.items():
                found, known, _ = _found_pairs(files, texts, settings)
                hits = [
                    (f"{n:06}a", f"{n:06}b") in found or known[f"{n:06}a"].digest == known[f"{n:06}b"].digest
                    for n in range(len(files))
                ]
                yield f"near dedup, {mode}: {name}", interval(sum(hits), len(hits)), "reported"
                others = sum(x[-1] == y[-1] == "a" for x, y in found)
            yield f"near dedup, {mode}: pairs of different files", f"{others} among {len(files)}", "reported"


def _found_pairs(
    files: list[SourceFile], copies: list[str], settings: NearDedupSettings
) -> tuple[set[tuple[str, str]], dict[str, TextFeatures], int]:
    """The pairs of nodes found among files (NUMBERa) and their copies (NUMBERb), the features, the candidates."""
    known = {}
    for number, (file, copy) in enumerate(zip(files, copies, strict=True)):
        known[f"{number:06}a"] = text_features(file.text, file.language, settings)
        known[f"{number:06}b"] = text_features(copy, file.language, settings)
    bands = pa.array([fact.bands for fact in known.values()], pa.binary())
    made = candidate_pairs(band_rows(pa.table({"node": list(known), "bands": bands})))
    a, b = made["a"].to_pylist(), made["b"].to_pylist()
    sketches = {"sketch_a": [known[x].sketch for x in a], "sketch_b": [known[x].sketch for x in b]}
    kept = verify_pairs(pa.table({"a": a, "b": b, **sketches}), settings)
    return set(zip(kept["a"].to_pylist(), kept["b"].to_pylist(), strict=True)), known, len(a)


def _shingles(file: SourceFile) -> set[tuple[int, ...]]:
    tokens = tokens_of(file.text, file.language)
    words = tokens.hashes[tokens.kinds <= 2].tolist()
    return {tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4))}


def licences(_: list[SourceFile], rng: random.Random, options: argparse.Namespace) -> Iterator[Row]:
    folder = options.labels / "licensee"
    labels, name = {}, ""
    for line in (folder / "fixtures.yml").read_text().splitlines():
        if found := re.match(r"^([\w.-]+):", line):
            name = found[1]
        if found := re.match(r"^\s+key: ?(.*)", line):
            labels[name] = found[1].strip()
    right = better = 0
    contents: list[bytes] = []
    for name, label in labels.items():
        base = folder / "fixtures" / name
        files = {str(p.relative_to(base)): p.read_bytes() for p in base.rglob("*") if p.is_file()}
        contents += files.values()
        expression = repository_licence(files).expression
        family = re.sub(r"-(only|or-later)$", "", expression.lower())
        summary = "other" if "unknown" in family or " and " in family else family or "null"
        right += summary == label
        better += label == "other" and summary.startswith("cc-by-n")
    yield "licences, equal to the label", interval(right, len(labels)), "0.95"
    yield "licences, equal or more exact (CC-BY-ND, CC-BY-NC-SA named)", interval(right + better, len(labels)), "0.95"
    bulk = contents * 20
    stamped = [content + b"\ncopyright (c) %d\n" % number for number, content in enumerate(bulk)]  # past the cache
    begin = time.process_time()
    for content in stamped:
        identify_text(content)
    speed = sum(map(len, stamped)) / 1e6 / (time.process_time() - begin)
    yield "licences, MB/s of licence texts, nothing cached", f"{speed:.0f}", "50"


def benchmarks(files: list[SourceFile], rng: random.Random, options: argparse.Namespace) -> Iterator[Row]:
    paths = [str(options.benchmarks / name) for name in ("HumanEval.jsonl.gz", "mbpp.jsonl")]
    programs = [
        (row["prompt"] + row["canonical_solution"])
        if "canonical_solution" in row
        else row["code"].replace("\r\n", "\n")
        for path in paths
        for row in read_records(path)
    ]
    hosts = [file.text for file in files if file.language == "python"]
    targets = read_benchmarks(DecontaminationSettings(benchmarks=tuple(paths)))
    alone = read_benchmarks(DecontaminationSettings(benchmarks=tuple(paths), ngram_words=100_000))
    forms: list[tuple[str, Callable[[str], str]]] = [
        ("verbatim", str),
        ("re-indented", reindented),
        ("renamed", lambda code: renamed(code, rng)),
        ("printed by ast.unparse", lambda code: unparsed(code) or code),
        ("printed by ast.unparse and renamed", lambda code: renamed(unparsed(code) or code, rng)),
    ]
    for form, change in forms:
        for how, wanted in (("", targets), (", by program alone", alone)):
            found = 0
            for program in programs:
                host = rng.choice(hosts)
                cut = host.find("\n\n\n") + 3 if "\n\n\n" in host and host.count('"""') == 0 else 0
                text = f"{host[:cut]}{change(program)}\n\n\n{host[cut:]}"
                found += wanted.find(text.encode(), "python") is not None
            yield f"decontamination, {form}{how}", interval(found, len(programs)), "1.0"
    hits: Counter[str] = Counter()
    for file in files:
        hit = targets.find(file.text.encode(), file.language)
        if hit:
            hits[f"{hit.how} {hit.task}"] += 1
    size = sum(len(file.text.encode()) for file in files)
    summary = ", ".join(f"{k} {n}" for k, n in hits.most_common(5))
    yield (
        f"decontamination, hits in {size / 1e6:.0f} MB of clean code",
        f"{sum(hits.values())} of {len(files)}, {1e4 * sum(hits.values()) / len(files):.1f} per 10,000 ({summary})",
        "reported",
    )


def clean(_: list[SourceFile], rng: random.Random, options: argparse.Namespace) -> Iterator[Row]:
    """False positives of decontamination: the hits among all files of --clean, which contain no benchmark."""
    paths = [str(options.benchmarks / name) for name in ("HumanEval.jsonl.gz", "mbpp.jsonl")]
    targets = read_benchmarks(DecontaminationSettings(benchmarks=tuple(paths)))
    hits: list[str] = []
    num_files = size = 0
    seen: set[bytes] = set()
    for path in (path for root in options.clean for path in sorted(Path(root).rglob("*"))):
        language = language_of(path.name)
        if not language or path.is_symlink() or not path.is_file():
            continue
        content = path.read_bytes()
        digest = hashlib.sha256(content).digest()
        if not 100 <= len(content) <= MAX_CLEAN_BYTES or digest in seen:
            continue
        seen.add(digest)
        num_files += 1
        size += len(content)
        hit = targets.find(content, language)
        if hit:
            hits.append(f"{hit.how} {hit.task} in {'/'.join(path.parts[-3:])}")
    yield (
        f"decontamination, false positives in {num_files} files ({size / 1e6:.0f} MB) without a benchmark",
        f"{1e4 * len(hits) / max(1, num_files):.2f} per 10,000 files, {interval(len(hits), num_files)}",
        "reported",
    )
    for shown in hits[:MAX_SHOWN]:
        yield "decontamination, a false positive", shown, "reported"


def speed(files: list[SourceFile], rng: random.Random, options: argparse.Namespace) -> Iterator[Row]:
    data = [(file.text.encode(), file) for file in files]
    size = sum(len(raw) for raw, _ in data) / 1e6
    scanner = scanner_of(SecretSettings())
    hints = scanner_of(SecretSettings(engine="hints"))
    targets = read_benchmarks(DecontaminationSettings(benchmarks=(str(options.benchmarks / "mbpp.jsonl"),)))
    parsed = [(raw, file) for raw, file in data if parser_of(file.language) is not None]
    jobs: list[tuple[str, list[Any], Callable[[bytes, SourceFile], object]]] = [
        ("analyse (lex, digest, MinHash, sketch)", data, lambda raw, file: text_features(raw, file.language)),
        (
            "quality (tree-sitter)",
            parsed,
            lambda raw, file: error_share(
                raw, file.language, file.path, limit=LIMITS[file.language].error if file.language in LIMITS else 0.1
            ),
        ),
        ("secrets and personal data, hyperscan", data, lambda raw, _: scanner.find(raw)),
        ("secrets and personal data, hints (no hyperscan)", data[: len(data) // 8], lambda raw, _: hints.find(raw)),
        ("licence headers", data, lambda raw, _: header_licence(raw)),
        ("decontaminate", data, lambda raw, file: targets.find(raw, file.language)),
    ]
    total = 0.0
    for name, rows, job in jobs:
        for raw, file in rows[:40]:
            job(raw, file)  # compiles and fills caches
        begin = time.process_time()
        for raw, file in rows:
            job(raw, file)
        spent = time.process_time() - begin
        mb = sum(len(raw) for raw, _ in rows) / 1e6
        if "hints" not in name:
            total += spent / mb
        yield f"speed, {name}", f"{mb / spent:.1f} MB per CPU-second", "-"
    begin = time.process_time()
    order_files([CorpusSource(file.path, file.language, file.text) for file in files])
    spent = time.process_time() - begin
    yield "speed, order by imports", f"{size / spent:.1f} MB per CPU-second", "-"
    total += spent / size
    yield "speed, all of these for one document (sum)", f"{1 / total:.2f} MB per CPU-second", "2.8 end to end"
    by_language = defaultdict(list)
    for raw, file in parsed:
        by_language[file.language].append(
            error_share(
                raw, file.language, file.path, limit=LIMITS[file.language].error if file.language in LIMITS else 0.1
            )
        )
    dropped = {k: sum(x > LIMITS[k].error for x in v) for k, v in sorted(by_language.items())}
    summary = ", ".join(f"{k} {n} of {len(by_language[k])}" for k, n in dropped.items())
    yield "quality, files over their language's error limit", summary, "reported"


PARTS = {
    "exact": exact,
    "near": near,
    "edits": edits,
    "licences": licences,
    "benchmarks": benchmarks,
    "clean": clean,
    "speed": speed,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", required=True)
    parser.add_argument("--labels", type=Path, required=True)
    parser.add_argument("--benchmarks", type=Path, required=True)
    parser.add_argument("--clean", nargs="*", default=[], help="folders without benchmarks, for --only clean")
    parser.add_argument("--megabytes", type=float, default=2.0, help="per language")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    files = real_files(options.files, per_language_bytes=int(options.megabytes * 1e6), seed=options.seed)
    languages = Counter(file.language for file in files)
    size = sum(len(file.text.encode()) for file in files)
    summary = ", ".join(f"{k} {n}" for k, n in languages.most_common())
    print(f"files   {len(files)} of {size / 1e6:.1f} MB: {summary}")
    print(f"machine {platform.machine()}, Python {platform.python_version()}, seed {options.seed}\n")
    print("| what | measured | at least |\n|---|---|---|")
    rows = []
    for name in options.only.split(","):
        for row in PARTS[name](files, random.Random(options.seed), options):
            rows.append(row)
            print(f"| {row[0]} | {row[1]} | {row[2]} |", flush=True)
    if options.json:
        print(json.dumps({"rows": [dict(zip(("what", "measured", "bar"), row, strict=True)) for row in rows]}))


if __name__ == "__main__":
    main()
