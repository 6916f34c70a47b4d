"""One model over several processes of a machine: each holds a share of every layer's heads and feed-forward.

Rank 0 is the engine: it alone has sequences, the block pool and the sampler. Before a step it sends the others the
chunks of the step; then all compute their share and all-reduce twice a layer, so the logits are the same everywhere,
and rank 0 uses its own. Embedding and head are whole in every process. Weights cannot be swapped.

    group = start(path, size=2, precision="f32")     starts size - 1 processes that load their share
    Runner(..., team=group)

Commands go over the channels of the child processes (lakh.child_process), which end with rank 0; collectives are
torch.distributed's: gloo or c3 on CPUs, nccl on GPUs (not tested). A peer that is silent in a collective for
PEER_TIMEOUT_S is lost.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lakh.child_process import Channel, ChannelClosed, ChildProcess
from lakh.errors import PeerLost, UserError
from lakh.server.model import weights as model_weights
from lakh.server.model.inference import InferenceModel, ModelShard, Precision, check_divisible
from lakh.server.model.kv_cache import PagedCache

__all__ = ["TensorParallelGroup", "start"]

PEER_TIMEOUT_S = 60.0
START_TIMEOUT_S = 300.0  # the others read their weights too
CLOSE_TIMEOUT_S = 5.0
HOST = "127.0.0.1"


class TensorParallelGroup:
    """Rank 0's view of the others."""

    def __init__(self, size: int, children: list[ChildProcess]) -> None:
        self.shard = ModelShard(0, size, _all_reduce)
        self._children, self._closed = children, False
        self._lock = threading.RLock()  # one command and its collectives at a time

    @contextlib.contextmanager
    def command(self, *message: Any) -> Iterator[None]:
        """Send the command to the others; run rank 0's part inside the block."""
        with self._lock:
            try:
                for child in self._children:
                    child.channel.send(message)
                yield
            except (ChannelClosed, RuntimeError) as error:  # torch's for a closed or silent connection
                raise _lost(self._children, error) from None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for child in self._children:
            child.stop(CLOSE_TIMEOUT_S)
        dist.destroy_process_group()


def _lost(children: list[ChildProcess], error: Exception) -> PeerLost:
    reasons = ", ".join(child.exit_reason(timeout_s=0.5) for child in children)
    return PeerLost("tensor parallel", f"a process is lost ({reasons}: {str(error)[:120]})", "start the server again")


def start(
    path: str, *, size: int, precision: Precision | None = None, backend: str | None = None
) -> TensorParallelGroup:
    """Start processes for ranks 1 .. size - 1 on this machine; they load their share of the model at `path`."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda" and torch.cuda.device_count() < size:
        found = f"needs {size} GPUs, and there are {torch.cuda.device_count()}"
        raise UserError(f"--tensor {size}", found, "choose at most one process per GPU")
    check_divisible(model_weights.read(path).spec, size)  # errors of the model are raised here, once
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START_TIMEOUT_S))
    shared = {"path": path, "size": size, "port": store.port, "precision": precision, "backend": backend}
    shared["threads"] = torch.get_num_threads()
    target = "lakh.server.model.tensor_parallel:main"
    children = [ChildProcess.start(target, {**shared, "rank": rank}) for rank in range(1, size)]
    try:
        for child in children:
            child.channel.receive(START_TIMEOUT_S)  # it has loaded its weights, or raises its error
        _join(store, 0, size, device, backend)
    except BaseException as error:
        for child in children:
            child.kill()
        if isinstance(error, ChannelClosed | RuntimeError | TimeoutError):
            raise _lost(children, error) from None
        raise
    return TensorParallelGroup(size, children)


def _join(store: dist.TCPStore, rank: int, size: int, device: torch.device, backend: str | None) -> None:
    backend = backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    if backend == "c3":
        from lakh.c3.torch.backend import register

        register()
    limit = timedelta(seconds=PEER_TIMEOUT_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    dist.barrier()


def _all_reduce(part: Tensor) -> Tensor:
    part = part.contiguous()
    dist.all_reduce(part)
    return part


# --- in the other processes ---------------------------------------------------------------------------------


def main(channel: Channel, options: dict[str, Any]) -> None:
    """Run rank 0's commands until it closes the channel."""
    rank, size = options["rank"], options["size"]
    torch.set_num_threads(options["threads"])
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore(HOST, options["port"], timeout=timedelta(seconds=START_TIMEOUT_S))
    loaded = model_weights.read(options["path"])
    channel.send("loaded")
    _join(store, rank, size, device, options["backend"])
    precision: Precision = options["precision"] or ("bf16" if device.type == "cuda" else "f32")
    _, num_ids, num_blocks = channel.receive()  # "begin", always the first
    shard = ModelShard(rank, size, _all_reduce)
    network = InferenceModel(loaded.spec, loaded.weights, num_ids, device, precision, shard)
    cache = PagedCache(loaded.spec, num_blocks, device=device, dtype=network.dtype, kv_heads=network.kv_heads)
    del loaded
    while True:
        kind, *rest = channel.receive()
        if kind == "forward":
            network.forward(rest[0], cache)
        elif kind == "copy":
            cache.copy_block(*rest)
