"""Pipeline parallelism: transfers between stages, and the bubble while the pipeline fills and drains."""

from __future__ import annotations

import numpy as np

from lakh.planner.stacked import Array
from lakh.planner.timing.collectives import send_s
from lakh.planner.timing.layer import MicroBatch

__all__ = ["bubble_s", "pipeline_s"]

ZERO_BUBBLE_SHARE = 1 / 3  # of the 1F1B bubble remains with ZB-H1


def pipeline_s(mb: MicroBatch, head_s: Array) -> tuple[Array, Array]:
    """Transfers of one micro-batch (forward and backward, every chunk, on average over the boundaries between stages),
    and exposed transfers of the step, at the pace of the slowest boundary.

    Every tensor rank sends its part. Only a stage that runs two chunks ahead has work while its results travel; others
    wait in lockstep. The last stage computes the logits and has one neighbour, the others have two: the slower one sets
    the pace, so that logits as fast as a transfer (`head_s`) are free.
    """
    plan = mb.plan
    is_pipelined = np.asarray(plan.pp) > 1
    hop, mean_hop = send_s(mb.fabric, mb.stream_bytes / mb.tp, plan.stage_stride, plan.pp)
    slowest, transfers = (np.where(is_pipelined, 2 * one * plan.chunks, 0.0) for one in (hop, mean_hop))
    is_ahead = (np.asarray(plan.chunks) > 1) & (np.asarray(plan.chunks_ahead) >= 2)
    exposed = np.where(np.asarray(plan.overlap, dtype=bool) & is_ahead, mb.efficiency.interference, 1.0)
    saved = np.where(is_pipelined, np.minimum(hop * exposed, head_s), 0.0)
    return transfers, mb.count * (slowest * exposed - saved)


def bubble_s(mb: MicroBatch, stage_s: Array) -> Array:
    """(pp - 1) / chunks times the time of a micro-batch on a stage."""
    idle = (np.asarray(mb.plan.pp) - 1) / mb.plan.chunks
    return idle * np.where(mb.plan.zero_bubble, ZERO_BUBBLE_SHARE, 1.0) * stage_s
