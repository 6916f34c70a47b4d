"""What the server counts, as Prometheus text. Names follow vLLM's under the prefix lakh:, so that
dashboards carry over.

Touched by the event loop only, so there are no locks. Gauges are read where they live, when the page is
asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lakh.server.engine import Engine

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4"


@dataclass
class Metrics:
    finished: Counter[str] = field(default_factory=Counter)
    """Completions by finish reason."""
    answered: Counter[int] = field(default_factory=Counter)
    """Completion requests by HTTP status."""
    cancelled: int = 0
    """Requests whose client went away before the end."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    latency_s: float = 0.0
    latencies: int = 0
    first_token_s: float = 0.0
    first_tokens: int = 0

    def text(self, engine: Engine, *, running: int, waiting: int) -> str:
        counts, pool = engine.counts, engine.pool
        answered = [(f'{{code="{status}"}}', count) for status, count in sorted(self.answered.items())]
        finished = [(f'{{finished_reason="{reason}"}}', count) for reason, count in sorted(self.finished.items())]
        return "".join(
            [
                _family("num_requests_running", "gauge", "Requests at work.", [("", running)]),
                _family("num_requests_waiting", "gauge", "Requests in the queue.", [("", waiting)]),
                _family("requests_total", "counter", "Completion requests by status.", answered),
                _family("request_success_total", "counter", "Completions by the reason they ended.", finished),
                _family("requests_cancelled_total", "counter", "Clients that went away.", [("", self.cancelled)]),
                _family(
                    "kv_cache_usage_perc", "gauge", "Share of blocks in use.", [("", pool.num_held / pool.num_blocks)]
                ),
                _family("kv_cache_blocks_held", "gauge", "Blocks that rows at work hold.", [("", pool.num_held)]),
                _family(
                    "prefix_cache_queries_total", "counter", "Prompt tokens looked up.", [("", counts.prompt_tokens)]
                ),
                _family("prefix_cache_hits_total", "counter", "Prompt tokens found.", [("", counts.cached_tokens)]),
                _family("num_preemptions_total", "counter", "Rows that gave way.", [("", counts.preempted_rows)]),
                _family("spec_decode_num_draft_tokens_total", "counter", "Guesses.", [("", counts.drafted_tokens)]),
                _family(
                    "spec_decode_num_accepted_tokens_total", "counter", "Guesses kept.", [("", counts.kept_tokens)]
                ),
                _family("weights_version", "gauge", "How often weights were swapped.", [("", engine.weights_version)]),
                _family("prompt_tokens_total", "counter", "Prompt tokens read.", [("", self.prompt_tokens)]),
                _family("generation_tokens_total", "counter", "Tokens drawn.", [("", self.generation_tokens)]),
                _family(
                    "e2e_request_latency_seconds",
                    "summary",
                    "From a request's arrival to its last byte.",
                    [("_sum", round(self.latency_s, 6)), ("_count", self.latencies)],
                ),
                _family(
                    "time_to_first_token_seconds",
                    "summary",
                    "From a streamed request's arrival to its first text.",
                    [("_sum", round(self.first_token_s, 6)), ("_count", self.first_tokens)],
                ),
            ]
        )


def _family(name: str, kind: str, words: str, samples: Sequence[tuple[str, float]]) -> str:
    lines = [f"# HELP lakh:{name} {words}", f"# TYPE lakh:{name} {kind}"]
    lines += [f"lakh:{name}{suffix} {value}" for suffix, value in samples]
    return "\n".join(lines) + "\n"
