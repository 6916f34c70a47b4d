"""Phase latencies count every completion once, with times of one clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from lakh.metrics import MetricsRegistry
from lakh.server.engine import Engine, SamplingParams
from lakh.server.metrics import EngineMetrics, PhaseLatencies

QUEUE, PREFILL, DECODE, INFERENCE = (
    f"request_{phase}_time_seconds" for phase in ("queue", "prefill", "decode", "inference")
)
PER_TOKEN = "request_time_per_output_token_seconds"


@dataclass
class Times:
    arrived_s: float
    started_s: float | None
    first_token_s: float | None


def values(registry: MetricsRegistry) -> dict[str, float]:
    """Sums and counts."""
    samples = [sample for family in registry.families() for sample in family.samples if not sample.labels]
    return {sample.name: sample.value for sample in samples}


def test_latencies_split_a_request_at_its_start_and_its_first_token() -> None:
    registry = MetricsRegistry("")
    phases = PhaseLatencies(registry)
    phases.observe_completion(Times(10.0, 10.5, 12.0), finished_s=15.0, num_tokens=4)
    phases.observe_completion(Times(20.0, 20.0, 21.0), finished_s=21.0, num_tokens=1)
    found = values(registry)
    assert [found[f"{name}_sum"] for name in (QUEUE, PREFILL, DECODE, INFERENCE)] == [0.5, 2.5, 3.0, 5.5]
    assert (found[f"{PER_TOKEN}_sum"], found[f"{PER_TOKEN}_count"], found[f"{QUEUE}_count"]) == (1.0, 1, 2)


def test_an_engine_counts_sequences_that_finished_and_not_those_that_were_aborted(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count(1)
    engine = make_engine(options={"clock": lambda: float(next(ticks))})
    monkeypatch.setattr(engine, "max_seqs", 1)
    seqs = [
        engine.make_sequence(engine.prompts.encode(text), SamplingParams(max_tokens=5))
        for text in ("def ", "class ", "x")
    ]
    registry = MetricsRegistry("")
    engine.observe(EngineMetrics(registry))
    engine.submit(*seqs)
    engine.abort(seqs[2])
    while any(seq.finish_reason is None for seq in seqs):
        engine.step()
    found = values(registry)
    assert found[f"{QUEUE}_count"] == found[f"{INFERENCE}_count"] == 2
    assert found[f"{PREFILL}_sum"] + found[f"{DECODE}_sum"] == found[f"{INFERENCE}_sum"]
    waits_s = [(seq.started_s or 0) - seq.arrived_s for seq in seqs[:2]]
    assert waits_s[1] > waits_s[0]  # the second waited for the first
    assert found[f"{QUEUE}_sum"] == sum(waits_s)
    assert found["iteration_tokens_total_count"] == engine.counters.steps
