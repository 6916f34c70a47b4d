"""The kinds of events: one frozen dataclass each, by the name that is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, dataclass_transform

__all__ = [
    "AutoChoice",
    "CheckpointFailed",
    "CheckpointSaved",
    "CheckpointSkipped",
    "Evaluated",
    "Event",
    "EventsDropped",
    "ExpertLoad",
    "FaultInjected",
    "HookMetrics",
    "Initialised",
    "InputDistributed",
    "MemoryCopied",
    "MemoryRestored",
    "NetworkTraffic",
    "NodeChecked",
    "RanksJoined",
    "RanksLost",
    "Record",
    "Resources",
    "Restarted",
    "RewindRefused",
    "Rewound",
    "RunEnded",
    "RunStarted",
    "Scored",
    "SettingChanged",
    "StepDone",
    "StepPredicted",
    "StepSkipped",
    "StorageDelayed",
    "StragglerFound",
    "UnknownEvent",
    "current_kind",
]

Record = dict[str, Any]
# Kinds of lakh before 2026-11-17 -> today's.
OLD_KINDS = {
    "chosen": "auto_choice",
    "fault_struck": "fault_injected",
    "measured": "hook_metrics",
    "traffic": "network_traffic",
}


def current_kind(kind: str) -> str:
    """Today's name of an event kind that any version wrote."""
    return OLD_KINDS.get(kind, kind)


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True, kw_only=True)
class Event:
    """The fields of every event; subclasses are dataclasses too. `time_s` is seconds since 1970, set when written."""

    kind: ClassVar[str] = ""
    kinds: ClassVar[dict[str, type[Event]]] = {}
    time_s: float = 0.0
    rank: int = 0
    step: int = 0

    def __init_subclass__(cls, kind: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.kind = kind
        Event.kinds[kind] = dataclass(frozen=True, kw_only=True)(cls)

    def as_dict(self) -> dict[str, Any]:
        return {"time_s": self.time_s, "rank": self.rank, "step": self.step, "kind": self.kind} | vars(self)


class RunStarted(Event, kind="run_started"):
    """A rank has joined the run and restored its state."""

    world: int
    attempt: int
    backend: str
    device: str
    parameters: int
    sequence_index: int
    run_sha256: str
    data_sha256: str


class StepDone(Event, kind="step_done"):
    """One optimizer update. `loss` is the mean over all ranks, in nats per token."""

    loss: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_s: float
    step_s: float
    data_wait_s: float
    mfu: float | None = None
    compile_s: float = 0.0
    """torch.compile, on rank 0."""
    straggler_s: float = 0.0
    """How much longer the slowest rank computed than the mean of the others, outside of collectives."""
    slowest_rank: int | None = None


class StepPredicted(Event, kind="step_predicted"):
    """What the planner says of the step time, once per attempt; `step_s` is None where it can say nothing."""

    step_s: float | None
    low_s: float | None
    """With `high_s` the interval that holds four of five measured runs of this kind."""
    high_s: float | None
    basis: str
    """Measurements and factor behind the prediction; without one, the reason."""


class StepSkipped(Event, kind="step_skipped"):
    """An update that was not applied, and the reason."""

    reason: str


class Evaluated(Event, kind="evaluated"):
    """Mean loss on held-out documents, in nats per token."""

    loss: float
    sequences: int
    seconds: float


class Initialised(Event, kind="initialised"):
    """A rank is about to take its first step. `seconds` is the time since it started."""

    seconds: float


class Resources(Event, kind="resources"):
    """Every few steps: peak memory of this rank, batches that are prefetched, and steps that waited for data."""

    memory_bytes: int
    data_ready: int
    data_starved: int


class ExpertLoad(Event, kind="expert_load"):
    """Every few steps of a mixture of experts: how unevenly the router spread the tokens since the event before."""

    busiest: float
    """Load of the busiest expert over the mean of its layer, in the worst layer; 1 is even."""
    layers: Sequence[float]
    """The same of every layer with experts, in order."""
    idle: int
    """Experts of all layers with less than a tenth of the mean load."""


class NetworkTraffic(Event, kind="network_traffic"):
    """Bytes that this rank sent in one step, by tier of the cluster."""

    sent_bytes: Mapping[str, int]


class InputDistributed(Event, kind="input_distributed"):
    """The ids of a recommendation model's step reached the ranks that hold their rows. Times are since 1970."""

    began_s: float
    ended_s: float
    compute_step: int | None
    """The earlier step that computed for most of that time."""
    compute_began_s: float
    compute_ended_s: float
    overlap_s: float
    """How much of the time both had in common."""


class HookMetrics(Event, kind="hook_metrics"):
    """The values that an evaluation hook returned."""

    hook: str
    values: Mapping[str, float]


class Rewound(Event, kind="rewound"):
    """Training returned to an earlier step. `skipped` are [first, end) ranges of sequences that it no longer reads."""

    to_step: int
    reason: str
    skipped: Sequence[Sequence[int]]


class RewindRefused(Event, kind="rewind_refused"):
    """A rewind was due and not possible."""

    reason: str
    why: str


class Scored(Event, kind="scored"):
    """A checkpoint was scored on a benchmark. `step` is the checkpoint's."""

    task: str
    pass_at_1: float | None
    low: float | None
    high: float | None
    passed: int
    total: int
    seconds: float
    path: str


class CheckpointSaved(Event, kind="checkpoint_saved"):
    """A checkpoint is complete. `seconds` is how long training paused for it, not how long writing took."""

    path: str
    bytes: int
    seconds: float


class CheckpointFailed(Event, kind="checkpoint_failed"):
    """A checkpoint could not be written. Training continues unprotected: a restart would return to `last`."""

    path: str
    reason: str
    last: str
    """The last complete checkpoint; empty if there is none."""


class StorageDelayed(Event, kind="storage_delayed"):
    """A request to an object store failed and is tried again, or took long."""

    operation: str
    seconds: float
    """Since its first attempt began."""
    attempts: int
    reason: str


class CheckpointSkipped(Event, kind="checkpoint_skipped"):
    """A damaged checkpoint that resume skipped."""

    path: str
    reason: str


class AutoChoice(Event, kind="auto_choice"):
    """The value that lakh chose for a setting of "auto", and the reason."""

    what: str
    choice: str
    reason: str


class SettingChanged(Event, kind="setting_changed"):
    """A run resumes with a setting that differs from its checkpoint's."""

    path: str
    before: Any
    after: Any


class FaultInjected(Event, kind="fault_injected"):
    """A planned fault, written just before it happens."""

    fault: str


class Restarted(Event, kind="restarted"):
    """The launcher restarted all ranks. `detected_s` is when it noticed the failure, as `time_s` is written."""

    attempt: int
    reason: str
    detected_s: float | None = None


class RanksLost(Event, kind="ranks_lost"):
    """Ranks died, and the others continue without them and without a restart."""

    lost: tuple[int, ...]
    left: int
    reason: str
    seconds: float
    """From detecting the loss until the remaining ranks agreed on one state."""


class RanksJoined(Event, kind="ranks_joined"):
    """Replicas that were started again, or added, joined the run at a step boundary."""

    joined: tuple[int, ...]
    ranks: int
    """Ranks of the run from now on."""
    seconds: float
    """From the step boundary until all ranks agreed on one state."""


class MemoryCopied(Event, kind="memory_copied"):
    """The state was copied to memory (checkpoint.memory_every). `seconds`: how long training waited."""

    bytes: int
    seconds: float


class MemoryRestored(Event, kind="memory_restored"):
    """The state was restored from copies in memory, without storage."""

    received: tuple[int, ...]
    """Ranks whose node was lost: another node sent them their copy."""
    seconds: float


class NodeChecked(Event, kind="node_checked"):
    """The decision of the health agent about its node has changed."""

    node: str
    decision: str
    reason: str


class StragglerFound(Event, kind="straggler_found"):
    """A rank computed longer than the mean of the others, by the factor `ratio`, over the last `steps` steps."""

    slow_rank: int
    ratio: float
    steps: int


class RunEnded(Event, kind="run_ended"):
    reason: str
    seconds: float


class EventsDropped(Event, kind="events_dropped"):
    """The queue was full: `count` events before this one were not written."""

    count: int


class UnknownEvent(Event, kind="other"):
    """An event of a kind that this version does not define."""

    name: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
