"""Facts of a run that `lakh.events` has no kind for: written as `other` events with a name and fields.

initialised   seconds from the start of a rank to its first step
resources     memory_bytes, data_ready (batches waiting), data_starved (steps that waited), every RESOURCES_EVERY
traffic       sent_bytes: what rank 0 sent in one step, by tier of the cluster (first step, many ranks, not compiled)
measured      what an evaluation hook returned
rewound       to_step, reason, skipped ([first, end) sequence ranges)
"""

from __future__ import annotations

import resource
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lakh.events import Event, Other

if TYPE_CHECKING:
    import torch

__all__ = ["RESOURCES_EVERY", "fact", "facts", "memory_bytes"]

RESOURCES_EVERY = 10


def fact(name: str, step: int, **fields: Any) -> Other:
    return Other(step=step, name=name, fields=fields)


def facts(events: Iterable[Event], name: str) -> list[tuple[Event, dict[str, Any]]]:
    """(event, fields) of every fact of this name."""
    found: list[tuple[Event, dict[str, Any]]] = []
    for event in events:
        if isinstance(event, Other):
            # What comes back from a file is wrapped once more: its kind is "other", its name a field.
            wrapped = event.name == "other"
            told = event.fields.get("name") if wrapped else event.name
            if told == name:
                found.append((event, dict(event.fields["fields"] if wrapped else event.fields)))
    return found


def memory_bytes(device: torch.device) -> int:
    """The most memory that this rank has used so far: of its GPU, or of its process on a CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
