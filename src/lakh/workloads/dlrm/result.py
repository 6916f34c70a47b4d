"""The result of a recommendation run, from its events. Independent of torch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from lakh import events
from lakh.events import HookMetrics
from lakh.spec import Run
from lakh.workloads.dlrm.sharding.plans import plan_of

__all__ = ["training_result"]


def training_result(run: Run, run_dir: str | Path, ranks: int) -> dict[str, Any]:
    """Test AUC at the step with the best AUC on the validation samples, bytes on the network per step, and the plan."""
    measured = {
        event.step: dict(event.values)
        for event in events.read(run_dir, rank=0)
        if isinstance(event, HookMetrics) and event.hook == run.workload and event.step is not None
    }
    trained = {step: values for step, values in measured.items() if step} or measured
    best = max(trained, key=lambda step: trained[step]["auc"], default=None)
    last = measured[max(measured)] if measured else {}
    plan = plan_of(run, ranks)
    return {
        "auc": trained[best]["test_auc"] if best is not None else None,
        "validation_auc": trained[best]["auc"] if best is not None else None,
        "best_step": best,
        "bytes_on_wire": {
            name.removesuffix("_bytes"): round(value) for name, value in last.items() if name.endswith("_bytes")
        },
        "input_s": last.get("input_s", 0.0),
        "cache_hit_rate": last.get("cache_hit_rate"),
        "plan": {
            "ranks": plan.ranks,
            "kinds": dict(Counter(shard.kind for shard in plan.shards)),
            "shards": [
                {
                    "table": s.table,
                    "kind": s.kind,
                    "tier": s.tier,
                    "rank": s.rank,
                    "rows": list(s.rows),
                    "columns": list(s.columns),
                }
                for s in plan.shards
            ],
        },
    }
