"""Events: facts about a run, written once as JSON lines and read by everything that shows the run.

Each rank appends to its own `events/rank-00003.jsonl`; no line is rewritten. The progress bar, Prometheus, TensorBoard
and the dashboard all read these files.

    {"time_s": 1731.4, "rank": 0, "step": 12, "kind": "step_done", "loss": 5.13, ...}

`EventLog.write` puts the event into a bounded queue that a thread empties, so that a slow disk does not delay a step.
When the queue is full, events are dropped and counted, and the count is written as `events_dropped`. Readers wait for
the rest of a partly written last line, read kinds of earlier versions under their current name, and return a kind they
do not know as `UnknownEvent`. extremes.py copies the extreme steps to a small file, for a first look at a long run.
"""

from __future__ import annotations

from lakh.events.kinds import (
    AutoChoice,
    CheckpointFailed,
    CheckpointSaved,
    CheckpointSkipped,
    Evaluated,
    Event,
    EventsDropped,
    ExpertLoad,
    FaultInjected,
    HookMetrics,
    Initialised,
    InputDistributed,
    MemoryCopied,
    MemoryRestored,
    NetworkTraffic,
    NodeChecked,
    RanksJoined,
    RanksLost,
    Record,
    Resources,
    Restarted,
    RewindRefused,
    Rewound,
    RunEnded,
    RunStarted,
    Scored,
    SettingChanged,
    StepDone,
    StepPredicted,
    StepSkipped,
    StorageDelayed,
    StragglerFound,
    UnknownEvent,
    current_kind,
)
from lakh.events.log import EventLog
from lakh.events.reading import EventFilesReplaced, RunEventTail, follow, read

__all__ = [
    "AutoChoice",
    "CheckpointFailed",
    "CheckpointSaved",
    "CheckpointSkipped",
    "Evaluated",
    "Event",
    "EventFilesReplaced",
    "EventLog",
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
    "RunEventTail",
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
    "follow",
    "read",
]
