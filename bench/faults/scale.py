"""The membership decision of many ranks, and goodput at Llama 3's failure rates with measured times, in one process.

One node of 8 ranks dies. The other members have registered in a store in memory; the member that decides and a member
that reads the decision run the real code, and their times are measured. On a cluster all members run at the same time,
and a request to the store costs a round trip more.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

from bench.harness import BenchRow
from lakh.c3.faults.membership import Epoch, agree_on_epoch
from lakh.planner.reliability.failures import load_failures
from lakh.planner.reliability.goodput import FailureScenario, RecoveryPolicy, goodput_report
from lakh.spec import Mesh
from lakh.trainer.recovery.replicas import ReplicaLayout, TensorProgress, choose_step

__all__ = ["RESTART_S", "decide_at_scale", "goodput_at_scale"]

RANKS_PER_NODE = 8
DAYS = 54.0
RUNS = 200
RESTART_S = 15.0
"""The bar for a restart of everything (`lakh health drill --fault kill-all`); at this size add the time to join."""
RECORD: Mapping[str, int] = {"step": 1000, "finished": 1000, "whole": 1}


class MemoryStore:
    """The methods of a store that the agreement uses."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.requests = 0

    def set(self, key: str, value: str) -> None:
        self.requests += 1
        self.values[key] = value

    def get(self, key: str) -> bytes:
        self.requests += 1
        return self.values[key].encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.requests += 1
        return [self.values[key].encode() for key in keys]

    def check(self, keys: list[str]) -> bool:
        self.requests += 1
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.requests += 1
        if self.values.get(key, "") == expected:
            self.values[key] = desired
        return self.values[key].encode()


def decide_at_scale(ranks: int, *, shard: int) -> BenchRow:
    """Times and requests of the deciding member and of another one, after a node was lost."""
    dead = set(range(ranks // 2, ranks // 2 + RANKS_PER_NODE))
    store, epoch = MemoryStore(), Epoch(0, tuple(range(ranks)))
    for member in set(range(1, ranks)) - dead:
        record = json.dumps({**RECORD, "accuses": sorted(dead)})
        store.set(f"survivors/epoch/1/registered/{member}", record)
    layout = ReplicaLayout(Mesh(dp_replicate=ranks // shard, dp_shard=shard))
    layout.whole_replicas(epoch.members)  # a run has used its layout before it loses a rank
    times, requests = [], []
    for me in (0, ranks - 1):
        before, began_s = store.requests, time.perf_counter()
        found, records = agree_on_epoch(store, "survivors", epoch, me, RECORD, dead)
        members = layout.whole_replicas(found.members)
        progress = {
            member: TensorProgress(records[member]["step"], is_consistent=bool(records[member]["whole"]))
            for member in members
        }
        assert choose_step(progress, layout) == RECORD["step"]
        times.append(time.perf_counter() - began_s)
        requests.append(store.requests - before)
    return {
        "system": "lakh",
        "fault": f"1 node of {ranks:,} simulated ranks",
        "decide_s": sum(times),
        "requests_decider": requests[0],
        "requests_member": requests[1],
        "left": len(members),
    }


def goodput_at_scale(ranks: int, *, detect_s: float, restart_s: float) -> BenchRow:
    """Simulated goodput of a run with Llama 3's failures, in which every failure restarts all ranks: a lower bound, as
    replicas that continue lose less."""
    known = load_failures("llama3")
    scenario = FailureScenario(
        gpus=ranks, days=DAYS, mtbf_s=known.mtbf_s(ranks), replacing_share=known.replacing_share, lemon_nodes=0
    )
    policy = RecoveryPolicy(
        interval_s=600.0, stall_s=1.0, detect_s=detect_s, restart_s=restart_s, near_interval_s=60.0, near_stall_s=0.5
    )
    report = goodput_report(scenario, policy, runs=RUNS, seed=1)
    return {"goodput": report["goodput"], "failures_per_day": report["failures_per_day"]}
