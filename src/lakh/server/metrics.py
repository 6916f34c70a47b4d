"""Serving metrics on lakh.metrics. Names follow vLLM's with the prefix lakh:, so vLLM dashboards carry over.

Two acceptance metrics that must not be confused: `spec_decode_num_accepted_tokens` counts draft tokens that the model
accepted, `suggestions_accepted` counts suggestions that a user accepted.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from lakh.metrics import MetricsRegistry, counter_family, gauge_family

if TYPE_CHECKING:
    from prometheus_client import Histogram
    from prometheus_client.metrics_core import Metric

__all__ = [
    "PREFIX",
    "EngineCounters",
    "EngineMetrics",
    "MetricFamily",
    "MetricSource",
    "PhaseLatencies",
    "ServerMetrics",
    "counter",
    "gauge",
    "with_label",
]

MetricFamily: TypeAlias = "Metric"  # prometheus_client is an optional dependency

PREFIX = "lakh:"
LATENCY_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30, 60)
BETWEEN_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
CHOICES = (1, 2, 5, 10, 20)


def counter(name: str, help_text: str, value: float | Mapping[str, float], label: str = "") -> Metric:
    return counter_family(PREFIX + name, help_text, value, label)


def gauge(name: str, help_text: str, value: float | Mapping[str, float], label: str = "") -> Metric:
    return gauge_family(PREFIX + name, help_text, value, label)


def with_label(label: str, families: Mapping[str, Sequence[Metric]]) -> list[Metric]:
    """The families of several sources as one of each name, whose samples say which source they are from."""
    merged: dict[str, Metric] = {}
    for value, own in families.items():
        for family in own:
            if family.name not in merged:
                merged[family.name] = copy.copy(family)
                merged[family.name].samples = []
            merged[family.name].samples += [
                sample._replace(labels={**sample.labels, label: value}) for sample in family.samples
            ]
    return list(merged.values())


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


class RequestTimes(Protocol):
    """Times of one clock: arrival, first work on it, first token."""

    arrived_s: float
    started_s: float | None
    first_token_s: float | None


class PhaseLatencies:
    """Time of completions in each phase, with vLLM's names and phases.

        queue      from arrival to the first work on it       prefill    from there to the first token
        decode     from the first token to the last           inference  prefill and decode together

    An engine observes its sequences, a gateway its requests (from the moment it asks a replica). Cancelled completions
    do not count.
    """

    def __init__(self, registry: MetricsRegistry) -> None:
        def phase(name: str, help_text: str, buckets: tuple[float, ...] = LATENCY_S) -> Histogram:
            return registry.histogram(f"request_{name}_seconds", help_text, buckets)

        self._queue = phase("queue_time", "From arrival to the first work on the request.")
        self._prefill = phase("prefill_time", "From the first work to the first token.")
        self._decode = phase("decode_time", "From the first token to the last.")
        self._inference = phase("inference_time", "From the first work to the last token.")
        self._token = phase("time_per_output_token", "Decode time per token after the first.", BETWEEN_S)

    def observe_completion(self, times: RequestTimes, finished_s: float, num_tokens: int) -> None:
        started_s, first_token_s = times.started_s, times.first_token_s
        if started_s is None or first_token_s is None:
            return
        self._queue.observe(started_s - times.arrived_s)
        self._prefill.observe(first_token_s - started_s)
        self._decode.observe(finished_s - first_token_s)
        self._inference.observe(finished_s - started_s)
        if num_tokens > 1:
            self._token.observe((finished_s - first_token_s) / (num_tokens - 1))


class EngineMetrics(PhaseLatencies):
    """Step sizes and latencies of an engine."""

    def __init__(self, registry: MetricsRegistry) -> None:
        super().__init__(registry)
        self._step_sizes = registry.histogram("iteration_tokens_total", "Tokens per step.", TOKENS)

    def observe_step(self, num_tokens: int) -> None:
        self._step_sizes.observe(num_tokens)


class MetricSource(Protocol):
    def metric_families(self) -> list[Metric]: ...


class RequestQueues(MetricSource, Protocol):
    """Of the backend, what the metrics page shows."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...


class ServerMetrics:
    """What the API counts, and the metrics page of the whole server."""

    def __init__(self, backend: RequestQueues, others: Iterable[MetricSource] = ()) -> None:
        registry = self._registry = MetricsRegistry(PREFIX, process=True)
        self.requests = registry.counter("requests_total", "Completion requests by HTTP status.", ["code"])
        self.finished = registry.counter("request_success_total", "Completions by finish reason.", ["finished_reason"])
        self.cancelled = registry.counter("requests_cancelled_total", "Requests whose client disconnected.")
        self.prompt_tokens = registry.counter("prompt_tokens_total", "Prompt tokens.")
        self.generation_tokens = registry.counter("generation_tokens_total", "Generated tokens.")
        by_model = ["model_name"]
        self.model_requests = registry.counter("model_requests_total", "Completed requests by model.", by_model)
        self.model_prompt_tokens = registry.counter("model_prompt_tokens_total", "Prompt tokens by model.", by_model)
        self.model_generation_tokens = registry.counter(
            "model_generation_tokens_total", "Generated tokens by model.", by_model
        )
        self.feedback = {
            "shown": registry.counter("suggestions_shown_total", "Suggestions that a user saw."),
            "accepted": registry.counter("suggestions_accepted_total", "Suggestions that a user accepted."),
        }
        histogram = registry.histogram
        self.e2e_latency = histogram("e2e_request_latency_seconds", "From arrival to the last byte.", LATENCY_S)
        self.first_token = histogram("time_to_first_token_seconds", "From arrival to the first text.", LATENCY_S)
        self.inter_token = histogram("inter_token_latency_seconds", "Between two deltas of a request.", BETWEEN_S)
        self.prompt_sizes = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.generation_sizes = histogram("request_generation_tokens", "Generated tokens of a request.", TOKENS)
        self.max_tokens = histogram("request_params_max_tokens", "max_tokens of a request.", TOKENS)
        self.num_choices = histogram("request_params_n", "n of a request.", CHOICES)
        registry.collect_from(
            lambda: [
                gauge("num_requests_running", "Running requests.", backend.num_running),
                gauge("num_requests_waiting", "Waiting requests.", backend.num_waiting),
                gauge_family("process_id", "Id of this process.", os.getpid()),
            ]
        )
        for source in (backend, *others):
            registry.collect_from(source.metric_families)

    def page(self) -> bytes:
        return self._registry.page()
