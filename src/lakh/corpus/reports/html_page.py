"""The report as one self-contained HTML page with plots and without scripts.

Plots are SVG bars; all text from documents is escaped. A pure function of the report and of samples of dropped
documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from lakh.corpus.document import REASONS

if TYPE_CHECKING:
    from lakh.corpus.reports.lookup import DuplicateCluster
    from lakh.corpus.reports.report import CorpusReport

__all__ = ["report_html"]

BAR_WIDTH, ROW_HEIGHT, LABEL_WIDTH = 520, 22, 200
MAX_BARS = 25
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #1b1f24;
       background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top }
code { font: 13px ui-monospace, monospace; overflow-wrap: anywhere } svg text { font: 12px system-ui, sans-serif }
.bar { fill: #3b6ea5 } .gone { fill: #c8d3df } .dim { color: #59636e }
@media (prefers-color-scheme: dark) { body { background: #14171a; color: #d8dee4 } svg text { fill: #d8dee4 }
  .gone { fill: #3a434d } .dim { color: #9aa4ae } }
"""


def report_html(
    report: CorpusReport,
    dropped: Mapping[str, Sequence[tuple[str, str]]],
    clusters: Sequence[DuplicateCluster] = (),
) -> str:
    """The page; `dropped` has some (place, detail) for each reason."""
    kept = f"{report.kept:,} documents ({report.bytes_out / 1e6:,.1f} MB)"
    funnel = [("read", report.read, 0)] + [(reason, left, count) for reason, count, left in report.funnel()]
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Corpus report</title><style>{STYLE}</style>",
        f"<h1>Corpus report</h1><p>{kept} kept of {report.read:,} offered ({report.bytes_in / 1e6:,.1f} MB read).",
        f"<br><span class=dim>content <code>{escape(report.output_sha256)}</code></span></p>",
        "<h2>Funnel</h2>",
        _funnel(funnel),
        "<h2>Languages, MB of text</h2>",
        _bars({name: size / 1e6 for name, size in report.language_bytes.items()}, "{:,.3f}"),
        "<h2>Licences, documents</h2>",
        _bars({name or "(nothing found)": float(count) for name, count in report.licences.items()}, "{:,.0f}"),
        "<h2>Secrets and personal data, places redacted</h2>",
        _bars({name: float(count) for name, count in report.secrets.items()}, "{:,.0f}"),
        "<h2>Before and after redaction</h2>",
        _samples(report.samples),
        "<h2>Largest groups of duplicates</h2>",
        _clusters(clusters),
        "<h2>Some of what was dropped</h2>",
        *(_dropped(reason, rows) for reason, rows in dropped.items()),
        "<h2>Sources</h2><ul>",
        *(f"<li><code>{escape(name)}</code>" for name in report.sources),
        "</ul>",
    ]
    return "\n".join(parts) + "\n"


def _funnel(steps: Sequence[tuple[str, int, int]]) -> str:
    """Bars of the documents left after each reason, and beside them the dropped ones."""
    most = max(1, steps[0][1])
    rows = []
    for number, (reason, left, gone) in enumerate(steps):
        text = f"{left:,} left" + (f", −{gone:,}" if gone else "")
        title = f"<title>{escape(REASONS.get(reason, ''))}</title>"
        rows.append(_bar(number, reason, text, left / most, gone / most) + title)
    return _svg(rows)


def _bars(values: Mapping[str, float], form: str) -> str:
    if not values:
        return "<p class=dim>none</p>"
    most = max(*values.values(), 1e-9)
    rows = []
    ranked = sorted(values.items(), key=lambda item: (-item[1], item[0]))
    for number, (name, value) in enumerate(ranked[:MAX_BARS]):
        rows.append(_bar(number, name[:30], form.format(value), value / most))
    more = f"<p class=dim>and {len(ranked) - MAX_BARS} more</p>" if len(ranked) > MAX_BARS else ""
    return _svg(rows) + more


def _bar(number: int, label: str, text: str, share: float, gone_share: float = 0.0) -> str:
    y, wide, gone = number * ROW_HEIGHT, BAR_WIDTH * share, BAR_WIDTH * gone_share
    box = f"y={y + 3} height={ROW_HEIGHT - 6}"
    return (
        f"<text x=0 y={y + 15}>{escape(label)}</text>"
        f"<rect class=bar x={LABEL_WIDTH} {box} width={wide:.1f}></rect>"
        f"<rect class=gone x={LABEL_WIDTH + wide:.1f} {box} width={gone:.1f}></rect>"
        f"<text x={LABEL_WIDTH + wide + gone + 6:.1f} y={y + 15}>{text}</text>"
    )


def _svg(rows: Sequence[str]) -> str:
    width, height = LABEL_WIDTH + BAR_WIDTH + 160, len(rows) * ROW_HEIGHT
    bars = "".join(f"<g>{row}</g>" for row in rows)
    return f'<svg viewBox="0 0 {width} {height}" width={width} height={height} style="max-width:100%">{bars}</svg>'


def _samples(samples: Sequence[Mapping[str, str]]) -> str:
    if not samples:
        return "<p class=dim>nothing was redacted</p>"
    rows = [
        f"<tr><td><code>{escape(item['place'])}</code><td><code>{escape(item['before'])}</code>"
        f"<td><code>{escape(item['after'])}</code>"
        for item in samples
    ]
    return "<table><tr><th>document<th>before (masked)<th>after" + "".join(rows) + "</table>"


def _clusters(clusters: Sequence[DuplicateCluster]) -> str:
    if not clusters:
        return "<p class=dim>no document has a duplicate</p>"
    rows = [
        f"<tr><td><code>{escape(one.place)}</code><td>{one.exact:,}<td>{one.near:,}"
        f"<td><code>{'<br>'.join(map(escape, one.members))}</code>"
        for one in clusters
    ]
    return "<table><tr><th>kept<th>exact<th>near<th>dropped in its favour, e.g." + "".join(rows) + "</table>"


def _dropped(reason: str, rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><td><code>{escape(place)}</code><td>{escape(detail)}" for place, detail in rows)
    meaning = escape(REASONS.get(reason, ""))
    return f"<h3>{escape(reason)} <span class=dim>{meaning}</span></h3><table>{cells}</table>"
