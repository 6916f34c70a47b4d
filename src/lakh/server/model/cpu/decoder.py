"""`NativeDecoder`: all layers of a model in one native call, for prompts and decode steps alike.

Shapes: N new tokens of all sequences, H query heads, D head size, V ids that are scored.

Every token is computed in the same order of operations, whatever is beside it (native/engine/graph.cpp). So its logits
have the same bits alone and in a batch, in a whole prompt and in chunks, with a cached prefix and without: activations
in 8 bits would amplify any difference in rounding to another text.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lakh.server.model.cpu import native
from lakh.server.model.cpu.graph import NativeGraph
from lakh.server.model.cpu.packed import PackedMatrix
from lakh.spec.model import Model
from lakh.workloads.code.attention import AttentionVariant
from lakh.workloads.code.ops import Rope

__all__ = ["NativeDecoder", "Place", "attend", "cache_structure"]

Place = tuple[Any, Any, Any]
"""Slots, and for each token where its sequence starts there and how many of them it attends to."""


class NativeDecoder:
    def __init__(
        self,
        spec: Model,
        graph: NativeGraph,
        embedding: PackedMatrix,
        head: PackedMatrix,
        num_ids: int,
        ropes: Sequence[Rope],
    ) -> None:
        """`ropes`: of all positions, for each kind of layer."""
        self._num_ids = num_ids
        tables = list(itertools.chain(*ropes))
        cos, sin = torch.stack(tables[::2]), torch.stack(tables[1::2])
        self._held = graph, embedding, head, cos, sin  # whose memory the structure points to
        self._graph = native.EngineGraph(
            *(ctypes.addressof(graph.nodes), len(graph.nodes), graph.sizes.ctypes.data, len(graph.sizes)),
            *(graph.first, graph.last),
            native.EnginePiece(*map(int, embedding.table()[0])),
            native.EnginePiece(*map(int, head.table(num_ids)[0])),
            *(cos.data_ptr(), sin.data_ptr(), *cos.shape[:2], 2 * cos.shape[2]),
            *(spec.layers, spec.cache_heads, spec.cache_head_dim),
            spec.logit_softcap or 0.0,
        )
        library = native.open_library()
        assert library is not None, "quantized matrices exist only with the library"
        assert library.lakh_engine_check(self._graph) == 0, "a graph whose sizes do not fit together"

    def forward(self, ids: Sequence[int], place: Place, scored: Sequence[int], cache: native.EngineCache) -> Tensor:
        """Store the keys and values of the tokens `ids`, and return the logits of the `scored` ones, in order."""
        library = native.open_library()
        assert library is not None, "quantized matrices exist only with the library"
        ids_N, scored_S = np.array(ids, np.int64), np.array(scored, np.int64)
        logits_SV = torch.empty((len(scored), self._num_ids))
        addresses = ids_N.ctypes.data, len(scored), scored_S.ctypes.data, logits_SV.data_ptr()
        status = library.lakh_engine_forward(self._graph, cache, _places(place), *addresses)
        assert status == 0, "ids or places that do not fit the model"
        return logits_SV


def attend(
    q_NHD: Tensor,
    cache: native.EngineCache,
    kv_heads: int,
    place: Place,
    variant: AttentionVariant,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention in one layer, in the arithmetic of NativeDecoder."""
    library = native.open_library()
    assert library is not None
    q_NHD = q_NHD.contiguous()
    out_NHD = torch.empty_like(q_NHD)
    _, heads, size = q_NHD.shape
    scale = size**-0.5 if variant.scale is None else variant.scale
    sinks_H = None if sinks_H is None else sinks_H.contiguous()
    sinks = None if sinks_H is None else sinks_H.data_ptr()
    scores = native.EngineScores(scale, variant.softcap or 0.0, variant.signed_window, sinks)
    addresses = q_NHD.data_ptr(), out_NHD.data_ptr()
    status = library.lakh_engine_attend(cache, _places(place), scores, heads, kv_heads, size, *addresses)
    assert status == 0, f"{heads} heads, {kv_heads} of keys"
    return out_NHD


def cache_structure(arrays: Sequence[Any], capacity: int) -> native.EngineCache:
    """Of keys and values, and their scales where they are int8; the arrays must outlive it."""
    addresses = [array.ctypes.data for array in arrays]
    return native.EngineCache(*addresses, *[None] * (4 - len(addresses)), capacity)


def _places(place: Place) -> native.EnginePlaces:
    return native.EnginePlaces(len(place[2]), *(ctypes.c_void_p(array.ctypes.data) for array in place))
