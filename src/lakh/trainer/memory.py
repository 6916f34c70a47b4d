"""How much memory a rank has used, and whether it was too much."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["memory_bytes", "ran_out"]

_WORDS = ("out of memory", "ALLOC_FAILED", "alloc_failed")


def ran_out(error: BaseException) -> bool:
    """Whether an error of torch says that a GPU's memory is full.

    Its own allocator raises OutOfMemoryError; libraries that ask for memory beside it (cuDNN, cuBLAS, NCCL, the driver
    itself) come as a RuntimeError whose words tell.
    """
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def memory_bytes(device: torch.device) -> int:
    """The most memory that this rank has used so far: of its GPU, or of its process on a CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
