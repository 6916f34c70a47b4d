"""Serving metrics in Prometheus' text format. Names follow vLLM's with the prefix lakh:, so vLLM dashboards carry over.

Two acceptance metrics that must not be confused: `spec_decode_num_accepted_tokens` counts draft tokens that the model
accepted, `suggestions_accepted` counts suggestions that a user accepted.
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

from lakh.server.backend import Backend, MetricFamily

__all__ = [
    "BETWEEN_S",
    "CONTENT_TYPE",
    "LATENCY_S",
    "TOKENS",
    "EngineCounters",
    "Histogram",
    "Metrics",
    "PhaseLatencies",
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

    def family(self, name: str, words: str) -> MetricFamily:
        reached = list(itertools.accumulate(self._counts))
        buckets = [
            (f'_bucket{{le="{bound:g}"}}', float(n)) for bound, n in zip(self._bounds, reached[:-1], strict=True)
        ]
        ends = [('_bucket{le="+Inf"}', reached[-1]), ("_sum", round(self._sum, 6)), ("_count", reached[-1])]
        return MetricFamily(name, "histogram", words, [*buckets, *ends])


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

    def metric_families(self) -> list[MetricFamily]:
        shown, accepted = self.feedback["shown"], self.feedback["accepted"]
        return [
            MetricFamily("requests_total", "counter", "Completion requests by status.", labelled("code", self.answered)),
            MetricFamily(
                "request_success_total",
                "counter",
                "Completions by the reason they ended.",
                labelled("finished_reason", self.finished),
            ),
            MetricFamily("requests_cancelled_total", "counter", "Clients that went away.", [("", self.cancelled)]),
            MetricFamily("prompt_tokens_total", "counter", "Prompt tokens read.", [("", self.prompt_tokens)]),
            MetricFamily("generation_tokens_total", "counter", "Tokens drawn.", [("", self.generation_tokens)]),
            MetricFamily("suggestions_shown_total", "counter", "Suggestions that a person saw.", [("", shown)]),
            MetricFamily("suggestions_accepted_total", "counter", "Suggestions that a person took.", [("", accepted)]),
            self.latency.family("e2e_request_latency_seconds", "From a request's arrival to its last byte."),
            self.first_token.family("time_to_first_token_seconds", "From a request's arrival to its first text."),
            self.between_pieces.family("inter_token_latency_seconds", "Between two pieces of one request."),
            self.prompt_sizes.family("request_prompt_tokens", "Prompt tokens of a request."),
            self.generation_sizes.family("request_generation_tokens", "Tokens drawn for a request."),
            self.asked_tokens.family("request_params_max_tokens", "max_tokens of a request."),
            self.asked_choices.family("request_params_n", "n of a request."),
        ]


@dataclass
class EngineCounters:
    """What an engine has done since it was made."""

    steps: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of started sequences."""
    cached_tokens: int = 0
    """Of these, found in the prefix cache."""
    computed_tokens: int = 0
    """Tokens that went through the network: prompts, sampled and draft tokens; with decode-ahead also those of finished
    sequences and of steps that were never read."""
    generated_tokens: int = 0
    drafts: int = 0
    """Sequence steps with draft tokens."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    preempted_seqs: int = 0
    aborted_seqs: int = 0


class PhaseLatencies:
    """Time of completions in each phase, with vLLM's names and phases.

        queue      from arrival to the first work on it       prefill    from there to the first token
        decode     from the first token to the last           inference  prefill and decode together

    An engine observes its sequences, a gateway its requests (from the moment it asks a replica). Cancelled completions
    do not count.
    """

    def __init__(self) -> None:
        self._queue, self._prefill, self._decode, self._inference = (Histogram(LATENCY_S) for _ in range(4))
        self._token = Histogram(BETWEEN_S)

    def observe(
        self, *, arrived_s: float, started_s: float, first_token_s: float, finished_s: float, num_tokens: int
    ) -> None:
        """One completion, with times of one clock."""
        self._queue.add(started_s - arrived_s)
        self._prefill.add(first_token_s - started_s)
        self._decode.add(finished_s - first_token_s)
        self._inference.add(finished_s - started_s)
        if num_tokens > 1:
            self._token.add((finished_s - first_token_s) / (num_tokens - 1))

    def metric_families(self) -> list[MetricFamily]:
        return [
            self._queue.family("request_queue_time_seconds", "From arrival to the first work on the request."),
            self._prefill.family("request_prefill_time_seconds", "From the first work to the first token."),
            self._decode.family("request_decode_time_seconds", "From the first token to the last."),
            self._inference.family("request_inference_time_seconds", "From the first work to the last token."),
            self._token.family("request_time_per_output_token_seconds", "Decode time per token after the first."),
        ]


def labelled(label: str, counts: Counter[str] | Counter[int]) -> list[tuple[str, float]]:
    return [(f'{{{label}="{key}"}}', count) for key, count in sorted(counts.items())]


def page(metrics: Metrics, backend: Backend, more: Iterable[MetricFamily] = ()) -> str:
    """The whole page. What a process is has Prometheus' own names, without a prefix."""
    metric_families = [
        MetricFamily("num_requests_running", "gauge", "Requests at work.", [("", backend.num_running)]),
        MetricFamily("num_requests_waiting", "gauge", "Requests in the queue.", [("", backend.num_waiting)]),
        *metrics.metric_families(),
        *backend.metric_families(),
        *more,
    ]
    text = "".join(_text(family, "lakh:") for family in metric_families)
    own = [
        MetricFamily("process_id", "gauge", "Of this process.", [("", os.getpid())]),
        MetricFamily("process_resident_memory_bytes", "gauge", "Of this process.", [("", resident_bytes())]),
        MetricFamily("process_cpu_seconds_total", "counter", "Of this process.", [("", time.process_time())]),
    ]
    return text + "".join(_text(family, "") for family in own)


def _text(family: MetricFamily, prefix: str) -> str:
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
