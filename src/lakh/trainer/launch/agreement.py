"""Check, when the process group forms, that all ranks have the same settings, data and code.

Ranks that were started with different settings would train a wrong model without an error. All ranks compare one hash
in a single reduction; only if it differs do they exchange what differs, so that the error names ranks and settings.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import lakh
from lakh import config
from lakh.errors import UserError
from lakh.spec import Run
from lakh.trainer.launch.world import World

__all__ = [
    "LOCAL_SETTINGS",
    "code_fingerprint",
    "describe_differences",
    "facts_digest",
    "require_agreement",
    "run_facts",
]

# May differ between machines. The data itself has a fingerprint, which is compared.
LOCAL_SETTINGS = (
    "data.tokens",
    "data.mixture",
    "data.cache",
    "dlrm.dataset",
    "train.threads",
    "train.sinks",
    "train.prometheus_port",
)
MAX_RANKS_NAMED = 8
MAX_DIFFERENCE_CHARS = 300


def require_agreement(world: World, facts: Mapping[str, Any]) -> None:
    """Raise UserError on every rank if the facts differ between ranks. A collective."""
    if world.size == 1:
        return
    if world.is_equal_everywhere(facts_digest(facts)):
        return
    expected: Mapping[str, Any] = world.broadcast(dict(facts))
    mine = "; ".join(
        f"{name} is {facts.get(name)!r} and {expected.get(name)!r} on rank 0"
        for name in sorted({*facts, *expected})
        if facts.get(name) != expected.get(name)
    )
    differences = world.broadcast(world.gather(mine[:MAX_DIFFERENCE_CHARS]))
    raise UserError(*describe_differences(differences))


def facts_digest(facts: Mapping[str, Any]) -> bytes:
    """A hash that is the same for equal facts: 60 and 60.0 are equal, and a recipe may write either."""
    numbers = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value for name, value in facts.items()
    }
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).digest()


def describe_differences(differences: list[str]) -> tuple[str, str, str]:
    """Where, found and todo of the error, from what differs on each rank (empty where nothing does)."""
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(differences):
        if text:
            by_text.setdefault(text, []).append(rank)
    found = "; ".join(f"{_name_ranks(ranks)}: {text}" for text, ranks in by_text.items())
    where = f"{sum(map(len, by_text.values()))} of {len(differences)} ranks disagree with rank 0"
    return where, found, "start all ranks with the same command, data and version of lakh"


def run_facts(run: Run) -> dict[str, Any]:
    """What must be equal on all ranks before any of them opens its data."""
    settings = {path: value for path, value in config.leaves(run) if path not in LOCAL_SETTINGS}
    return settings | {"the code of lakh": code_fingerprint(), "the version of torch": torch.__version__}


@functools.cache
def code_fingerprint() -> str:
    """The version of lakh and a hash of its Python files."""
    package = Path(lakh.__file__).parent
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(str(path.relative_to(package)).encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return f"{lakh.__version__} ({found.hexdigest()[:16]})"


def _name_ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    named = ", ".join(map(str, ranks[:MAX_RANKS_NAMED]))
    more = f" and {len(ranks) - MAX_RANKS_NAMED} more" if len(ranks) > MAX_RANKS_NAMED else ""
    return f"ranks {named}{more}"
