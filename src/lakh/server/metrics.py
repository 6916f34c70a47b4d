"""What the faces count, as Prometheus text. Names follow vLLM's under the prefix lakh:, so that
dashboards carry over. What a backend counts comes from it as families.

Two acceptances, never mixed: `spec_decode_num_accepted_tokens` are guesses that the model kept, `suggestions_accepted`
are suggestions that a person kept. Touched by the event loop only, so there are no locks. Gauges are read where they
live, when the page is asked for.
"""

from __future__ import annotations

import bisect
import itertools
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lakh.server.backend import Backend, Family

__all__ = [
    "BETWEEN_S",
    "CONTENT_TYPE",
    "LATENCY_S",
    "TOKENS",
    "Histogram",
    "Metrics",
    "labelled",
    "page",
    "resident_bytes",
]

CONTENT_TYPE = "text/plain; version=0.0.4"
LATENCY_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30, 60)
BETWEEN_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
CHOICES = (1, 2, 5, 10, 20)


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, words: str) -> Family:
        reached = list(itertools.accumulate(self._counts))
        buckets = [
            (f'_bucket{{le="{bound:g}"}}', float(n)) for bound, n in zip(self._bounds, reached[:-1], strict=True)
        ]
        ends = [('_bucket{le="+Inf"}', reached[-1]), ("_sum", round(self._sum, 6)), ("_count", reached[-1])]
        return Family(name, "histogram", words, [*buckets, *ends])


@dataclass
class Metrics:
    finished: Counter[str] = field(default_factory=Counter)
    """Completions by finish reason."""
    answered: Counter[int] = field(default_factory=Counter)
    """Completion requests by HTTP status; a gRPC status counts as the HTTP status it stands for."""
    cancelled: int = 0
    """Requests whose client went away before the end."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    feedback: Counter[str] = field(default_factory=Counter)
    """shown, accepted: what editors said about suggestions."""
    latency: Histogram = field(default_factory=lambda: Histogram(LATENCY_S))
    first_token: Histogram = field(default_factory=lambda: Histogram(LATENCY_S))
    between_pieces: Histogram = field(default_factory=lambda: Histogram(BETWEEN_S))
    prompt_sizes: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    generation_sizes: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    asked_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    asked_choices: Histogram = field(default_factory=lambda: Histogram(CHOICES))

    def families(self) -> list[Family]:
        shown, accepted = self.feedback["shown"], self.feedback["accepted"]
        return [
            Family("requests_total", "counter", "Completion requests by status.", labelled("code", self.answered)),
            Family(
                "request_success_total",
                "counter",
                "Completions by the reason they ended.",
                labelled("finished_reason", self.finished),
            ),
            Family("requests_cancelled_total", "counter", "Clients that went away.", [("", self.cancelled)]),
            Family("prompt_tokens_total", "counter", "Prompt tokens read.", [("", self.prompt_tokens)]),
            Family("generation_tokens_total", "counter", "Tokens drawn.", [("", self.generation_tokens)]),
            Family("suggestions_shown_total", "counter", "Suggestions that a person saw.", [("", shown)]),
            Family("suggestions_accepted_total", "counter", "Suggestions that a person took.", [("", accepted)]),
            self.latency.family("e2e_request_latency_seconds", "From a request's arrival to its last byte."),
            self.first_token.family("time_to_first_token_seconds", "From a request's arrival to its first text."),
            self.between_pieces.family("inter_token_latency_seconds", "Between two pieces of one request."),
            self.prompt_sizes.family("request_prompt_tokens", "Prompt tokens of a request."),
            self.generation_sizes.family("request_generation_tokens", "Tokens drawn for a request."),
            self.asked_tokens.family("request_params_max_tokens", "max_tokens of a request."),
            self.asked_choices.family("request_params_n", "n of a request."),
        ]


def labelled(label: str, counts: Counter[str] | Counter[int]) -> list[tuple[str, float]]:
    return [(f'{{{label}="{key}"}}', count) for key, count in sorted(counts.items())]


def page(metrics: Metrics, backend: Backend, more: Iterable[Family] = ()) -> str:
    """The whole page. What a process is has Prometheus' own names, without a prefix."""
    families = [
        Family("num_requests_running", "gauge", "Requests at work.", [("", backend.num_running)]),
        Family("num_requests_waiting", "gauge", "Requests in the queue.", [("", backend.num_waiting)]),
        *metrics.families(),
        *backend.families(),
        *more,
    ]
    text = "".join(_text(family, "lakh:") for family in families)
    own = [
        Family("process_id", "gauge", "Of this process.", [("", os.getpid())]),
        Family("process_resident_memory_bytes", "gauge", "Of this process.", [("", resident_bytes())]),
        Family("process_cpu_seconds_total", "counter", "Of this process.", [("", time.process_time())]),
    ]
    return text + "".join(_text(family, "") for family in own)


def _text(family: Family, prefix: str) -> str:
    name = prefix + family.name
    lines = [f"# HELP {name} {family.words}", f"# TYPE {name} {family.kind}"]
    lines += [
        f"{name}{suffix} {int(value) if float(value).is_integer() else value}" for suffix, value in family.samples
    ]
    return "\n".join(lines) + "\n"


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
