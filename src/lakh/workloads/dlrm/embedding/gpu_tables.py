"""Tables and slices of tables of any widths and optimizers on one GPU, with the interface of EmbeddingBags.

Those of one width and one optimizer are one matrix (gpu_bags.py). Each group is looked up and updated by itself, and
reads and writes its own columns.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lakh.errors import UserError
from lakh.spec.embedding import TableSlice
from lakh.workloads.dlrm.embedding.bags import HeldTensor, SparseSettings
from lakh.workloads.dlrm.embedding.gpu_bags import GpuEmbeddingBags
from lakh.workloads.dlrm.embedding.jagged import JaggedBags

__all__ = ["GpuTables"]


class GpuTables(nn.Module):
    """Feature f of a batch belongs to the parts in order, `table.features` to each."""

    steps: Tensor

    def __init__(
        self,
        parts: Sequence[TableSlice],
        *,
        seed: int | None,
        device: torch.device,
        settings: SparseSettings | None = None,
    ) -> None:
        """`seed`: see GpuEmbeddingBags."""
        super().__init__()
        if importlib.util.find_spec("triton") is None:
            found = f"is {device}, and Triton, which has the kernels of the tables, is not installed"
            raise UserError("train.device", found, "install torch for NVIDIA GPUs, or set it to cpu")
        by_kind: dict[tuple[int, str], list[TableSlice]] = {}
        places: dict[tuple[int, str], list[tuple[int, int]]] = {}  # features and first columns of a group
        self.features = self.columns = 0
        for part in parts:
            kind = (part.shape[1], part.table.optimizer)
            by_kind.setdefault(kind, []).append(part)
            for _ in range(part.table.features):
                places.setdefault(kind, []).append((self.features, self.columns))
                self.features += 1
                self.columns += part.shape[1]
        self._device = device
        self.groups = nn.ModuleList(
            GpuEmbeddingBags(group, seed=seed, device=device, settings=settings, places=places[kind])
            for kind, group in by_kind.items()
        )
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def lookup(self, bags: JaggedBags) -> Tensor:
        out_BC = torch.empty(bags.batch, self.columns, device=self._device)
        for number in range(len(self.groups)):
            self._group(number).lookup_into(out_BC, bags)
        return out_BC

    def keep_gradient(self, bags: JaggedBags, grad_BC: Tensor) -> None:
        grad_BC = grad_BC.contiguous()  # once for all groups
        for number in range(len(self.groups)):
            self._group(number).keep_gradient(bags, grad_BC)

    def step(self, lr: float, scale: float = 1.0) -> None:
        """Raises UserError if a lookup met an id out of range; then nothing changes."""
        for number in range(len(self.groups)):
            self._group(number).check_ids()
        for number in range(len(self.groups)):
            self._group(number).steps.copy_(self.steps)
            self._group(number).step(lr, scale)
        self.steps += 1

    def gradient_square(self) -> float:
        return sum(self._group(number).gradient_square() for number in range(len(self.groups)))

    def discard(self) -> None:
        for number in range(len(self.groups)):
            self._group(number).discard()

    def held_tensors(self) -> dict[tuple[str, str], HeldTensor]:
        found: dict[tuple[str, str], HeldTensor] = {}
        for number in range(len(self.groups)):
            found |= self._group(number).held_tensors()
        return found

    def _group(self, number: int) -> GpuEmbeddingBags:
        group = self.groups[number]
        assert isinstance(group, GpuEmbeddingBags)
        return group
