"""What the launcher does about the exit codes of its ranks: pure decisions with reasons, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from lakh.child_process import exit_reason
from lakh.errors import PeerError
from lakh.spec import Mesh, Training
from lakh.trainer.recovery.replicas import ReplicaLayout

__all__ = ["LaunchDecision", "can_continue_without_ranks", "decide", "find_lost_replicas"]


@dataclass(frozen=True)
class LaunchDecision:
    action: Literal["wait", "done", "restart", "fail", "stopped"]
    rank: int
    reason: str


def decide(
    exit_codes: Sequence[int | None],
    *,
    stopping: bool,
    restarts_left: int,
    elastic: bool = False,
    timed_out: Mapping[int, str] = MappingProxyType({}),
) -> LaunchDecision:
    """What to do, given each rank's exit code (None while it runs, negative for a signal).

    `elastic`: the other ranks continue without a lost one. `timed_out`: ranks that the launcher killed, and why.
    """
    ended = {rank: code for rank, code in enumerate(exit_codes) if code is not None}
    failed = {rank: code for rank, code in ended.items() if code != 0}
    succeeded = [rank for rank, code in ended.items() if code == 0]
    all_ended = len(ended) == len(exit_codes)
    if elastic and failed and all(code < 0 or code == PeerError.exit_code for code in failed.values()):
        lost = f"without rank(s) {', '.join(map(str, sorted(failed)))}"
        if not all_ended and not stopping:
            return LaunchDecision("wait", min(failed), f"continuing {lost}")
        if succeeded and all_ended:
            return LaunchDecision("done", min(succeeded), f"finished {lost}")
    if not failed:
        return LaunchDecision("done", 0, "all ranks finished") if all_ended else LaunchDecision("wait", 0, "running")
    if stopping:
        return LaunchDecision("stopped" if all_ended else "wait", min(failed), "stopped on request")
    # A rank with an error of its own counts before one that lost its peer, and a signal before an exit code.
    rank, code = min(failed.items(), key=lambda item: (item[1] == PeerError.exit_code, item[1] >= 0, item[0]))
    reason = f"rank {rank} was {exit_reason(code)}" if code < 0 else f"rank {rank} ended with {exit_reason(code)}"
    reason = timed_out.get(rank, reason)
    if code >= 0 and code != PeerError.exit_code:
        return LaunchDecision("fail", rank, reason)
    if restarts_left <= 0:
        return LaunchDecision("fail", rank, f"{reason} and no restarts are left")
    return LaunchDecision("restart", rank, reason)


def can_continue_without_ranks(settings: Training, mesh: Mesh, ranks: int) -> tuple[bool, str]:
    """Whether a run launched here can continue when a rank dies, and the reason."""
    if ranks < 2:
        return False, "there is only one rank"
    if settings.backend != "c3":
        return False, f"the backend {settings.backend} cannot continue without a rank"
    replicas = mesh.resolve(ranks).dp_replicate
    if replicas < 2:
        return False, f"{ranks} ranks hold one replica of the model: a lost rank takes its part with it"
    return True, f"the {ranks} ranks hold {replicas} replicas of the model"


def find_lost_replicas(exit_codes: Sequence[int | None], layout: ReplicaLayout) -> tuple[int, ...]:
    """The ranks of replicas that have ended as a whole, by a signal or because a peer was lost."""
    lost = (
        rank for rank, code in enumerate(exit_codes) if code is not None and (code < 0 or code == PeerError.exit_code)
    )
    return layout.whole_replicas(lost)
