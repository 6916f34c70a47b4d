"""The torch backend "c3": `import lakh.c3.torch_backend`, then `dist.init_process_group("c3")`.

The operations that torch.distributed calls, some by old names and some by new ones (2.11 to 2.13), from Python and from
C++; all are here. What they have in common is in torch_group.py, what they return in torch_work.py.
"""

# torch's stubs type every method by several signatures, which differ between the versions that this file serves.
# mypy: disable-error-code="override,assignment,attr-defined,misc,call-arg"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lakh.c3 import native
from lakh.c3.torch_group import BACKEND, AnyWork, StartsOperations
from lakh.c3.torch_tensors import DTYPES, in_place, one, op_of, running, spread
from lakh.c3.torch_work import DoneWork
from lakh.errors import UserError
from lakh.spec.schedule import codec_bytes

__all__ = ["BACKEND", "DTYPES", "C3ProcessGroup", "register"]

_SUM, _AVG = native.OPS["sum"], native.OPS["avg"]


class Unit(Protocol):
    """Gradients that belong together and are encoded with a memory of what was lost; see hsdp.py."""

    codec: str
    sums: int

    def take_residual(self, like: torch.Tensor) -> torch.Tensor | None: ...


class C3ProcessGroup(StartsOperations):
    """What torch.distributed calls."""

    _expected: tuple[int, int, Unit] | None = None

    # --- reductions --------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> AnyWork:
        tensor = tensors[0] if type(tensors) is list and len(tensors) == 1 else one(tensors, "all_reduce")
        op = op_of(opts)
        dtype = DTYPES.get(tensor.dtype)
        # The commonest case, without detours: contiguous, synchronous, on one host.
        if (
            dtype is not None
            and opts is not None
            and not opts.asyncOp
            and self.group.on_one_host
            and self.codec == "none"
            and self._together is None
            and self._expected is None
            and not self._gpus
            and tensor.is_contiguous()
            and tensor.is_cpu
        ):
            self.calls["all_reduce"] = self.calls.get("all_reduce", 0) + 1
            address = tensor.data_ptr()
            status = self._fast(self.group.handle, 0, dtype, op, -1, address, address, tensor.numel())
            if status:
                raise native.error_of(status, f"c3 all_reduce, rank {self.group.rank}")
            return DoneWork([tensor])
        if (unit := self._unit_of(tensor)) is not None:
            self._expected = None
            if unit.codec != "none" and op in (_SUM, _AVG) and self.group.size > 1:
                return self.allreduce_encoded(tensor, unit.codec, unit.take_residual(tensor), unit.sums, op=op)
        flat, finish = in_place(tensor)
        extra: dict[str, Any] = {}
        if self.codec != "none" and tensor.dtype == torch.float32 and op in (_SUM, _AVG) and self.group.size > 1:
            extra = {"codec": self.codec, "seed": self.calls.get("all_reduce", 0)}
        return self._go("all_reduce", opts, [tensor], flat, flat, op=op, finish=finish, **extra)

    def expect_encoded(self, tensor: torch.Tensor, unit: Unit) -> None:
        """The next sum of exactly this tensor is encoded as `unit` says; see hsdp.py."""
        self._expected = (tensor.data_ptr(), tensor.numel(), unit)

    def encoded_bytes(self, tensor: torch.Tensor) -> int | None:
        """The bytes that stand for this tensor on the wire where its sum, if it comes next, is encoded; else None."""
        unit = self._unit_of(tensor)
        return None if unit is None else codec_bytes(unit.codec, tensor.numel())

    def _unit_of(self, tensor: torch.Tensor) -> Unit | None:
        if self._expected is None or self._expected[:2] != (tensor.data_ptr(), tensor.numel()):
            return None
        return self._expected[2]

    def allreduce_encoded(
        self, tensor: torch.Tensor, codec: str, residual: torch.Tensor | None, seed: int = 0, op: int = _AVG
    ) -> AnyWork:
        """Average or sum of a contiguous float32 tensor with a codec on the wire; `residual` is the error feedback of
        this rank.
        """
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise UserError("c3 all_reduce with a codec", f"a tensor of {tensor.dtype}", "give contiguous float32")
        self.calls["encoded"] = self.calls.get("encoded", 0) + 1
        if tensor.is_cuda:
            return self._allreduce_encoded_on_gpu(tensor, codec, residual, op)
        address = residual.data_ptr() if residual is not None else 0
        extra: dict[str, Any] = {"codec": codec, "residual": address, "seed": seed}
        return self._go("all_reduce", None, [tensor], tensor, tensor, op=op, keep=residual, **extra)

    def _allreduce_encoded_on_gpu(
        self, tensor: torch.Tensor, codec: str, residual: torch.Tensor | None, op: int
    ) -> AnyWork:
        """Everybody's encoded gradients to everybody, decoded and added in rank order: the same bits on all ranks.

        Suits the few replicas of hybrid sharding: bytes grow with the number of ranks.
        """
        from lakh.c3.gpu_codec import decode_sum, encode

        size, flat = self.group.size, tensor.view(-1)
        if not flat.numel():
            return self._go("all_reduce", None, [tensor], tensor, tensor, op=op)
        wire = encode(codec, flat, residual)
        everything = torch.empty(size * wire.numel(), dtype=torch.uint8, device=tensor.device)

        def finish() -> None:
            decode_sum(codec, everything, flat.numel(), size, out=flat)
            if op == _SUM:
                flat.mul_(size)

        return self._go("all_gather", None, [tensor], wire, everything, count=wire.numel(), finish=finish)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> AnyWork:
        return self._all([self.allreduce([tensor], opts) for tensor in tensors], list(tensors))

    def reduce(self, tensors: Any, opts: Any) -> AnyWork:
        tensor = one(tensors, "reduce")
        flat, finish = in_place(tensor)
        if self.group.rank != opts.rootRank:
            finish = None
        return self._go("reduce", opts, [tensor], flat, flat, op=op_of(opts), root=opts.rootRank, finish=finish)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> AnyWork:
        output, pieces = one(outputs, "reduce_scatter"), inputs[0]
        self._same_shapes("reduce_scatter", output, pieces)
        return self._reduce_scatter(output, torch.cat([piece.reshape(-1) for piece in pieces]), opts)

    def _reduce_scatter(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> AnyWork:
        if given.numel() != output.numel() * self.group.size or given.dtype != output.dtype:
            found = f"{given.numel()} {given.dtype} into {output.numel()} {output.dtype} on {self.group.size} ranks"
            raise UserError("c3 reduce_scatter", found, "the input must hold one output for each rank")
        given, (flat, finish) = given.contiguous(), in_place(output, copy=False)
        return self._go("reduce_scatter", opts, [output], given, flat, op=op_of(opts), finish=finish)

    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> AnyWork:
        return self._reduce_scatter(output, given, opts)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> AnyWork:
        return self._reduce_scatter(output, given, opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> AnyWork:
        works = [self._reduce_scatter(out, given, opts) for out, given in zip(outputs, inputs, strict=True)]
        return self._all(works, list(outputs))

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    # --- copies ------------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any) -> AnyWork:
        tensor = one(tensors, "broadcast")
        flat, finish = in_place(tensor)
        return self._go("broadcast", opts, [tensor], None, flat, root=opts.rootRank, finish=finish)

    def _all_gather(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> AnyWork:
        if output.numel() != given.numel() * self.group.size or given.dtype != output.dtype:
            found = f"{given.numel()} {given.dtype} into {output.numel()} {output.dtype} on {self.group.size} ranks"
            raise UserError("c3 all_gather", found, "the output must hold one input of each rank")
        given, (flat, finish) = given.contiguous(), in_place(output, copy=False)
        return self._go("all_gather", opts, [output], given, flat, count=given.numel(), finish=finish)

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> AnyWork:
        return self._all_gather(output, given, opts)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> AnyWork:
        return self._all_gather(output, given, opts)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> AnyWork:
        works = [self._all_gather(out, given, opts) for out, given in zip(outputs, inputs, strict=True)]
        return self._all(works, list(outputs))

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> AnyWork:
        given, pieces = one(inputs, "all_gather").contiguous(), outputs[0]
        self._same_shapes("all_gather", given, pieces)
        flat = torch.empty(given.numel() * self.group.size, dtype=given.dtype, device=given.device)
        finish = spread(flat, pieces)
        return self._go("all_gather", opts, list(pieces), given, flat, count=given.numel(), finish=finish)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> AnyWork:
        # outputs[rank][i] here, unlike elsewhere
        works = [self.allgather([[row[index] for row in outputs]], [given], opts) for index, given in enumerate(inputs)]
        return self._all(works, [tensor for row in outputs for tensor in row])

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> AnyWork:
        given = one(inputs, "gather").contiguous()
        flat, finish, pieces = None, None, []
        if self.group.rank == opts.rootRank:
            pieces = list(outputs[0])
            self._same_shapes("gather", given, pieces)
            flat = torch.empty(given.numel() * self.group.size, dtype=given.dtype, device=given.device)
            finish = spread(flat, pieces)
        return self._go("gather", opts, pieces, given, flat, root=opts.rootRank, count=given.numel(), finish=finish)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> AnyWork:
        output = one(outputs, "scatter")
        flat, finish = in_place(output, copy=False)
        given = None
        if self.group.rank == opts.rootRank:
            self._same_shapes("scatter", output, inputs[0])
            given = torch.cat([piece.reshape(-1) for piece in inputs[0]])
        return self._go("scatter", opts, [output], given, flat, root=opts.rootRank, finish=finish)

    def alltoall_base(
        self, output: torch.Tensor, given: torch.Tensor, receives: Any = None, sends: Any = None, opts: Any = None
    ) -> AnyWork:
        given, (flat, finish) = given.contiguous(), in_place(output, copy=False)
        splits = [
            *self._offsets(given, sends, "input"),
            *self._offsets(output, receives, "output"),
        ]
        count = 0  # sizes may differ between ranks; the splits say them
        return self._go("all_to_all", opts, [output], given, flat, count=count, splits=splits, finish=finish)

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> AnyWork:
        given = torch.cat([piece.reshape(-1) for piece in inputs])
        flat = torch.empty(sum(piece.numel() for piece in outputs), dtype=given.dtype, device=given.device)
        splits = running([piece.numel() for piece in inputs]) + running([piece.numel() for piece in outputs])
        finish = spread(flat, outputs)
        return self._go("all_to_all", opts, list(outputs), given, flat, count=0, splits=splits, finish=finish)

    def _offsets(self, tensor: torch.Tensor, rows: Any, what: str) -> list[int]:
        """Offsets of each rank's part in elements; `rows` are numbers of rows, none: equal parts."""
        size = self.group.size
        if not rows:
            if tensor.numel() % size or (tensor.dim() and tensor.shape[0] % size):
                found = f"{what} of {tuple(tensor.shape)} does not divide among {size} ranks"
                raise UserError("c3 all_to_all", found, "give split sizes")
            return [tensor.numel() // size * place for place in range(size + 1)]
        if len(rows) != size or sum(rows) != tensor.shape[0]:
            found = f"{what} splits {list(rows)} of {tensor.shape[0]} rows on {size} ranks"
            raise UserError("c3 all_to_all", found, "give one split per rank, together all rows")
        width = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 1
        return running([int(value) * width for value in rows])

    def barrier(self, opts: Any = None) -> AnyWork:
        return self._go("barrier", opts, [], None, None, count=0)

    def _same_shapes(self, what: str, one: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
        size = self.group.size
        if len(pieces) != size or any(p.numel() != one.numel() or p.dtype != one.dtype for p in pieces):
            found = f"{len(pieces)} tensors {[tuple(p.shape) for p in pieces][:4]} beside {tuple(one.shape)}"
            raise UserError(f"c3 {what}", found, f"give {size} tensors of the same size and type")


def _create(options: Any, _pg_options: Any = None) -> C3ProcessGroup:
    return C3ProcessGroup(
        options.store, options.group_rank, options.group_size, options.timeout, getattr(options, "group_id", "")
    )


def register() -> None:
    """Make the name "c3" known to torch.distributed; harmless when it is."""
    if BACKEND.upper() not in dist.Backend.__dict__:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


register()
