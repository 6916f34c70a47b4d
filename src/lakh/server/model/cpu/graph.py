"""A decoder as the native library runs it: nodes that read and write buffers of numbers per token (lakh_engine.h).

`Graph` collects nodes over *registers*, each of which is written by the nodes of one operation; `NativeGraph` is the
finished structure, in which registers of one size whose lives do not overlap share a buffer.
"""

from __future__ import annotations

import ctypes
import enum
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lakh.server.model.cpu import native
from lakh.server.model.cpu.packed import PackedMatrix

__all__ = ["Graph", "Kind", "NativeGraph", "Operand"]


class Kind(enum.IntEnum):
    """lakh_engine_kind."""

    ADD = 0
    MULTIPLY = 1
    DIVIDE = 2
    SCALE = 3
    COPY = 4
    SIGMOID = 5
    GELU = 6
    EXACT_GELU = 7
    RMS_NORM = 8
    LAYER_NORM = 9
    GATE = 10
    ROTATE = 11
    SOFTMAX = 12
    SUM = 13
    TOP = 14
    LIMIT_GROUPS = 15
    GATHER = 16
    SCATTER = 17
    COPY_ROTARY = 18
    COPY_POSITION = 19
    STORE = 20
    ATTEND = 21
    PRODUCT = 22
    HEAD_PRODUCTS = 23
    EXPERTS = 24


class Operand(NamedTuple):
    """Numbers of a token in a register, or `numbers`, which are the same for all tokens."""

    register: int
    """-1: `numbers`."""
    offset: int = 0
    strides: tuple[int, ...] = (0, 0, 1)
    numbers: Tensor | None = None


@dataclass
class GraphNode:
    kind: Kind
    sizes: tuple[int, ...]
    out: Operand | None
    inputs: tuple[Operand, ...]
    whole: tuple[int, ...] = ()
    real: float = 0.0
    weights: Any = None
    """The ctypes structure that the kind needs."""

    @property
    def reads(self) -> set[int]:
        return {operand.register for operand in self.inputs} - {-1}


@dataclass
class Graph:
    sizes: list[int] = field(default_factory=list)
    """Of each register: places of 4 bytes for a token."""
    nodes: list[GraphNode] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    """Whose memory the nodes point to."""

    def register(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def add(self, kind: Kind, sizes: Sequence[int], out: Operand | None, *inputs: Operand, **more: Any) -> None:
        self.nodes.append(GraphNode(kind, (1,) * (3 - len(sizes)) + tuple(sizes), out, inputs, **more))

    def matrices(self, matrix: PackedMatrix) -> native.EngineMatrices:
        table = matrix.table()
        self.held += [table, matrix]
        return native.EngineMatrices(table.ctypes.data, len(table))

    def needed(self, last: int) -> list[GraphNode]:
        """The nodes whose results reach register `last` or the cache, in order."""
        registers, found = {last}, list[GraphNode]()
        for node in reversed(self.nodes):
            if node.out is None or node.out.register in registers:
                registers |= node.reads
                found.append(node)
        return found[::-1]


class NativeGraph:
    """The nodes as C structures, with a buffer for each register."""

    def __init__(self, graph: Graph, first: int, last: int) -> None:
        nodes = graph.needed(last)
        ends = {register: at for at, node in enumerate(nodes) for register in _registers(node)}
        ends[last] = len(nodes)
        self._held: list[Any] = [graph, nodes]
        self._sizes: list[int] = []
        self._buffers = {first: self._new(graph.sizes[first])}
        free: defaultdict[int, list[int]] = defaultdict(list)
        rows = []
        for at, node in enumerate(nodes):
            own = _registers(node)
            for register in own - self._buffers.keys():
                size = graph.sizes[register]
                self._buffers[register] = free[size].pop() if free[size] else self._new(size)
            rows.append(self._structure(node))
            for register in own:
                if ends[register] == at:
                    free[graph.sizes[register]].append(self._buffers[register])
        self.first, self.last = self._buffers[first], self._buffers[last]
        self.nodes = (native.EngineNode * len(rows))(*rows)
        self.sizes = np.array(self._sizes, np.int64)

    def _new(self, size: int) -> int:
        self._sizes.append(size)
        return len(self._sizes) - 1

    def _structure(self, node: GraphNode) -> native.EngineNode:
        inputs = [self._operand(operand) for operand in (*node.inputs, *(_UNUSED,) * (3 - len(node.inputs)))]
        whole = (*node.whole, 0, 0)[:2]
        weights = None if node.weights is None else ctypes.addressof(node.weights)
        out = self._operand(node.out or _UNUSED)
        return native.EngineNode(node.kind, node.sizes, out, tuple(inputs), whole, node.real, weights)

    def _operand(self, operand: Operand) -> native.EngineOperand:
        strides = (0,) * (3 - len(operand.strides)) + tuple(operand.strides)
        if operand.numbers is not None:
            assert operand.numbers.dtype == torch.float32
            self._held.append(operand.numbers)
            return native.EngineOperand(-1, 0, strides, operand.numbers.data_ptr())
        buffer = -1 if operand.register < 0 else self._buffers[operand.register]
        return native.EngineOperand(buffer, operand.offset, strides, None)


_UNUSED = Operand(-1)


def _registers(node: GraphNode) -> set[int]:
    return node.reads | ({node.out.register} if node.out is not None else set())
