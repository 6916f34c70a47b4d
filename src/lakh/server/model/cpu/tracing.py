"""The graph of a decoder, from the definition of its block: the block runs once on zeros, and every operation on them
becomes a node of the native library.

So an architecture has one definition (workloads/code/architectures), and any block whose operations the library has is
one native call. An operation that it lacks raises `Untraceable`; that block runs in torch.

A traced tensor has TOKENS tokens in front, so that an operation over tokens cannot be mistaken for one inside a token.
Views need no node: a tensor's storage is its register, and its offset and strides are those of the operand.

Shapes: N tokens, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lakh.server.model.cpu import native, packed
from lakh.server.model.cpu.graph import Graph, Kind, NativeGraph, Operand
from lakh.server.model.cpu.packed import PackedMatrix
from lakh.workloads.code.attention import AttentionVariant
from lakh.workloads.code.ops import ModelOps, Rope

__all__ = ["BlockTracer", "Untraceable"]

TOKENS = 3


class Untraceable(Exception):
    """The native library has no node for an operation; the message names it."""


F = TypeVar("F", bound=Callable[..., Any])


def _untraced(operation: F) -> F:
    """An operation of ModelOps, whose own use of torch is not traced."""

    @functools.wraps(operation)
    def compute(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return operation(*args, **kwargs)

    return cast(F, compute)


class BlockTracer(TorchFunctionMode):
    """Inside `with`, operations on `hidden` and on what they give are traced."""

    def __init__(self, width: int, rotary: int, matrix_bits: int, tables: Sequence[int] = (1,)) -> None:
        """`rotary`: numbers of a head that rotate. `matrix_bits`: of matrices that a block multiplies head by head.
        `tables`: pairs of cosines and sines of each kind of layer."""
        super().__init__()
        self._graph, self._rotary, self._matrix_bits = Graph(), rotary, matrix_bits
        self._registers: dict[int, tuple[int, Tensor]] = {}
        """By storage: the register, and its first tensor, which keeps the storage alive."""
        self._written: set[int] = set()
        self.hidden = self._new((width,))
        """The residual stream before the first block."""
        self._written.add(0)
        self._rotations: list[Tensor] = []
        """The cosines of each pair."""
        self.ropes = [tuple(itertools.chain(*(self._new_rotation() for _ in range(count)))) for count in tables]

    def _new_rotation(self) -> tuple[Tensor, Tensor]:
        shape, table = (1, self._rotary), len(self._rotations)
        cos, sin = self._new(shape), self._new(shape)
        for number, part in enumerate((cos, sin)):
            self._add(Kind.COPY_ROTARY, shape, part, whole=(number, table))
        self._rotations.append(cos)
        return cos, sin

    @_untraced
    def rows_of_positions(self, table: Tensor) -> Tensor:
        """The row of each token's position in a table with one for every position."""
        out = self._new((table.shape[1],))
        rows = Operand(-1, 0, (0, 0, 1), table.contiguous())
        self._add(Kind.COPY_POSITION, (table.shape[1],), out, rows, whole=(len(table),))
        return out

    @property
    def ops(self) -> ModelOps:
        return ModelOps(
            attention=self._attention,
            variant_attention=self._attention,
            linear=self._linear,
            full_linear=self._linear,
            split_rotary=self._split_rotary,
            activation=self._gate,
            experts=self._experts,
            limit_groups=self._limit_groups,
            compresses_keys=True,
        )

    def finish(self, last: Tensor) -> NativeGraph:
        """The graph from `hidden` to `last`."""
        return NativeGraph(self._graph, 0, self._whole(last).register)

    # --- torch's operations ---

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        if not any(map(self._is_traced, _tensors((args, kwargs)))):
            return func(*args, **kwargs)
        is_in_place = name.endswith("_") and not name.endswith("__")
        if is_in_place or name.startswith("__i") or name == "__setitem__" or "out" in kwargs:
            raise Untraceable(f"{name}, which changes a tensor")
        found = func(*args, **kwargs)
        results = _tensors(found)
        if not results and name not in _FACTS:
            raise Untraceable(f"{name}, which depends on numbers")
        if all(map(self._is_traced, results)):
            return found  # a view, or a fact about the tensor
        operation = _OPERATIONS.get(name)
        if operation is None:
            raise Untraceable(name)
        if any(result.shape[:1] != (TOKENS,) for result in results):
            raise Untraceable(f"{name} over tokens")
        if isinstance(found, Tensor):
            found = self._new(tuple(found.shape[1:]), found.dtype)
        else:
            for result in results:
                self._remember(result)
        try:
            operation(self, found, *args, **kwargs)
        except (TypeError, ValueError, RuntimeError) as error:  # an argument that the operation here does not take
            raise Untraceable(f"{name}: {error}") from error
        return found

    # --- operations of ModelOps ---

    @_untraced
    def _linear(self, x: Tensor, weight: Any) -> Tensor:
        if not isinstance(weight, PackedMatrix):
            raise Untraceable("a product with a matrix that is not packed")
        y = self._new((weight.rows,))
        self._product(x, weight, y)
        return y

    def _product(self, x: Tensor, weight: PackedMatrix, y: Tensor) -> None:
        matrices = self._graph.matrices(weight)
        self._add(Kind.PRODUCT, (weight.rows,), y, self._whole(x), whole=(weight.columns,), weights=matrices)

    @_untraced
    def _gate(self, gate_up: Tensor) -> Tensor:
        shape = *gate_up.shape[1:-1], gate_up.shape[-1] // 2
        out = self._new(shape)
        self._add(Kind.GATE, shape, out, self._rows(gate_up))
        return out

    @_untraced
    def _limit_groups(self, scores: Tensor, groups: int, kept: int) -> Tensor:
        out = self._new(tuple(scores.shape[1:]))
        self._add(Kind.LIMIT_GROUPS, scores.shape[1:], out, self._rows(scores), whole=(groups, kept))
        return out

    @_untraced
    def _experts(
        self,
        x: Tensor,
        gate_up: PackedMatrix,
        down: PackedMatrix,
        index: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
    ) -> Tensor:
        matrices = self._graph.matrices(gate_up), self._graph.matrices(down)
        bias = None if bias is None else bias.contiguous()
        address = None if bias is None else bias.data_ptr()
        experts = native.EngineExperts(down.experts, gate_up.columns, down.columns, *matrices, address)
        self._graph.held += [experts, bias]
        y, top_k = self._new(tuple(x.shape[1:])), index.shape[-1]
        inputs = self._whole(x), self._whole(index), self._whole(weight)
        self._add(Kind.EXPERTS, (top_k,), y, *inputs, whole=(top_k,), weights=experts)
        return y

    @_untraced
    def _split_rotary(
        self,
        qkv: Tensor,
        rope: Rope,
        heads: int,
        kv_heads: int,
        norms: tuple[Tensor, Tensor] | None = None,
        eps: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).split([heads, kv_heads, kv_heads], dim=-2)
        if norms is not None:
            q, k = (self._normed_heads(x, norm, eps) for x, norm in zip((q, k), norms, strict=True))
        return self._rotate(q, rope[-2:]), self._rotate(k, rope[:2]), v

    def _normed_heads(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        out = self._new(tuple(x.shape[1:]))
        self._norm(Kind.RMS_NORM, out, x, (x.shape[-1],), norm, eps=eps)
        return out

    def _rotate(self, x: Tensor, rope: Rope) -> Tensor:
        table = next(number for number, cos in enumerate(self._rotations) if cos is rope[0])
        out, turns = self._new(tuple(x.shape[1:])), self._rotary
        rotated = out[..., :turns]
        self._add(Kind.ROTATE, rotated.shape[1:], rotated, self._rows(x[..., :turns]), whole=(table,))
        if x.shape[-1] > turns:
            self._numbers(Kind.COPY, out[..., turns:], x[..., turns:])
        return out

    @_untraced
    def _attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        variant: AttentionVariant | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        variant = variant or AttentionVariant()
        self._add(Kind.STORE, k.shape[1:], None, self._rows(k), self._rows(v), whole=(layer,))
        heads, size = q.shape[1:]
        scale = size**-0.5 if variant.scale is None else variant.scale
        sinks = None if sinks is None else sinks.contiguous()
        address = None if sinks is None else sinks.data_ptr()
        scores = native.EngineScores(scale, variant.softcap or 0.0, variant.signed_window, address)
        self._graph.held += [scores, sinks]
        out = self._new((heads, size))
        if q.stride(1) != size:
            q = self._copied(q)
        self._add(Kind.ATTEND, (heads, size), out, self._rows(q), whole=(layer,), weights=scores)
        return out

    # --- registers and operands ---

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        tensor = torch.zeros((TOKENS, *shape), dtype=dtype)
        self._remember(tensor)
        return tensor

    def _is_traced(self, tensor: Tensor) -> bool:
        return self._storage(tensor) in self._registers

    def _remember(self, tensor: Tensor) -> None:
        if not tensor.is_contiguous() or tensor.shape[:1] != (TOKENS,):
            raise Untraceable(f"a result of shape {list(tensor.shape)}")
        if tensor.dtype not in (torch.float32, torch.int64):
            raise Untraceable(f"a result of {tensor.dtype}")
        places = math.prod(tensor.shape[1:]) * tensor.itemsize // 4
        self._registers[self._storage(tensor)] = self._graph.register(places), tensor

    @staticmethod
    def _storage(tensor: Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)

    def _register(self, tensor: Tensor) -> int:
        register, _ = self._registers[self._storage(tensor)]
        return register

    def _operand(self, x: Tensor, shape: tuple[int, ...]) -> Operand:
        """Numbers of shape `shape` in a token."""
        if not self._is_traced(x):
            if x.dtype != torch.float32 or x.device.type != "cpu":
                raise Untraceable(f"numbers of {x.dtype} on a {x.device.type}")
            x = x.expand(shape)
            return Operand(-1, 0, tuple(x.stride()), x)
        register = self._register(x)
        if register not in self._written:
            raise Untraceable("a result that the native operation does not give")
        if x.shape[0] != TOKENS or x.stride(0) * x.itemsize // 4 != self._graph.sizes[register]:
            raise Untraceable("an operation over tokens")
        x = x.expand(TOKENS, *shape) if x.dim() == len(shape) + 1 else x
        if tuple(x.shape[1:]) != shape:
            raise Untraceable(f"shapes {list(x.shape[1:])} and {list(shape)}")
        return Operand(register, int(x.storage_offset()), tuple(x.stride()[1:]))

    def _rows(self, x: Tensor) -> Operand:
        """Rows whose numbers are side by side."""
        if x.stride(-1) != 1:
            x = self._copied(x)
        return self._operand(x, tuple(x.shape[1:]))

    def _whole(self, x: Tensor) -> Operand:
        """A whole register."""
        _, first = self._registers[self._storage(x)]
        if x.numel() != first.numel() or not x.is_contiguous():
            x = self._copied(x)
        return Operand(self._operand(x, tuple(x.shape[1:])).register)

    def _copied(self, x: Tensor) -> Tensor:
        out = self._new(tuple(x.shape[1:]))
        self._numbers(Kind.COPY, out, x)
        return out

    # --- nodes ---

    def _add(self, kind: Kind, shape: Any, out: Tensor | None, *inputs: Operand, **more: Any) -> None:
        if len(shape) > 3:
            raise Untraceable(f"{kind.name.lower()} of {len(shape)} dims")
        target = None
        if out is not None:
            self._written.add(self._register(out))
            target = self._operand(out, tuple(out.shape[1:]))
        self._graph.add(kind, shape, target, *inputs, **more)

    def _numbers(self, kind: Kind, out: Tensor, *inputs: Tensor, real: float = 0.0) -> None:
        """A node that computes number by number, with neighbouring dims joined where every operand allows it."""
        shape = tuple(out.shape[1:])
        self._written.add(self._register(out))
        operands = [self._operand(x, shape) for x in (out, *inputs)]
        sizes, strides = [1], [[0] for _ in operands]
        for dim, size in enumerate(shape):
            own = [operand.strides[dim] for operand in operands]
            if all(before[-1] == stride * size or sizes[-1] == 1 for before, stride in zip(strides, own, strict=True)):
                sizes[-1] *= size
                for before, stride in zip(strides, own, strict=True):
                    before[-1] = stride
            elif size > 1:
                sizes.append(size)
                for before, stride in zip(strides, own, strict=True):
                    before.append(stride)
        if len(sizes) > 3:
            raise Untraceable(f"{kind.name.lower()} of {len(sizes)} dims")
        joined = [operand._replace(strides=tuple(own)) for operand, own in zip(operands, strides, strict=True)]
        self._graph.add(kind, sizes, joined[0], *joined[1:], real=real)

    def _norm(self, kind: Kind, out: Tensor, x: Tensor, size: Any, *vectors: Tensor, eps: float | None) -> None:
        if eps is None or len(size) != 1 or any(vector is None for vector in vectors):
            raise Untraceable(f"{kind.name.lower()} without a weight or eps")
        shape = tuple(x.shape[1:])
        constants = [self._operand(vector.contiguous(), shape) for vector in vectors]
        self._add(kind, shape, out, self._rows(x), *constants, real=eps)

    def _only_last(self, x: Tensor, dim: int) -> None:
        if x.dim() != 2 or dim % x.dim() != 1:
            raise Untraceable(f"dim {dim} of {x.dim()}")


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    return [tensor for item in value.values() for tensor in _tensors(item)] if isinstance(value, dict) else []


# --- what each of torch's operations becomes: (tracer, result, the operation's arguments) -----------------------


def _binary(kind: Kind) -> Callable[..., None]:
    def trace(tracer: BlockTracer, out: Tensor, x: Any, y: Any) -> None:
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            return tracer._numbers(kind, out, x, y)
        if kind is Kind.ADD or not isinstance(x, Tensor):
            raise Untraceable(f"{kind.name.lower()} of a number")
        return tracer._numbers(Kind.SCALE, out, x, real=float(y) if kind is Kind.MULTIPLY else 1 / float(y))

    return trace


def _copy(tracer: BlockTracer, out: Tensor, x: Tensor, *_: Any, **__: Any) -> None:
    if out.dtype != x.dtype or out.numel() != x.numel():
        raise Untraceable(f"{x.dtype} to {out.dtype}")
    tracer._numbers(Kind.COPY, out.view(x.shape), x)


def _negate(tracer: BlockTracer, out: Tensor, x: Tensor) -> None:
    tracer._numbers(Kind.SCALE, out, x, real=-1.0)


def _sigmoid(tracer: BlockTracer, out: Tensor, x: Tensor) -> None:
    tracer._numbers(Kind.SIGMOID, out, x)


def _concatenate(tracer: BlockTracer, out: Tensor, tensors: Any, dim: int = 0) -> None:
    for part, tensor in zip(out.split([tensor.shape[dim] for tensor in tensors], dim=dim), tensors, strict=True):
        tracer._numbers(Kind.COPY, part, tensor)


def _zeros(tracer: BlockTracer, out: Tensor, x: Tensor, *_: Any) -> None:
    tracer._numbers(Kind.COPY, out, torch.zeros(1))


def _ones(tracer: BlockTracer, out: Tensor, x: Tensor) -> None:
    tracer._numbers(Kind.COPY, out, torch.ones(1))


def _gelu(tracer: BlockTracer, out: Tensor, x: Tensor, *, approximate: str = "none") -> None:
    kind = {"none": Kind.EXACT_GELU, "tanh": Kind.GELU}[approximate]
    tracer._add(kind, x.shape[1:], out, tracer._rows(x))


def _rms_norm(tracer: BlockTracer, out: Tensor, x: Tensor, size: Any, weight: Any = None, eps: Any = None) -> None:
    tracer._norm(Kind.RMS_NORM, out, x, size, weight, eps=eps)


def _layer_norm(
    tracer: BlockTracer, out: Tensor, x: Tensor, size: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> None:
    tracer._norm(Kind.LAYER_NORM, out, x, size, weight, bias, eps=eps)


def _softmax(tracer: BlockTracer, out: Tensor, x: Tensor, dim: int) -> None:
    tracer._only_last(x, dim)
    tracer._add(Kind.SOFTMAX, x.shape[1:], out, tracer._rows(x))


def _sum(tracer: BlockTracer, out: Tensor, x: Tensor, dim: int, *, keepdim: bool = False) -> None:
    tracer._only_last(x, dim)
    tracer._add(Kind.SUM, x.shape[1:], out if keepdim else out[:, None], tracer._rows(x))


def _top(tracer: BlockTracer, out: Any, x: Tensor, k: int, dim: int = -1) -> None:
    """Its values are left out: a block takes those of the chosen from other scores."""
    tracer._only_last(x, dim)
    tracer._add(Kind.TOP, (k,), out.indices, tracer._rows(x), whole=(x.shape[-1],))


def _gather(tracer: BlockTracer, out: Tensor, x: Tensor, dim: int, index: Tensor) -> None:
    tracer._only_last(x, dim)
    tracer._add(Kind.GATHER, index.shape[1:], out, tracer._rows(x), tracer._whole(index), whole=(x.shape[-1],))


def _scatter(tracer: BlockTracer, out: Tensor, x: Tensor, dim: int, index: Tensor, source: Tensor) -> None:
    tracer._only_last(x, dim)
    tracer._numbers(Kind.COPY, out, x)
    inputs = tracer._whole(index), tracer._rows(source)
    tracer._add(Kind.SCATTER, index.shape[1:], out, *inputs, whole=(x.shape[-1],))


def _matmul(tracer: BlockTracer, out: Tensor, x: Tensor, matrix: Tensor) -> None:
    if tracer._is_traced(matrix) or matrix.dim() != 2:
        raise Untraceable("a product of two traced tensors")
    tracer._product(x, PackedMatrix(matrix.shape[0], {0: packed.pack(matrix.T, 32)}), out)


def _einsum(tracer: BlockTracer, out: Tensor, equation: str, x: Tensor, matrices: Tensor) -> None:
    """Products of each head with a matrix of its own: in latent attention."""
    transposed = {"...hd,hdr->...hr": True, "...hr,hdr->...hd": False}.get(equation)
    if transposed is None or tracer._is_traced(matrices):
        raise Untraceable(f"einsum {equation}")
    matrices = matrices.transpose(1, 2) if transposed else matrices
    heads, rows, columns = matrices.shape
    bits = tracer._matrix_bits if columns % packed.GROUP == 0 else 32
    matrix = PackedMatrix(columns, {0: packed.pack(matrices.contiguous(), bits)})
    weights = tracer._graph.matrices(matrix)
    tracer._add(Kind.HEAD_PRODUCTS, (heads, rows), out, tracer._whole(x), whole=(columns, heads), weights=weights)


_FACTS = frozenset(("__get__", "__len__", "dim", "size", "numel", "stride", "is_floating_point", "is_contiguous"))
"""What may be asked of a traced tensor: its shape, type and the like, and none of its numbers."""

_OPERATIONS: dict[str, Callable[..., None]] = {
    "add": _binary(Kind.ADD),
    "mul": _binary(Kind.MULTIPLY),
    "div": _binary(Kind.DIVIDE),
    "neg": _negate,
    "sigmoid": _sigmoid,
    "cat": _concatenate,
    "gelu": _gelu,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "softmax": _softmax,
    "sum": _sum,
    "topk": _top,
    "gather": _gather,
    "scatter": _scatter,
    "new_zeros": _zeros,
    "ones_like": _ones,
    "matmul": _matmul,
    "einsum": _einsum,
    **dict.fromkeys(("flatten", "reshape", "contiguous", "unflatten", "clone"), _copy),
}
"""By the name of the function or method of torch."""
