"""Incremental checkpoints of one rank: which kind the next save is, what it is relative to, and its encoding.

    exact     bit-exact differences
    bounded   weights as differences of about 5 bits, first moments in 5 bits, second moments in 4 bits; or, factored,
              weights and first moments in 4 bits and second moments as means of rows and columns
    weights   bf16 weights alone, for serving and evaluation; a run cannot resume from them

After a full checkpoint come at most MAX_CHAIN incremental ones, each relative to what a reader of the one before gets,
so that errors do not add up. The base stays in host memory: a second copy of this rank's state. After a restart, a
failed save or a change of the mesh the next checkpoint is full.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from lakh.checkpoint.chunk_hashes import coding_threads
from lakh.checkpoint.encoding import BLOCK_BOUNDS, encode
from lakh.checkpoint.format import MAX_CHAIN, BaseCheckpoint, EncodingError, Manifest
from lakh.checkpoint.host_copies import HostCopies

__all__ = ["DeltaChain", "EncodedState", "TensorRole", "combine_errors"]

TensorRole = Literal["weight", "first_moment", "second_moment", "other"]
Squares = dict[str, tuple[float, float]]
"""Kind of encoding -> sums of the squares of errors and of values."""
KINDS = {"weight": "delta5", "first_moment": "value5", "second_moment": "log"}
FACTORED_KINDS = {"weight": "delta4", "first_moment": "value4", "second_moment": "factored"}


@dataclass(frozen=True)
class EncodedState:
    """What a rank writes into an incremental checkpoint."""

    data: dict[str, Tensor]
    decoded: dict[str, Tensor]
    squares: Squares = field(default_factory=dict)


class DeltaChain:
    def __init__(self, mode: str, role_of: Callable[[str], TensorRole], *, factored: bool = False) -> None:
        """`mode`: exact, bounded or weights. `role_of`: what a tensor is to the optimizer, by its name."""
        self._mode, self._role_of = mode, role_of
        self._kinds = FACTORED_KINDS if factored else KINDS
        self._base: dict[str, Tensor] = {}
        self._base_manifest: tuple[str, Manifest] | None = None
        self._since_full = 0

    @property
    def next_mode(self) -> str:
        """The mode of the next save, the same on every rank."""
        return "full" if self._base_manifest is None or self._since_full >= MAX_CHAIN else self._mode

    @property
    def next_base(self) -> BaseCheckpoint | None:
        if self._base_manifest is None or self.next_mode not in ("exact", "bounded"):
            return None
        folder, manifest = self._base_manifest
        return BaseCheckpoint(folder, manifest.sha256, self._since_full + 1)

    @property
    def keeps_copies(self) -> bool:
        """Whether the copies of the next save become the base: then the save after it needs memory of its own."""
        return self._mode in ("exact", "bounded") and not self._base

    def is_kept(self, name: str) -> bool:
        """Whether the next save holds this tensor."""
        return self.next_mode != "weights" or self._role_of(name) == "weight"

    def encode(self, tensors: Mapping[str, Tensor]) -> EncodedState:
        """Encode tensors in host memory against the base."""
        bounded = self.next_mode == "bounded"

        def one(item: tuple[str, Tensor]) -> tuple[Tensor, Tensor, str, float, float]:
            name, tensor = item
            kind = self._kinds.get(self._role_of(name), "exact") if bounded else "exact"
            encoded = encode(kind, tensor, self._base.get(name))
            error = value = 0.0
            if kind != "exact":
                error = float((encoded.decoded.double() - tensor.double()).square().sum())
                value = float(tensor.double().square().sum())
            return torch.from_numpy(encoded.data.copy()), encoded.decoded, kind, error, value

        data, decoded = dict[str, Tensor](), dict[str, Tensor]()
        squares: Squares = {}
        with ThreadPoolExecutor(coding_threads(), thread_name_prefix="lakh-encode") as threads:
            for name, (blob, after, kind, error, value) in zip(tensors, threads.map(one, tensors.items()), strict=True):
                data[name], decoded[name] = blob, after
                if kind != "exact":
                    before = squares.get(kind, (0.0, 0.0))
                    squares[kind] = (before[0] + error, before[1] + value)
        return EncodedState(data, decoded, squares)

    def saved(self, folder: str, manifest: Manifest, tensors: Mapping[str, Tensor], copies: HostCopies) -> None:
        """A checkpoint is complete. `tensors`: what a reader of it gets; some of them are in the memory of `copies`."""
        self._since_full = 0 if manifest.mode == "full" else self._since_full + 1
        if manifest.mode == "weights":
            return
        self._base_manifest = (folder.rstrip("/").rpartition("/")[2], manifest)
        if self._mode != "weights":
            copies.exchange(tensors, self._base)
            self._base = dict(tensors)

    def reset(self) -> None:
        """The next checkpoint is full."""
        self._base, self._base_manifest, self._since_full = {}, None, 0


def combine_errors(parts: list[Squares]) -> dict[str, EncodingError]:
    """The errors of all ranks together."""
    errors = {}
    for kind in sorted({kind for part in parts for kind in part}):
        error, value = (sum(part[kind][at] for part in parts if kind in part) for at in (0, 1))
        errors[kind] = EncodingError(BLOCK_BOUNDS.get(kind), math.sqrt(error / value) if value else 0.0)
    return errors
