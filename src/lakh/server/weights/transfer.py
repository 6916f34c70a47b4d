"""Weight transfer from a trainer to an engine over collectives, while both keep working.

Both sides are ranks of one torch.distributed group (gloo, c3, nccl); `src` is the trainer's rank that has the weights.

    trainer   send(get, spec, version=..., group=..., src=...)      get(name) returns a whole tensor
    engine    WeightReceiver(engine, group=..., src=...).receive()  in a thread of its own

Tensors travel in buckets of about BUCKET_BYTES; the next bucket is broadcast while the previous one is unpacked. The
engine collects them in a second set of weights (twice the memory meanwhile) and swaps the sets between two steps, which
clears the prefix cache and increments its version. So no step sees a mix of old and new weights.

A model of another shape is a UserError on both sides before any weights travel. A lost or silent peer is a PeerError
after the group's own timeout; the engine then keeps its weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lakh import config
from lakh.errors import PeerLost, UserError
from lakh.server.engine import Engine
from lakh.spec.model import Model
from lakh.workloads.code.formats import hf

__all__ = ["WeightReceiver", "WeightTransferResult", "buckets", "send"]

BUCKET_BYTES = 64 << 20
KINDS = (torch.float32, torch.bfloat16, torch.float16)


class WeightTransferResult(NamedTuple):
    version: int
    """The trainer's version."""
    transfer_s: float
    """From the first byte to the last; the engine keeps working."""
    swap_s: float
    """Of it, running sequences finish for a second at most."""


def buckets(spec: Model, itemsize: int, bucket_bytes: int = BUCKET_BYTES) -> list[list[tuple[str, torch.Size]]]:
    """Names and shapes of the tensors in each message, in the same order on both sides; a large tensor is alone."""
    made: list[list[tuple[str, torch.Size]]] = []
    room = 0
    for name, shape in hf.shapes(spec).items():
        size = torch.Size(shape).numel() * itemsize
        if size > room:
            made.append([])
            room = bucket_bytes
        made[-1].append((name, torch.Size(shape)))
        room -= size
    return made


def send(
    get: Callable[[str], Tensor],
    spec: Model,
    *,
    version: int,
    src: int,
    group: Any = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    bucket_bytes: int = BUCKET_BYTES,
) -> float:
    """Broadcast the weights from rank `src` to the rest of the group; returns the seconds it took.

    Calls `get` for each name once, in order: a sharded trainer gathers one tensor at a time.
    """
    began_s = time.perf_counter()
    device = torch.device(device)
    _agree(torch.tensor([version, KINDS.index(dtype), bucket_bytes, _shape_id(spec)], device=device), src, group)
    sending, wait = None, lambda: None
    for bucket in buckets(spec, dtype.itemsize, bucket_bytes):
        flat = torch.cat([get(name).detach().to(device, dtype).flatten() for name, _ in bucket])
        wait()
        sending = flat  # keeps the buffer until it is sent
        wait = _broadcast(sending, src, group)
    wait()
    return time.perf_counter() - began_s


class WeightReceiver:
    def __init__(self, engine: Engine, *, src: int, group: Any = None, device: torch.device | str = "cpu") -> None:
        """`device`: where the group's backend receives."""
        self._engine, self._src, self._group, self._device = engine, src, group, torch.device(device)

    def receive(self) -> WeightTransferResult:
        """Wait for the next weights, then swap them in."""
        spec = self._engine.spec
        mine = torch.tensor([0, 0, 0, _shape_id(spec)], device=self._device)
        version, kind, bucket_bytes, _ = _agree(mine, self._src, self._group)
        began_s = time.perf_counter()
        staged = self._engine.stage()
        for bucket, flat in self._arriving(buckets(spec, KINDS[kind].itemsize, bucket_bytes), KINDS[kind]):
            for (name, shape), part in zip(bucket, flat.split([shape.numel() for _, shape in bucket]), strict=True):
                staged.load_tensor(name, part.view(shape))
        staged.finish_loading()
        arrived_s = time.perf_counter()
        self._engine.swap(staged)
        return WeightTransferResult(version, arrived_s - began_s, time.perf_counter() - arrived_s)

    def _arriving(self, plan: list[Any], dtype: torch.dtype) -> Iterator[tuple[Any, Tensor]]:
        """Each bucket with its data, while the next one is in transit."""
        sizes = [sum(shape.numel() for _, shape in bucket) for bucket in plan]
        buffers = [torch.empty(max(sizes), dtype=dtype, device=self._device) for _ in range(2)]
        wait = _broadcast(buffers[0][: sizes[0]], self._src, self._group)
        for number, bucket in enumerate(plan):
            wait()
            if number + 1 < len(plan):
                wait = _broadcast(buffers[(number + 1) % 2][: sizes[number + 1]], self._src, self._group)
            yield bucket, buffers[number % 2][: sizes[number]]


def _agree(header: Tensor, src: int, group: Any) -> list[int]:
    """The sender's header, after every rank has confirmed the shape of the model."""
    own_shape = int(header[-1])
    _broadcast(header, src, group)()
    differs = torch.tensor([int(int(header[-1]) != own_shape)], device=header.device)
    _with_peer_errors(lambda: dist.all_reduce(differs, group=group))
    if int(differs):
        raise UserError(
            "weight sync", "trainer and engine have models of different shapes", "serve the shape that is trained"
        )
    return [int(number) for number in header]


def _broadcast(tensor: Tensor, src: int, group: Any) -> Callable[[], None]:
    """Start a broadcast; returns a function that waits for it."""
    work = _with_peer_errors(lambda: dist.broadcast(tensor, src=src, group=group, async_op=True))
    return lambda: _with_peer_errors(work.wait)


def _with_peer_errors(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RuntimeError as error:  # torch raises it for a closed or silent connection
        found = f"a rank was lost or silent ({str(error).partition(chr(10))[0][:120]})"
        raise PeerLost("weight sync", found, "the engine keeps its weights; send again") from None


def _shape_id(spec: Model) -> int:
    """A number that differs between shapes."""
    return int(config.fingerprint(spec)[:15], 16)
