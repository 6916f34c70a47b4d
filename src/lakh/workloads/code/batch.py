"""One micro-batch as the model takes it.

Shapes: B rows, T tokens of a row. Tensors are on the device of the model. Knows nothing of files, ranks or losses.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["IGNORED", "Batch"]

IGNORED = -100  # a target that is not predicted: padding. What torch's cross-entropy ignores by default.


@dataclass(frozen=True, eq=False)
class Batch:
    inputs: Tensor
    """B T, int64."""
    targets: Tensor
    """B T, int64: the token that follows each input, or IGNORED."""
    documents: Tensor | None = None
    """B T, int32: number of the document inside its row, counted from 0. A token sees only its own document. None
    where whole rows are one context."""
    positions: Tensor | None = None
    """B T, int64: place inside the document, from 0. None counts from the start of the row."""
    cu_seqlens: Tensor | None = None
    """int32: where documents begin in the B x T tokens laid end to end, and B x T at the end (variable-length
    attention). None with `documents`."""
    longest: int = 0
    """Tokens of the longest document in it; 0 where `documents` is None."""
    weight: float | None = None
    """What the sum of this micro-batch's losses is multiplied by, so that the sum over a rank's micro-batches is the
    mean over all its B x T places of the step, padding counted as 0. None: there is no padding, and the mean of the
    micro-batches' means is the same. Either way the mean over data-parallel ranks does not depend on their number."""
