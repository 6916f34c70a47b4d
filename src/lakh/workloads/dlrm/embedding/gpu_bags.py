"""Embedding tables on one GPU, with the interface of EmbeddingBags.

All tables, or slices of tables, have one width and one optimizer, and are parts of one matrix, so that one kernel looks
up all features. gpu_tables.py combines those of several widths or optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from lakh.errors import UserError
from lakh.spec.embedding import EmbeddingTable, TableSlice, check_tables
from lakh.workloads.dlrm.embedding.bags import EmbeddingBags, HeldTensor, SparseSettings
from lakh.workloads.dlrm.embedding.id_check import IdCheck
from lakh.workloads.dlrm.embedding.jagged import JaggedBags
from lakh.workloads.dlrm.embedding.lookup import Lookup

if TYPE_CHECKING:
    from lakh.workloads.dlrm.embedding.triton_sort import SortedLookups

__all__ = ["GpuEmbeddingBags"]


class GpuEmbeddingBags(nn.Module):
    weights: Tensor
    square: Tensor
    mean: Tensor
    places_F4: Tensor
    steps: Tensor

    def __init__(
        self,
        tables: Sequence[EmbeddingTable] | Sequence[TableSlice],
        *,
        seed: int | None,
        device: torch.device,
        settings: SparseSettings | None = None,
        places: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """`seed` None leaves the weights as they are in memory, for a checkpoint or a measurement. `places`: the number
        of each feature in the bags and its first column, if the bags have other features too."""
        super().__init__()
        if all(isinstance(t, EmbeddingTable) for t in tables):
            check_tables(cast(Sequence[EmbeddingTable], tables), "tables")
        self.slices = tuple(t if isinstance(t, TableSlice) else TableSlice.whole(t) for t in tables)
        first = self.slices[0]
        kinds = {(part.shape[1], part.table.optimizer, part.table.dtype) for part in self.slices}
        if len(kinds) > 1 or first.table.dtype != "f32":
            found = "differ in width, optimizer or type, or are not f32"
            raise UserError("tables on a GPU", found, "give them one width and one optimizer")
        self.settings, self.kind = settings or SparseSettings(), first.table.optimizer
        width, rows = first.shape[1], sum(part.shape[0] for part in self.slices)
        if width % 4:
            where, found = f"table {first.table.name}", f"has a part {width} columns wide"
            raise UserError(where, found, "on a GPU, give parts widths that are multiples of 4")
        for part in self.slices:
            if self.kind != "sgd" and (self.settings.state_width or part.table.width) != width:
                found = (
                    f"has parts {width} wide, and one state for {self.settings.state_width or part.table.width} columns"
                )
                todo = "on a GPU, set dlrm.state_width to the width of the parts, or shard the table in another way"
                raise UserError(f"table {part.table.name}", found, todo)
        bounds, at = [], 0
        for part in self.slices:
            bounds += [(at, at + part.shape[0])] * part.table.features
            at += part.shape[0]
        has_square, has_mean = self.kind != "sgd", self.kind == "rowwise-adam"
        self.register_buffer("weights", torch.empty(rows, width, device=device))
        self.register_buffer("square", torch.zeros(rows if has_square else 1, device=device))
        self.register_buffer("mean", torch.zeros(rows if has_mean else 1, width, device=device))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.features, self.columns = len(bounds), len(bounds) * width
        places = places or [(number, number * width) for number in range(self.features)]
        self._rows_of = {number: end - begin for (number, _), (begin, end) in zip(places, bounds, strict=True)}
        rows_and_places = [(*rows, *place) for rows, place in zip(bounds, places, strict=True)]
        self.register_buffer("places_F4", torch.tensor(rows_and_places, device=device), persistent=False)
        if seed is not None:
            self._fill(seed)
        self._id_check = IdCheck(device)
        self._anchor = torch.zeros((), requires_grad=True)  # makes autograd call backward; it has no gradient
        self._pending: list[tuple[JaggedBags, Tensor]] = []
        self._sorted: tuple[SortedLookups, Tensor] | None = None  # of the passes in _pending

    def _fill(self, seed: int) -> None:
        """With the values that the same tables have on a CPU."""
        first = 0
        for part in self.slices:
            on_cpu = EmbeddingBags([part], seed=seed, settings=self.settings)
            self.weights[first : first + part.shape[0]] = on_cpu.held_tensors()[part.table.name, "weights"].local
            first += part.shape[0]

    def forward(self, bags: JaggedBags) -> Tensor:
        if bags.features != self.features:
            raise UserError("batch", f"has {bags.features} features, the tables have {self.features}", "check the data")
        return Lookup.apply(self._anchor, self, bags)

    def lookup(self, bags: JaggedBags) -> Tensor:
        out_BC = torch.empty(bags.batch, self.columns, device=self.weights.device)
        self.lookup_into(out_BC, bags)
        return out_BC

    def lookup_into(self, out_BC: Tensor, bags: JaggedBags) -> None:
        """Write the pooled embeddings of these tables into their columns."""
        from lakh.workloads.dlrm.embedding import triton_lookup

        triton_lookup.lookup(self.weights, bags, self.places_F4, self._id_check.bag, out_BC)
        self._id_check.after_lookup()

    def check_ids(self) -> None:
        """Raise UserError if a lookup since the last step met an id out of range. Waits for the last lookup."""
        bag = self._id_check.take_bad_bag()
        if bag is None or not self._pending:
            return
        feature, sample = divmod(bag, self._pending[-1][0].batch)
        found = f"has an id that is not in [0, {self._rows_of[feature]})"
        raise UserError(f"feature {feature}, sample {sample}", found, "check the data, or enlarge the table")

    def keep_gradient(self, bags: JaggedBags, grad_BC: Tensor) -> None:
        self._pending.append((bags, grad_BC))
        self._sorted = None

    def step(self, lr: float, scale: float = 1.0) -> None:
        """Update the rows of all passes since the last step, each once, with gradients times `scale`. Raises UserError
        if one of them had an id out of range; then nothing changes."""
        from lakh.workloads.dlrm.embedding import triton_update

        if not self._pending:
            return
        self.check_ids()
        found, grad_BC = self._sort_passes()
        self.discard()
        self.steps += 1
        triton_update.update(
            triton_update.RowState(self.weights, self.square, self.mean),
            found,
            grad_BC,
            self.kind,
            scale=scale,
            lr=lr,
            eps=self.settings.eps,
            betas=self.settings.betas,
            step=int(self.steps),
        )

    def gradient_square(self) -> float:
        """The sum of squares of the tables' gradients since the last step."""
        from lakh.workloads.dlrm.embedding import triton_update

        if not self._pending:
            return 0.0
        return float(triton_update.gradient_square(*self._sort_passes(), self.weights.shape[1]))

    def _sort_passes(self) -> tuple[SortedLookups, Tensor]:
        """The lookups of all passes since the last step by row, and their gradient."""
        from lakh.workloads.dlrm.embedding import triton_sort

        if self._sorted is None:
            passes, grads = zip(*self._pending, strict=True)
            grad_BC = grads[0].contiguous() if len(grads) == 1 else torch.cat(grads)
            if grad_BC.numel() // triton_sort.UNIT >= 2**31:
                found = f"{len(grad_BC)} samples x {grad_BC.shape[1]} columns are more than {2**31 * triton_sort.UNIT}"
                raise UserError("batch", f"{found} gradients", "use a smaller batch, or more ranks")
            columns, features = grad_BC.shape[1], tuple(self._rows_of)
            lookups = triton_sort.sort_lookups(passes, features, self.places_F4, columns, len(self.weights))
            self._sorted = lookups, grad_BC
        return self._sorted

    def held_tensors(self) -> dict[tuple[str, str], HeldTensor]:
        """Weights and optimizer states by table and by "weights", "square" or "mean": parts of the matrices."""
        found: dict[tuple[str, str], HeldTensor] = {}
        first = 0
        for part in self.slices:
            rows = slice(first, first + part.shape[0])
            tensors = {"weights": self.weights[rows]}
            if self.kind != "sgd":
                tensors["square"] = self.square[rows].unsqueeze(1)
            if self.kind == "rowwise-adam":
                tensors["mean"] = self.mean[rows]
            found |= {(part.table.name, kind): HeldTensor.of(part, tensor) for kind, tensor in tensors.items()}
            first += part.shape[0]
        return found

    def discard(self) -> None:
        """Forget the passes since the last step."""
        self._pending.clear()
        self._sorted = None
