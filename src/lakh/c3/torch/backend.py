"""The torch backend "c3": `import lakh.c3.torch.backend`, then `dist.init_process_group("c3")`.

Implements the operations that torch.distributed calls, under old and new names (2.11 to 2.13), from Python and C++. The
common part is in process_group.py, the returned `Work` objects in work.py.
"""

# torch's stubs type every method by several signatures, which differ between the versions that this file serves.
# mypy: disable-error-code="override,assignment,attr-defined,misc,call-arg"

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lakh.c3 import native
from lakh.c3.torch.process_group import BACKEND, AnyWork, C3ProcessGroupBase
from lakh.c3.torch.tensors import DTYPES, as_contiguous, native_op, single_tensor, unpack_into
from lakh.c3.torch.work import CompletedWork
from lakh.errors import LakhError, UserError
from lakh.spec.schedule import codec_bytes

__all__ = ["BACKEND", "DTYPES", "C3ProcessGroup", "find_failure", "register"]

_SUM, _AVG = native.OPS["sum"], native.OPS["avg"]


class EncodedUnit(Protocol):
    """Gradients of one FSDP2 unit, encoded with error feedback; see hsdp.py."""

    codec: str
    sums: int

    def take_residual(self, like: torch.Tensor) -> torch.Tensor | None: ...


class C3ProcessGroup(C3ProcessGroupBase):
    """The process group of backend "c3"."""

    _expected: tuple[int, int, EncodedUnit] | None = None

    # --- reductions --------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> AnyWork:
        tensor = tensors[0] if type(tensors) is list and len(tensors) == 1 else single_tensor(tensors, "all_reduce")
        op = native_op(opts)
        dtype = DTYPES.get(tensor.dtype)
        # Fast path of the most common case: contiguous, synchronous, on one host.
        if (
            dtype is not None
            and opts is not None
            and not opts.asyncOp
            and self.group.on_one_host
            and self.codec == "none"
            and self._coalesced is None
            and self._expected is None
            and not self._gpus
            and tensor.is_contiguous()
            and tensor.is_cpu
        ):
            self.calls["all_reduce"] = self.calls.get("all_reduce", 0) + 1
            address = tensor.data_ptr()
            status = self._fast(self.group.handle, 0, dtype, op, -1, address, address, tensor.numel())
            if status:
                raise native.last_error(status, f"c3 all_reduce, rank {self.group.rank}")
            return CompletedWork([tensor])
        if (unit := self._unit_of(tensor)) is not None:
            self._expected = None
            if unit.codec != "none" and op in (_SUM, _AVG) and self.group.size > 1:
                return self.allreduce_encoded(tensor, unit.codec, unit.take_residual(tensor), unit.sums, op=op)
        flat, finish = as_contiguous(tensor)
        extra: dict[str, Any] = {}
        if self.codec != "none" and tensor.dtype == torch.float32 and op in (_SUM, _AVG) and self.group.size > 1:
            extra = {"codec": self.codec, "seed": self.calls.get("all_reduce", 0)}
        return self._start("all_reduce", opts, [tensor], flat, flat, op=op, finish=finish, **extra)

    def expect_encoded(self, tensor: torch.Tensor, unit: EncodedUnit) -> None:
        """Encode the next sum of exactly this tensor with the codec of `unit`; see hsdp.py."""
        self._expected = (tensor.data_ptr(), tensor.numel(), unit)

    def encoded_bytes(self, tensor: torch.Tensor) -> int | None:
        """Encoded size of this tensor if its next sum is encoded; else None."""
        unit = self._unit_of(tensor)
        return None if unit is None else codec_bytes(unit.codec, tensor.numel())

    def _unit_of(self, tensor: torch.Tensor) -> EncodedUnit | None:
        if self._expected is None or self._expected[:2] != (tensor.data_ptr(), tensor.numel()):
            return None
        return self._expected[2]

    def allreduce_encoded(
        self, tensor: torch.Tensor, codec: str, residual: torch.Tensor | None, seed: int = 0, op: int = _AVG
    ) -> AnyWork:
        """Average or sum a contiguous float32 tensor, encoded on the wire. `residual` is this rank's error feedback."""
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise UserError("c3 all_reduce with a codec", f"a tensor of {tensor.dtype}", "give contiguous float32")
        self.calls["encoded"] = self.calls.get("encoded", 0) + 1
        if tensor.is_cuda:
            return self._allreduce_encoded_on_gpu(tensor, codec, residual, op)
        address = residual.data_ptr() if residual is not None else 0
        extra: dict[str, Any] = {"codec": codec, "residual": address, "seed": seed}
        return self._start("all_reduce", None, [tensor], tensor, tensor, op=op, keep=residual, **extra)

    def _allreduce_encoded_on_gpu(
        self, tensor: torch.Tensor, codec: str, residual: torch.Tensor | None, op: int
    ) -> AnyWork:
        """All-gathers the encoded gradients, then decodes and adds them in rank order: identical bits on all ranks.

        Suitable for the few replicas of hybrid sharding: traffic grows with the number of ranks.
        """
        from lakh.c3.torch.gpu_codec import decode_sum, encode

        size, flat = self.group.size, tensor.view(-1)
        if not flat.numel():
            return self._start("all_reduce", None, [tensor], tensor, tensor, op=op)
        wire = encode(codec, flat, residual)
        gathered = torch.empty(size * wire.numel(), dtype=torch.uint8, device=tensor.device)

        def finish() -> None:
            decode_sum(codec, gathered, flat.numel(), size, out=flat)
            if op == _SUM:
                flat.mul_(size)

        return self._start("all_gather", None, [tensor], wire, gathered, count=wire.numel(), finish=finish)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> AnyWork:
        return self._all([self.allreduce([tensor], opts) for tensor in tensors], list(tensors))

    def reduce(self, tensors: Any, opts: Any) -> AnyWork:
        tensor = single_tensor(tensors, "reduce")
        flat, finish = as_contiguous(tensor)
        if self.group.rank != opts.rootRank:
            finish = None
        return self._start("reduce", opts, [tensor], flat, flat, op=native_op(opts), root=opts.rootRank, finish=finish)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> AnyWork:
        output, pieces = single_tensor(outputs, "reduce_scatter"), inputs[0]
        self._same_shapes("reduce_scatter", output, pieces)
        return self._reduce_scatter_base(output, torch.cat([piece.reshape(-1) for piece in pieces]), opts)

    def _reduce_scatter_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> AnyWork:
        self._require_parts("reduce_scatter", source, output)
        source, (flat, finish) = source.contiguous(), as_contiguous(output, copy=False)
        return self._start("reduce_scatter", opts, [output], source, flat, op=native_op(opts), finish=finish)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> AnyWork:
        works = [self._reduce_scatter_base(out, source, opts) for out, source in zip(outputs, inputs, strict=True)]
        return self._all(works, list(outputs))

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    # --- copies ------------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any) -> AnyWork:
        tensor = single_tensor(tensors, "broadcast")
        flat, finish = as_contiguous(tensor)
        return self._start("broadcast", opts, [tensor], None, flat, root=opts.rootRank, finish=finish)

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> AnyWork:
        self._require_parts("all_gather", output, source)
        source, (flat, finish) = source.contiguous(), as_contiguous(output, copy=False)
        return self._start("all_gather", opts, [output], source, flat, count=source.numel(), finish=finish)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> AnyWork:
        works = [self._allgather_base(out, source, opts) for out, source in zip(outputs, inputs, strict=True)]
        return self._all(works, list(outputs))

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> AnyWork:
        source, pieces = single_tensor(inputs, "all_gather").contiguous(), outputs[0]
        flat, finish = self._gathered("all_gather", source, pieces)
        return self._start("all_gather", opts, list(pieces), source, flat, count=source.numel(), finish=finish)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> AnyWork:
        # outputs[rank][i] here, unlike elsewhere
        works = [
            self.allgather([[out[index] for out in outputs]], [source], opts) for index, source in enumerate(inputs)
        ]
        return self._all(works, [tensor for out in outputs for tensor in out])

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> AnyWork:
        source = single_tensor(inputs, "gather").contiguous()
        flat, finish, pieces = None, None, []
        if self.group.rank == opts.rootRank:
            pieces = list(outputs[0])
            flat, finish = self._gathered("gather", source, pieces)
        return self._start(
            "gather", opts, pieces, source, flat, root=opts.rootRank, count=source.numel(), finish=finish
        )

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> AnyWork:
        output = single_tensor(outputs, "scatter")
        flat, finish = as_contiguous(output, copy=False)
        source = None
        if self.group.rank == opts.rootRank:
            self._same_shapes("scatter", output, inputs[0])
            source = torch.cat([piece.reshape(-1) for piece in inputs[0]])
        return self._start("scatter", opts, [output], source, flat, root=opts.rootRank, finish=finish)

    def alltoall_base(
        self, output: torch.Tensor, source: torch.Tensor, receives: Any = None, sends: Any = None, opts: Any = None
    ) -> AnyWork:
        source, (flat, finish) = source.contiguous(), as_contiguous(output, copy=False)
        splits = [*self._offsets(source, sends, "input"), *self._offsets(output, receives, "output")]
        # The count is 0: sizes may differ between ranks, and the splits have them.
        return self._start("all_to_all", opts, [output], source, flat, count=0, splits=splits, finish=finish)

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> AnyWork:
        source = torch.cat([piece.reshape(-1) for piece in inputs])
        flat = source.new_empty(sum(piece.numel() for piece in outputs))
        splits = [at for side in (inputs, outputs) for at in accumulate((p.numel() for p in side), initial=0)]
        finish = unpack_into(flat, outputs)
        return self._start("all_to_all", opts, list(outputs), source, flat, count=0, splits=splits, finish=finish)

    def _offsets(self, tensor: torch.Tensor, rows: Any, what: str) -> list[int]:
        """Offsets of each rank's part in elements. `rows` are rows per rank; if empty, parts are equal."""
        size = self.group.size
        if not rows:
            if tensor.numel() % size or (tensor.dim() and tensor.shape[0] % size):
                found = f"{what} of {tuple(tensor.shape)} does not divide among {size} ranks"
                raise UserError("c3 all_to_all", found, "give split sizes")
            return [tensor.numel() // size * place for place in range(size + 1)]
        if len(rows) != size or sum(rows) != tensor.shape[0]:
            found = f"{what} splits {list(rows)} of {tensor.shape[0]} rows on {size} ranks"
            raise UserError("c3 all_to_all", found, "give one split per rank that add up to all rows")
        width = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 1
        return list(accumulate((int(value) * width for value in rows), initial=0))

    def barrier(self, opts: Any = None) -> AnyWork:
        return self._start("barrier", opts, [], None, None, count=0)

    def _gathered(self, operation: str, source: torch.Tensor, pieces: Any) -> tuple[torch.Tensor, Callable[[], None]]:
        """Memory for one input per rank, and a function that copies it into `pieces`."""
        self._same_shapes(operation, source, pieces)
        flat = source.new_empty(source.numel() * self.group.size)
        return flat, unpack_into(flat, pieces)

    def _require_parts(self, operation: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        size = self.group.size
        if whole.numel() != part.numel() * size or whole.dtype != part.dtype:
            found = f"{part.numel()} {part.dtype} per rank, {whole.numel()} {whole.dtype} in all, on {size} ranks"
            raise UserError(f"c3 {operation}", found, "the larger tensor must hold one part per rank")

    def _same_shapes(self, what: str, like: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
        size = self.group.size
        if len(pieces) != size or any(p.numel() != like.numel() or p.dtype != like.dtype for p in pieces):
            found = f"{len(pieces)} tensors {[tuple(p.shape) for p in pieces][:4]} and {tuple(like.shape)}"
            raise UserError(f"c3 {what}", found, f"give {size} tensors of the same size and type")


def _create(options: Any, _pg_options: Any = None) -> C3ProcessGroup:
    return C3ProcessGroup(options.store, options.group_rank, options.group_size, options.timeout)


def find_failure() -> LakhError | None:
    """The failure of this process's c3 groups, or None.

    Errors that pass through torch's C++ futures or the autograd engine arrive as RuntimeError without their class and
    cause. Ask here instead of parsing their text.
    """
    for group in list(distributed_c10d._world.pg_map):
        if isinstance(group, C3ProcessGroup) and (failure := group.group.failure()) is not None:
            return native.error_for(failure.cause, f"c3, rank {group.group.rank}", failure.reason)
    return None


def register() -> None:
    """Register backend "c3" with torch.distributed. Idempotent."""
    if BACKEND.upper() not in dist.Backend.__dict__:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


register()
