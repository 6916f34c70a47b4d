"""What completions cost: the price of the machine over the completions of the last minutes, as metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from lakh.server.metrics import MetricFamily, counter, gauge
from lakh.server.observability.request_record import RequestRecord

__all__ = ["CostMeter"]

WINDOW_MINUTES = 10


class CostMeter:
    def __init__(self, price_per_hour: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`price_per_hour`: of all machines of this server, in US dollars."""
        self._price_per_hour, self._clock = price_per_hour, clock
        self._began_s = clock()
        self._by_minute: Counter[int] = Counter()

    def begin(self, record: RequestRecord) -> None:
        """Counted at the end only."""

    def finish(self, record: RequestRecord) -> None:
        if record.status == 200 and record.usage is not None:
            minute = int((self._clock() - self._began_s) // 60)
            self._by_minute[minute] += 1
            for old in [one for one in self._by_minute if one < minute - WINDOW_MINUTES]:
                del self._by_minute[old]

    def metric_families(self) -> list[MetricFamily]:
        up_s = self._clock() - self._began_s
        first = max(int(up_s // 60) - WINDOW_MINUTES + 1, 0)
        completed = sum(count for minute, count in self._by_minute.items() if minute >= first)
        families = [
            gauge("price_usd_per_hour", "Price of the machine, as given.", self._price_per_hour),
            counter("cost_usd_total", "Price of the time since the start.", self._price_per_hour * up_s / 3600),
        ]
        if completed:
            spent = self._price_per_hour * (up_s - first * 60) / 3600
            text = f"Price of the last {WINDOW_MINUTES} minutes per 1,000 completions."
            families.append(gauge("cost_per_1k_completions_usd", text, 1000 * spent / completed))
        return families
