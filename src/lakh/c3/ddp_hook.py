"""A DDP communication hook: gradients averaged over c3 with a codec on the slow tier and error feedback.

    state = EncodedGradients(group, codec="int4")        # group: a c3 process group
    model.register_comm_hook(state, encoded_hook)

What the codec loses of a bucket is added to the same bucket of the next step (the residual), so that nothing is lost
for
good. Residuals are as large as the gradients and are not saved in checkpoints: after a resume they start at zero. On
one host there is no wire, but the codec is applied all the same, so that its effect on training can be seen there.
"""

from __future__ import annotations

from typing import Any

import torch

from lakh.c3.torch_backend import C3ProcessGroup
from lakh.errors import UserError
from lakh.spec.collectives import codec_bytes

__all__ = ["EncodedGradients", "encoded_hook"]


class EncodedGradients:
    """What the hook keeps between steps: one residual for each bucket."""

    def __init__(self, group: Any, codec: str = "int4", *, feedback: bool = True, seed: int = 0) -> None:
        if not isinstance(group, C3ProcessGroup):
            raise UserError("c3 hook", f"the group is a {type(group).__name__}", 'make it with backend="c3"')
        codec_bytes(codec, 0)  # refuses an unknown one
        self.group, self.codec, self.feedback, self.seed = group, codec, feedback, seed
        self.residuals: dict[int, torch.Tensor] = {}
        self.calls = 0

    def residual(self, index: int, like: torch.Tensor) -> torch.Tensor | None:
        if not self.feedback:
            return None
        held = self.residuals.get(index)
        if held is None or held.numel() != like.numel():  # DDP may cut its buckets anew after the first step
            held = self.residuals[index] = torch.zeros(like.numel(), dtype=torch.float32)
        return held


def encoded_hook(state: EncodedGradients, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """The average of a bucket over the group, in place."""
    gradients = bucket.buffer()
    residual = state.residual(bucket.index(), gradients)
    state.calls += 1
    work = state.group.allreduce_encoded(gradients, state.codec, residual, seed=state.seed + state.calls)
    return work.get_future().then(lambda done: done.value()[0])
