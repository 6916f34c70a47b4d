"""Recall of the secret rules on labelled secrets that do not come from them, and findings in clean code.

    python -m bench.corpus.secret_recall [--trufflehog CHECKOUT] [--creddata FOLDER] [--clean DIR...] [--misses 20]

CHECKOUT is a clone of trufflesecurity/trufflehog, FOLDER one of Samsung/CredData after its download_data.py, DIR are
folders of source code without secrets (files named like tests are left out). A label is found if findings cover 80 % of
it. Files of a known language are also redacted, as a build does, and parsed again.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from bench.corpus.accuracy import Row, interval
from bench.corpus.creddata_labels import creddata_labels, is_strong
from bench.corpus.planted import real_files
from bench.corpus.trufflehog_labels import trufflehog_labels
from lakh.corpus.parsing.languages import is_test
from lakh.corpus.secrets import SecretFinding, SecretSettings, find_secrets, redacted

COVERED = 0.8
SETTINGS = SecretSettings(pii=())


def covers(findings: list[SecretFinding], begin: int, size: int) -> bool:
    covered = sum(max(0, min(f.end, begin + size) - max(f.begin, begin)) for f in findings)
    return covered >= COVERED * size


def trufflehog(checkout: Path, misses: int) -> Iterator[Row]:
    hits: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    missed: list[tuple[str, str]] = []
    for case in trufflehog_labels(checkout):
        data = case.text.encode()
        findings = find_secrets(data, SETTINGS)
        for secret in case.secrets:
            value = secret.encode()
            places = [at for at in range(len(data)) if data.startswith(value, at)]
            hit = any(covers(findings, at, len(value)) for at in places)
            hits[case.name] += hit
            totals[case.name] += 1
            if not hit:
                missed.append((case.name, case.text[max(0, case.text.find(secret) - 60) :][: 80 + len(secret)]))
    yield "trufflehog's pattern tests", interval(sum(hits.values()), sum(totals.values())), "0.80"
    whole = sum(hits[name] == total for name, total in totals.items())
    yield "trufflehog, detectors all of whose values are found", interval(whole, len(totals)), "-"
    none = sorted(name for name in totals if not hits[name])
    yield f"trufflehog, detectors without a found value: {len(none)}", ", ".join(none), "-"
    yield from _listed(missed, misses)


def creddata(folder: Path, misses: int) -> Iterator[Row]:
    hits: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    strong: dict[str, bool] = {}
    missed: list[tuple[str, str]] = []
    for file in creddata_labels(folder):
        findings = find_secrets(file.data, SETTINGS, file.language)
        for label in file.labels:
            hit = covers(findings, label.begin, len(label.value.encode()))
            hits[label.category] += hit
            totals[label.category] += 1
            if is_strong(label.value):
                strong[label.value] = strong.get(label.value, False) or hit
                if not hit:
                    text = file.data[max(0, label.begin - 60) : label.begin + len(label.value) + 20]
                    missed.append((label.category, text.decode("utf-8", "replace")))
    yield "CredData, strong values, each once", interval(sum(strong.values()), len(strong)), "0.85"
    yield "CredData, all labels of credentials", interval(sum(hits.values()), sum(totals.values())), "-"
    for category, total in totals.most_common():
        yield f"CredData, {category}", interval(hits[category], total), "-"
    yield from _listed(missed, misses)


def clean(folders: list[Path], megabytes: float, misses: int) -> Iterator[Row]:
    kinds: Counter[str] = Counter()
    by_language: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    shown: list[tuple[str, str]] = []
    size = changed = 0
    for file in real_files([str(f) for f in folders], per_language_bytes=int(megabytes * 1e6)):
        if is_test(file.path):
            continue
        data = file.text.encode()
        size += len(data)
        findings = find_secrets(data, SETTINGS, file.language)
        by_language[file.language][0] += len(data)
        by_language[file.language][1] += len(findings)
        for finding in findings:
            kinds[finding.kind] += 1
            text = data[max(0, finding.begin - 60) : finding.end + 10].decode("utf-8", "replace")
            shown.append((f"{finding.kind} {file.path[-60:]}", text))
        changed += bool(findings) and _shape(data, file.language) != _shape(redacted(data, findings), file.language)
    yield f"findings per MB in {size / 1e6:.0f} MB of clean code", f"{sum(kinds.values()) / size * 1e6:.2f}", "<= 0.5"
    yield "by kind", ", ".join(f"{kind} {number}" for kind, number in kinds.most_common(10)) or "none", "-"
    told = ", ".join(f"{name} {n / b * 1e6:.2f}" for name, (b, n) in sorted(by_language.items()) if b > 1e5)
    yield "by language, per MB", told, "-"
    yield "files that parse otherwise after redaction", str(changed), "0"
    yield from _listed(shown, misses)


def _shape(data: bytes, language: str) -> list[str]:
    """The kinds of the nodes of the syntax tree, and the names in it."""
    from lakh.corpus.filters.syntax import parser_of

    parser = parser_of(language)
    if parser is None:
        return []
    shape, waiting = [], [parser.parse(data).root_node]
    while waiting:
        node = waiting.pop()
        shape.append(node.type)
        if "identifier" in node.type and not node.children:
            shape.append(node.text.decode("utf-8", "replace"))
        waiting += node.children
    return shape


def _listed(items: list[tuple[str, str]], number: int) -> Iterator[Row]:
    step = max(1, len(items) // number) if number else 1
    for name, text in items[::step][:number]:
        yield f"  {name}", repr(text), ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trufflehog", type=Path)
    parser.add_argument("--creddata", type=Path)
    parser.add_argument("--clean", type=Path, nargs="*", default=[])
    parser.add_argument("--megabytes", type=float, default=8.0, help="of clean code for each language")
    parser.add_argument("--misses", type=int, default=0, help="examples to print")
    options = parser.parse_args()
    rows: list[Row] = []
    if options.trufflehog:
        rows += trufflehog(options.trufflehog, options.misses)
    if options.creddata:
        rows += creddata(options.creddata, options.misses)
    if options.clean:
        rows += clean(options.clean, options.megabytes, options.misses)
    print("| what | measured | bar |\n|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
