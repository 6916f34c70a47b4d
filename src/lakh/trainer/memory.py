"""How much memory a rank has used."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["memory_bytes"]


def memory_bytes(device: torch.device) -> int:
    """The most memory that this rank has used so far: of its GPU, or of its process on a CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
