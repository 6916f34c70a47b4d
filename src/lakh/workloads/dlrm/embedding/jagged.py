"""Bags of ids: for each feature and sample, the rows of a table that are looked up and summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lakh.errors import UserError

__all__ = ["JaggedBags"]


@dataclass(frozen=True, eq=False)
class JaggedBags:
    """Bag b of feature f is `ids[offsets[f * batch + b] : offsets[f * batch + b + 1]]`; a bag may be empty.

    The layout is that of TorchRec's KeyedJaggedTensor: all samples of the first feature, then the next feature.
    """

    ids: Tensor
    """int64, the ids of all bags."""
    offsets: Tensor
    """int64, features x batch + 1 positions in `ids`."""
    features: int
    sizes_F: tuple[int, ...] | None = None
    """Ids of each feature; None: the host would have to ask the device."""

    def __post_init__(self) -> None:
        if self.ids.dtype != torch.int64 or self.offsets.dtype != torch.int64:
            raise UserError("bags", f"ids are {self.ids.dtype}, offsets {self.offsets.dtype}", "pass int64 tensors")
        bags = len(self.offsets) - 1
        if self.features < 1 or bags < 0 or bags % self.features:
            found = f"{len(self.offsets)} offsets do not describe {self.features} features"
            raise UserError("bags", found, "pass features x batch + 1 offsets")

    @classmethod
    def of_lengths(cls, ids: Tensor, lengths_FB: Tensor) -> JaggedBags:
        """Bags from the number of ids of each feature and sample."""
        offsets = torch.zeros(lengths_FB.numel() + 1, dtype=torch.int64, device=ids.device)
        torch.cumsum(lengths_FB.reshape(-1), 0, out=offsets[1:])
        if lengths_FB.numel() and (int(lengths_FB.min()) < 0 or int(offsets[-1]) != len(ids)):
            found = f"the lengths of the bags add up to {int(offsets[-1])}, there are {len(ids)} ids"
            raise UserError("bags", found, "pass one length, 0 or more, for each feature and sample")
        return cls(ids, offsets, lengths_FB.shape[0])

    @property
    def batch(self) -> int:
        return (len(self.offsets) - 1) // self.features

    @property
    def lengths_FB(self) -> Tensor:
        return self.offsets.diff().view(self.features, self.batch)

    def to(self, device: torch.device) -> JaggedBags:
        if self.ids.device == device:
            return self
        sizes_F = self.sizes_F
        if self.offsets.device.type == "cpu" and self.batch:
            sizes_F = tuple(self.offsets[:: self.batch].diff().tolist())
        return JaggedBags(self.ids.to(device), self.offsets.to(device), self.features, sizes_F)

    def select(self, first: int, end: int) -> JaggedBags:
        """The bags of features [first, end), without a copy of the ids."""
        offsets = self.offsets[first * self.batch : end * self.batch + 1]
        low, high = int(offsets[0]), int(offsets[-1])
        return JaggedBags(self.ids[low:high], offsets - low, end - first)

    def count_ids(self, features: Sequence[int]) -> int:
        """The ids of these features, each named once."""
        if len(features) == self.features:
            return len(self.ids)
        if self.sizes_F is None:
            return int(self.lengths_FB[list(features)].sum())
        return sum(self.sizes_F[feature] for feature in features)

    @staticmethod
    def concatenate(parts: Sequence[JaggedBags]) -> JaggedBags:
        """One batch of the samples of all parts, in their order."""
        if len(parts) == 1:
            return parts[0]
        ids, lengths = [], []
        for feature in range(parts[0].features):
            for part in parts:
                of_feature = part.select(feature, feature + 1)
                ids.append(of_feature.ids)
                lengths.append(of_feature.lengths_FB[0])
        return JaggedBags.of_lengths(torch.cat(ids), torch.cat(lengths).view(parts[0].features, -1))
