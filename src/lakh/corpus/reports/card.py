"""The dataset card of a corpus: README.md, in the format that dataset hubs read.

A pure function of the report, without times or machines: the same corpus has the same card.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from lakh.corpus.document import REASONS
from lakh.corpus.reports.report import CorpusReport

__all__ = ["CARD", "MADE", "card"]

CARD = "README.md"
MADE = "Made by `lakh corpus build`."
SIZES = (
    (1_000, "n<1K"),
    (10_000, "1K<n<10K"),
    (100_000, "10K<n<100K"),
    (1_000_000, "100K<n<1M"),
    (10_000_000, "1M<n<10M"),
)


def card(report: CorpusReport) -> str:
    """Markdown with a YAML header."""
    size = next((name for limit, name in SIZES if report.kept < limit), "n>10M")
    funnel = [(*row, REASONS.get(row[0], "")) for row in report.funnel()]
    languages = [(name, count, report.language_bytes.get(name, 0)) for name, count in _largest(report.languages)]
    licences = [(name or "(nothing found)", count) for name, count in _largest(report.licences)]
    secrets = _table(("kind", "places redacted"), _largest(report.secrets)) if report.secrets else "None were found."
    benchmarks = "Their tasks were not removed: no benchmark was given or found."
    if report.benchmarks:
        benchmarks = "Documents with tasks of these files were removed:\n\n" + _table(
            ("file", "SHA-256"), list(report.benchmarks.items())
        )
    sources = [f"- `{_cell(name)}`" for name in report.sources]
    sources += [f"- without what is in the corpus `{name[:16]}`" for name in report.earlier]
    newline = "\n"
    return f"""---
task_categories:
- text-generation
tags:
- code
size_categories:
- {size}
configs:
- config_name: default
  data_files: docs-*.parquet
---

# Code corpus

{report.kept:,} documents, {report.bytes_out / 1e6:,.1f} MB of text, kept of {report.read:,} offered ({
        report.bytes_in / 1e6:,.1f} MB read). {MADE}

Content: `{report.output_sha256}`

## Sources

{newline.join(sources)}

Listing: `{report.listing_sha256}`

## What was dropped

{_table(("reason", "documents", "left", "meaning"), funnel)}

## Languages

{_table(("language", "documents", "bytes"), languages)}

## Licences

As found in licence files, package metadata and file headers; empty if nothing was found. `licence_evidence` of each
document says where.

{_table(("licence", "documents"), licences)}

## Secrets and personal data

{secrets}

Detection uses patterns and is not complete: look before you publish.

## Evaluation benchmarks

{benchmarks}

## Fields

`id` (of repository and path), `repo`, `path`, `language`, `licence`, `source`, `licence_evidence`, `provenance`,
`marks` (tags such as test), `text`, `sha256` (of the text).

## How it was made

Versions: {", ".join(f"{name} {version}" for name, version in sorted(report.versions.items()))}

Settings:

```json
{json.dumps(report.settings, indent=1, sort_keys=True)}
```
"""


def _largest(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _table(columns: Sequence[str], rows: Sequence[tuple[object, ...]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|").replace("\n", " ")
