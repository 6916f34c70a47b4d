"""How long requests spend in each phase: waiting, reading the prompt, drawing. Names and phases are vLLM's.

    queue      from arrival to the first work on it       prefill    from there to the first token
    decode     from the first token to the last           inference  prefill and decode together

An engine measures its rows, a gateway its requests as it sees them (from the moment that a replica was asked).
Completions that ran to their end are counted, those that were cancelled are not. No locks: one thread adds, and a
reader may see figures of a moment ago.
"""

from __future__ import annotations

from lakh.server.backend import Family
from lakh.server.metrics import BETWEEN_S, LATENCY_S, Histogram

__all__ = ["Phases"]


class Phases:
    def __init__(self) -> None:
        self._queue, self._prefill, self._decode, self._inference = (Histogram(LATENCY_S) for _ in range(4))
        self._token = Histogram(BETWEEN_S)

    def add(self, *, arrived_s: float, began_s: float, first_s: float, last_s: float, num_tokens: int) -> None:
        """One completion, by the moments of one clock."""
        self._queue.add(began_s - arrived_s)
        self._prefill.add(first_s - began_s)
        self._decode.add(last_s - first_s)
        self._inference.add(last_s - began_s)
        if num_tokens > 1:
            self._token.add((last_s - first_s) / (num_tokens - 1))

    def families(self) -> list[Family]:
        return [
            self._queue.family("request_queue_time_seconds", "From arrival to the first work on it."),
            self._prefill.family("request_prefill_time_seconds", "From the first work to the first token."),
            self._decode.family("request_decode_time_seconds", "From the first token to the last."),
            self._inference.family("request_inference_time_seconds", "From the first work to the last token."),
            self._token.family("request_time_per_output_token_seconds", "Decode time per token after the first."),
        ]
