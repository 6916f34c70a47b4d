"""The communication graph of a job, reduced by its symmetry: a grid of nodes, stages x nodes of a stage.

Ranks are numbered tp, cp, data, pipeline from the inside outwards, so a node holds consecutive ranks of one stage.
Tensor and context groups stay inside it. Between nodes there are two kinds of edges: the ring of a stage's data ranks,
which crosses a cut once for every group of nodes that it visits, and the transfers from each node to its counterpart in
the next stage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lakh.errors import InfeasiblePlan
from lakh.planner.execution_plan import ExecutionPlan
from lakh.planner.fabric.topology import Ints
from lakh.planner.memory import stage_parameters
from lakh.spec.model import Model

__all__ = ["JobGrid", "job_grid"]


@dataclass(frozen=True)
class JobGrid:
    stages: int
    width: int
    """Nodes of one stage."""
    ring_bytes: float
    """Per step, from one node to the next in the ring of a stage: gradients there and weights back."""
    send_bytes: float
    """Per step, between a node and its counterpart in the next stage, in both directions together."""

    @property
    def nodes(self) -> int:
        return self.stages * self.width

    def cut_bytes(self, group_of: Ints) -> float:
        """Bytes per step between different groups; group_of[stage, column] is the group of a node's location."""
        if group_of.shape != (self.stages, self.width):
            raise ValueError(f"{group_of.shape} is not the shape of the grid")
        rings = sends = 0
        for row in group_of:
            rings += int((row != np.roll(row, -1)).sum()) if self.width > 1 else 0
        if self.stages > 1:
            sends = int((group_of[1:] != group_of[:-1]).sum())
        return rings * self.ring_bytes + sends * self.send_bytes


def job_grid(model: Model, plan: ExecutionPlan, node_size: int) -> JobGrid:
    """The grid of a single plan."""
    tp, cp, pp = int(plan.tp), int(plan.cp), int(plan.pp)
    stage_ranks = int(plan.gpus) // pp
    if stage_ranks % node_size:
        found = f"a stage has {stage_ranks} ranks, nodes have {node_size} GPUs"
        raise InfeasiblePlan("lakh plan place", found, "choose degrees with whole nodes in every stage")
    if (tp * cp) % node_size and node_size % (tp * cp):
        found = f"tensor and context groups of {tp * cp} ranks do not fill nodes of {node_size} GPUs"
        raise InfeasiblePlan("lakh plan place", found, "choose tp x cp that divides the node")
    gradients = float(stage_parameters(model, plan)) * tp * (float(plan.gradient_bytes) + 2.0)
    stream = float(plan.micro_batch) * float(plan.sequence) / cp * model.width * 2.0
    sends = 2 * float(plan.micro_batches) * stream / tp * node_size
    return JobGrid(pp, stage_ranks // node_size, gradients, sends)
