"""Embedding tables with pooled lookups and a sparse optimizer.

    bags = EmbeddingBags(tables, seed=1)
    out_BC = bags(ids)            # the sums of all bags, side by side
    loss(out_BC).backward()       # keeps the gradient of out_BC
    bags.step(lr=0.01)            # updates the rows that were looked up, each once

Several forward and backward passes before one `step` add up, as gradients do elsewhere in torch: a row that two
micro-batches look up is still updated once. `discard` drops them instead.

Weights and optimizer states are buffers of the module, so that they are in its `state_dict` and the optimizer of the
dense layers does not see them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lakh.errors import UserError
from lakh.spec.embedding import EmbeddingTable, TableSlice, check_tables
from lakh.workloads.dlrm.embedding import cpu_kernels
from lakh.workloads.dlrm.embedding.jagged import JaggedBags
from lakh.workloads.dlrm.embedding.lookup import Lookup

__all__ = ["EmbeddingBags", "HeldTensor", "SparseSettings", "weight_key"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseSettings:
    """Constants of the sparse optimizers; which of them a table uses is `EmbeddingTable.optimizer`."""

    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)
    state_width: int = 0
    """Columns that share one row-wise state; 0: all columns of the table."""


class HeldTensor(NamedTuple):
    """A tensor of this rank, and where it is in the tensor of the whole table."""

    local: Tensor
    shape: tuple[int, int]
    offset: tuple[int, int]

    @classmethod
    def of(cls, part: TableSlice, local: Tensor) -> HeldTensor:
        """`local`: weights, or a state that several columns share."""
        per_column = local.shape[1] / part.shape[1]
        shape = (part.table.rows, round(part.table.width * per_column))
        return cls(local, shape, (part.rows[0], round(part.columns[0] * per_column)))


class EmbeddingBags(nn.Module):
    """Tables on one CPU. Feature f of a batch belongs to the tables in order, `table.features` to each."""

    steps: Tensor

    def __init__(
        self,
        tables: Sequence[EmbeddingTable] | Sequence[TableSlice],
        *,
        seed: int,
        settings: SparseSettings | None = None,
    ) -> None:
        super().__init__()
        if all(isinstance(t, EmbeddingTable) for t in tables):
            check_tables(cast(Sequence[EmbeddingTable], tables), "tables")
        slices = [t if isinstance(t, TableSlice) else TableSlice.whole(t) for t in tables]
        self.settings = settings or SparseSettings()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self._held: list[_HeldTable] = []
        self.features = self.columns = 0
        for part in slices:
            state = _TableState(part, seed, self.settings.state_width)
            self._held.append(_HeldTable(part, state, self.features, self.columns))
            self.features += part.table.features
            self.columns += part.table.features * part.shape[1]
        self.states = nn.ModuleList(held.state for held in self._held)
        self._anchor = torch.zeros((), requires_grad=True)  # makes autograd call backward; it has no gradient
        self._pending: list[tuple[JaggedBags, Tensor]] = []

    def forward(self, bags: JaggedBags) -> Tensor:
        if bags.features != self.features:
            raise UserError("batch", f"has {bags.features} features, the tables have {self.features}", "check the data")
        return Lookup.apply(self._anchor, self, bags)

    def step(self, lr: float, scale: float = 1.0) -> None:
        """Update the rows of all passes since the last step, with gradients times `scale`."""
        if not self._pending:
            return
        bags, gradient = self._join_passes()
        if scale != 1.0:
            gradient = gradient * scale
        self._pending.clear()
        self.steps += 1
        self._for_each_table(functools.partial(self._update, bags, gradient.numpy(), lr))

    def gradient_square(self) -> float:
        """The sum of squares of the tables' gradients since the last step."""
        if not self._pending:
            return 0.0
        bags, gradient = self._join_passes()
        self._pending = [(bags, gradient.view(bags.batch, -1))]
        squares = dict.fromkeys((held.column for held in self._held), 0.0)

        def add(held: _HeldTable) -> None:
            keys = self._sort_lookups(bags, held)
            squares[held.column] = cpu_kernels.gradient_square(held.state.weights.numpy(), keys, gradient.numpy())

        self._for_each_table(add)
        return float(sum(squares.values()))

    def _join_passes(self) -> tuple[JaggedBags, Tensor]:
        """The bags of all passes since the last step as one batch, and their gradient as one row of values."""
        bags = JaggedBags.concatenate([bags for bags, _ in self._pending])
        grads = [grad.contiguous() for _, grad in self._pending]
        gradient = (grads[0] if len(grads) == 1 else torch.cat(grads)).view(-1)
        if len(gradient) // cpu_kernels.VECTOR >= 2**32:
            found = f"{bags.batch} samples x {self.columns} columns are more than {2**34} gradients"
            raise UserError("batch", found, "use a smaller batch, or more ranks")
        return bags, gradient

    def discard(self) -> None:
        """Forget the passes since the last step."""
        self._pending.clear()

    def lookup(self, bags: JaggedBags) -> Tensor:
        """The pooled outputs, outside of autograd."""
        out_BC = torch.empty(bags.batch, self.columns)
        out = out_BC.numpy()

        def look_up(held: _HeldTable) -> None:
            of_table, rows = held.bags_of(bags), held.part.shape[0]
            ids, offsets = of_table.ids.numpy(), of_table.offsets.numpy()
            bad = cpu_kernels.lookup(held.state.weights.numpy(), ids, offsets, bags.batch, out, held.column)
            if bad >= 0:
                wrong = next(int(i) for i in ids[offsets[bad] : offsets[bad + 1]] if not 0 <= i < rows)
                where = f"table {held.part.table.name}, sample {bad % bags.batch}"
                raise UserError(where, f"id {wrong} is not in [0, {rows})", "check the data, or enlarge the table")

        self._for_each_table(look_up)
        return out_BC

    def held_tensors(self) -> dict[tuple[str, str], HeldTensor]:
        """Weights and optimizer states by table and by "weights", "square" or "mean"."""
        return {
            (held.part.table.name, kind): HeldTensor.of(held.part, tensor)
            for held in self._held
            for kind, tensor in held.state.named_buffers()
        }

    def keep_gradient(self, bags: JaggedBags, grad_BC: Tensor) -> None:
        self._pending.append((bags, grad_BC))

    def _update(self, bags: JaggedBags, gradient: Any, lr: float, held: _HeldTable) -> None:
        state, settings = held.state, self.settings
        keys = self._sort_lookups(bags, held)
        weights = state.weights.numpy()
        if held.part.table.optimizer == "sgd":
            cpu_kernels.sgd(weights, keys, gradient, lr)
        elif held.part.table.optimizer == "rowwise-adagrad":
            cpu_kernels.adagrad(weights, state.square.numpy(), keys, gradient, lr, settings.eps)
        else:
            moments = state.mean.numpy(), state.square.numpy()
            cpu_kernels.adam(weights, *moments, keys, gradient, lr, settings.eps, *settings.betas, int(self.steps))

    def _sort_lookups(self, bags: JaggedBags, held: _HeldTable) -> Any:
        of_table = held.bags_of(bags)
        return cpu_kernels.sort_lookups(
            of_table.ids.numpy(), of_table.offsets.numpy(), held.part.shape, bags.batch, self.columns, held.column
        )

    def _for_each_table(self, work: Callable[[_HeldTable], None]) -> None:
        """On torch's number of threads, which does not change the result."""
        threads = min(torch.get_num_threads(), len(self._held))
        if threads > 1:
            list(_threads(threads).map(work, self._held))
        else:
            for held in self._held:
                work(held)


@dataclass(frozen=True, slots=True)
class _HeldTable:
    part: TableSlice
    state: _TableState
    feature: int
    """First feature that looks up the table."""
    column: int
    """First column of its pooled embeddings."""

    def bags_of(self, bags: JaggedBags) -> JaggedBags:
        return bags.select(self.feature, self.feature + self.part.table.features)


def weight_key(table: EmbeddingTable, seed: int) -> int:
    """The key of a table's initial values."""
    return int.from_bytes(hashlib.sha256(f"{seed} {table.name}".encode()).digest()[:8], "little") % 2**63


class _TableState(nn.Module):
    """Weights and optimizer state of one table, or of a slice of it."""

    weights: Tensor
    square: Tensor
    mean: Tensor

    def __init__(self, part: TableSlice, seed: int, state_width: int) -> None:
        super().__init__()
        if part.table.dtype != "f32":
            found = f"has weights of type {part.table.dtype}"
            raise UserError(f"table {part.table.name}", found, "train with f32: lakh's kernels know no other type yet")
        rows, width = part.shape
        self.register_buffer("weights", torch.empty(rows, width))
        bound = part.table.rows**-0.5
        cpu_kernels.fill_uniform(
            self.weights.numpy(), weight_key(part.table, seed), part.rows[0], part.columns[0], part.table.width, bound
        )
        block = state_width or part.table.width
        if part.table.optimizer != "sgd" and (width % block or part.columns[0] % block):
            found = f"columns {part.columns[0]} to {part.columns[1]} are not whole blocks of {block} with one state"
            todo = "set dlrm.state_width to a divisor of the slices' widths, or shard the table in another way"
            raise UserError(f"table {part.table.name}", found, todo)
        if part.table.optimizer != "sgd":
            self.register_buffer("square", torch.zeros(rows, width // block))
        if part.table.optimizer == "rowwise-adam":
            self.register_buffer("mean", torch.zeros(rows, width))


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="embedding")
