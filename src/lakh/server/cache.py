"""Keys and values of a ragged batch, in tensors that are allocated once.

Shapes: L layers, B rows, K key/value heads, C capacity in tokens, D head size, T new tokens, S tokens seen.

Every row has its own length. New tokens of row b go to slots length_b, length_b + 1, ...; a query sees the
slots up to its own. Rows of a batch may bring padding after their last real token: it lands beyond the
row's length, no real query sees it, and the row's next token overwrites it. `advance` says how many tokens
were real, `keep` drops finished rows.

Knows shapes and lengths; knows nothing of tokens or sampling. Costs L * B * K * C * D * 2 numbers, for the
life of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lakh.spec.model import Model

__all__ = ["RaggedCache"]


class RaggedCache:
    """The Cache protocol of workloads/code/model.py for rows of different lengths."""

    def __init__(self, spec: Model, rows: int, capacity: int, *, device: torch.device, dtype: torch.dtype) -> None:
        shape = (spec.layers, rows, spec.kv_heads, capacity, spec.head_dim)
        # Zeros, not empty: a masked slot is multiplied by 0, and 0 times a stray NaN is NaN.
        self.keys_LBKCD = torch.zeros(shape, device=device, dtype=dtype)
        self.values_LBKCD = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths = [0] * rows
        self._slots: tuple[int, Tensor, Tensor, Tensor] | None = None  # of one forward pass, shared by its layers

    @property
    def capacity(self) -> int:
        return self.keys_LBKCD.shape[3]

    def positions(self, num_new: int) -> Tensor:
        """Where the next `num_new` tokens of every row stand: B T."""
        starts_B = torch.tensor(self.lengths, device=self.keys_LBKCD.device)
        return starts_B[:, None] + torch.arange(num_new, device=starts_B.device)

    def update(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        num_seen, rows_B1, slots_BT, mask_B1TS = self._plan(k_BKTD.shape[2])
        keys_BKCD, values_BKCD = self.keys_LBKCD[layer], self.values_LBKCD[layer]
        keys_BKCD[rows_B1, :, slots_BT] = k_BKTD.transpose(1, 2)
        values_BKCD[rows_B1, :, slots_BT] = v_BKTD.transpose(1, 2)
        return keys_BKCD[:, :, :num_seen], values_BKCD[:, :, :num_seen], mask_B1TS

    def advance(self, counts: Sequence[int]) -> None:
        """The forward pass is over: row b brought counts[b] real tokens."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._slots = None

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows go on, in this order."""
        index = torch.tensor(list(rows), device=self.keys_LBKCD.device, dtype=torch.long)
        self.keys_LBKCD = self.keys_LBKCD.index_select(1, index)
        self.values_LBKCD = self.values_LBKCD.index_select(1, index)
        self.lengths = [self.lengths[row] for row in rows]
        self._slots = None

    def _plan(self, num_new: int) -> tuple[int, Tensor, Tensor, Tensor]:
        if self._slots is None:
            num_seen = max(self.lengths) + num_new
            assert num_seen <= self.capacity, f"{num_seen} tokens in a cache of {self.capacity}"  # the engine's sums
            slots_BT = self.positions(num_new)
            rows_B1 = torch.arange(len(self.lengths), device=slots_BT.device)[:, None]
            # Rows that stand at the same place share one mask: a prefill of B prompts needs T x T, not B x
            # T x T.
            queries_BT = slots_BT[:1] if len(set(self.lengths)) == 1 else slots_BT
            mask = torch.arange(num_seen, device=slots_BT.device) <= queries_BT[:, None, :, None]
            self._slots = num_seen, rows_B1, slots_BT, mask
        return self._slots
