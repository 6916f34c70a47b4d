"""The report of a load: counts, latency percentiles, the server's own metrics, and plots.

Percentiles are of completed requests as the client saw them. The server's counters are read before and after, its
gauges every second. Cost is a price per hour divided by the completions of that time.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lakh import storage
from lakh.errors import UserError

__all__ = ["GaugeSample", "LoadReport", "both_processes", "check_image", "percentiles", "plot", "save"]

ENDS = ("completed", "cancelled", "timeouts", "rejected", "failed")


@dataclass(frozen=True)
class GaugeSample:
    """The server's gauges at one time."""

    at_s: float
    memory_bytes: float
    blocks_held: float
    running: float
    waiting: float


@dataclass
class LoadReport:
    sent: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    """completed, cancelled, timeouts, rejected, failed"""
    latencies: list[tuple[float, float, float]] = field(default_factory=list)
    """(sent at, time to the first delta, time to the last), in seconds."""
    characters: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    samples: list[GaugeSample] = field(default_factory=list)
    wall_s: float = 0.0
    is_interrupted: bool = False
    """Stopped by Ctrl-C; running requests then count as cancelled."""

    def increase(self, name: str) -> float:
        if not self.after:
            return 0.0
        return self.after.get(f"lakh:{name}", 0.0) - self.before.get(f"lakh:{name}", 0.0)

    def as_dict(self, price_per_hour: float | None = None) -> dict[str, Any]:
        completed = self.ends["completed"]
        prompt_tokens, found = self.increase("prefix_cache_queries_total"), self.increase("prefix_cache_hits_total")
        drafts, kept = (self.increase(f"spec_decode_num_{what}_tokens_total") for what in ("draft", "accepted"))
        known = self.increase("text_cache_hits_total") + self.increase("text_reuse_hits_total")
        asked = self.increase("text_cache_queries_total")
        has_metrics = bool(self.after)
        return {
            "sent": self.sent,
            **({"interrupted": True} if self.is_interrupted else {}),
            **{end: self.ends[end] for end in ENDS},
            "ttft_ms": percentiles([ttft_s for _, ttft_s, _ in self.latencies]),
            "e2e_ms": percentiles([e2e_s for _, _, e2e_s in self.latencies]),
            "prefix_hit_rate": found / prompt_tokens if prompt_tokens else None,
            "text_hit_rate": known / asked if asked else None,
            "prompt_tokens_per_request": prompt_tokens / self.sent if prompt_tokens else None,
            "prefilled_tokens_per_request": (prompt_tokens - found) / self.sent if prompt_tokens else None,
            "draft_acceptance": kept / drafts if drafts else None,
            "server_cpu_ms_per_request": self._cpu_s() * 1e3 / self.sent if self.sent and has_metrics else None,
            "superseded": self.increase("requests_superseded_total") if has_metrics else None,
            "tok_per_s": self.increase("generation_tokens_total") / self.wall_s
            if has_metrics and self.wall_s
            else None,
            "completions_per_s": completed / self.wall_s if self.wall_s else None,
            "cost_per_1k": price_per_hour / 3600 * self.wall_s / completed * 1000
            if completed and price_per_hour is not None
            else None,
            "wall_s": self.wall_s,
            "failures": dict(self.failures),
            **self._leaks(),
        }

    def _cpu_s(self) -> float:
        """CPU time of the server, which other load on the machine hardly affects."""
        before, after = (both_processes(page, "cpu_seconds_total") for page in (self.before, self.after))
        return after - before

    def _leaks(self) -> dict[str, Any]:
        """Memory after the first third and at the end, and blocks held when idle."""
        if len(self.samples) < 2:
            return {}
        early, late = self.samples[len(self.samples) // 3], self.samples[-1]
        return {
            "blocks_held_most": max(sample.blocks_held for sample in self.samples),
            "blocks_held_after": late.blocks_held,
            "waiting_most": max(sample.waiting for sample in self.samples),
            "memory_bytes_early": early.memory_bytes,
            "memory_bytes_after": late.memory_bytes,
        }


def both_processes(page: Mapping[str, float], what: str) -> float:
    """The sum over the API's process and the engine's, if that is another."""
    own = page.get(f"process_{what}", 0.0)
    is_separate = page.get("lakh:engine_process_id") != page.get("process_id")
    return own + (page.get(f"lakh:engine_{what}", 0.0) if is_separate else 0.0)


def percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """In milliseconds; None without data."""
    ranked = sorted(seconds)
    marks = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
    return {name: ranked[min(int(q * len(ranked)), len(ranked) - 1)] * 1e3 if ranked else None for name, q in marks}


def plot(report: LoadReport, path: Path, title: str) -> None:
    """Latency over time, its distribution, and the server's gauges, as PNG or SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 9), layout="constrained")
    over_time, spread, gauges = figure.subplots(3, 1)
    figure.suptitle(title)
    for name, column, colour in (("first token", 1, "tab:orange"), ("last token", 2, "tab:blue")):
        times = [one[0] for one in report.latencies]
        values = [one[column] * 1e3 for one in report.latencies]
        over_time.scatter(times, values, s=4, label=name, color=colour)
        ranked = sorted(values)
        spread.plot(ranked, [(rank + 1) / len(ranked) for rank in range(len(ranked))], label=name, color=colour)
    over_time.set(xlabel="sent at, s", ylabel="ms", yscale="log")
    spread.set(xlabel="ms", ylabel="share of responses within", xscale="log", ylim=(0, 1))
    for axis in (over_time, spread):
        axis.legend()
        axis.grid(alpha=0.3)
    at_s = [sample.at_s for sample in report.samples]
    gauges.plot(at_s, [sample.running for sample in report.samples], label="running")
    gauges.plot(at_s, [sample.waiting for sample in report.samples], label="waiting")
    memory = gauges.twinx()
    memory.plot(at_s, [sample.memory_bytes / 2**20 for sample in report.samples], "k:", label="memory, MiB")
    memory.set(ylabel="MiB")
    gauges.set(xlabel="s", ylabel="requests")
    gauges.legend(loc="upper left")
    memory.legend(loc="upper right")
    save(figure, path)


def check_image(path: Path) -> Path:
    """Raises a UserError, before anything is measured, if the file cannot be plotted to."""
    if path.suffix not in (".png", ".svg"):
        raise UserError(f"--plot {path}", "is not a supported image format", "end its name in .png or .svg")
    return path


def save(figure: Any, path: Path) -> None:
    image = io.BytesIO()
    figure.savefig(image, format=path.suffix[1:], dpi=110)
    storage.write_bytes(path, image.getvalue())
