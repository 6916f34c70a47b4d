"""Bytes that expert parallelism exchanges, when the router spreads the tokens evenly.

one exchange   a row of the residual stream for each expert of each token of a micro-batch
one layer      two exchanges (dispatch and combine) forward, two backward, two for a repeated forward pass
counts         a number of 8 bytes for each expert, before each dispatch
"""

from __future__ import annotations

import numpy as np

from lakh.planner.execution_plan import ExecutionPlan
from lakh.planner.stacked import Array
from lakh.spec.model import Model

__all__ = ["dispatched_bytes", "exchanged_bytes"]

COUNT_BYTES = 8.0


def dispatched_bytes(plan: ExecutionPlan, stream_bytes: Array) -> Array:
    """Bytes of the tokens that a rank sends once each, of a residual stream of a micro-batch."""
    is_split = np.asarray(plan.sequence_parallel, dtype=bool) & ~np.asarray(plan.gathered_dispatch, dtype=bool)
    return stream_bytes / np.where(is_split, plan.tp, 1.0)


def exchanged_bytes(model: Model, plan: ExecutionPlan, *, value_bytes: float = 2.0, repeated: Array = 0.0) -> Array:
    """Bytes that a rank sends to other ranks of its expert-parallel group in one step.

    `repeated` is the share of the forward pass that the backward pass runs again.
    """
    stream = plan.micro_batch * plan.sequence / plan.cp * model.width * value_bytes
    rows = dispatched_bytes(plan, stream) * model.top_k * 2 * (2 + repeated)
    counts = COUNT_BYTES * model.num_experts * (1 + repeated)
    layers = model.mixture_layers / plan.pp
    return (rows + counts) * layers * plan.micro_batches * (plan.ep - 1) / plan.ep
