"""One model over several processes of a machine: each holds a share of every layer's heads and feed-forward.

Rank 0 is the engine: it alone has rows, blocks and the sampler. Before a step it tells the others what the step is
(which tokens, which blocks); then all compute their share and add up twice a layer, so the scores are the same
everywhere and rank 0 uses its own. The others do what they are told (`obey`) until rank 0 says so or is gone.

    team = start(path, size=2, precision="f32")     starts size - 1 processes that load their share
    Runner(..., team=team)

Collectives are torch.distributed's: gloo or c3 on CPUs, nccl on GPUs (by construction, not tried). While nothing is to
do, rank 0 says so every HEARTBEAT_S, so that silence always means a lost peer: after PEER_TIMEOUT_S everybody gives up.
Embedding and head are whole in every process. Weights are not swapped in a team.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lakh.errors import PeerLost, UserError
from lakh.server.model import weights as model_weights
from lakh.server.model.inference import InferenceModel, ModelShard, Precision
from lakh.server.model.kv_cache import PagedCache

__all__ = ["TensorParallelGroup", "start"]

PEER_TIMEOUT_S = 60.0
HEARTBEAT_S = 15.0
START_TIMEOUT_S = 300.0  # the others read their weights too
CLOSE_S = 5.0
HOST = "127.0.0.1"


class TensorParallelGroup:
    """Rank 0's view of the others."""

    def __init__(self, size: int, device: torch.device, processes: list[subprocess.Popen[bytes]]) -> None:
        self.shard = ModelShard(0, size, _all_reduce)
        self.device, self._processes = device, processes
        self._lock = threading.RLock()  # one message and its collectives at a time
        self._closed = threading.Event()
        threading.Thread(target=self._beat, name="lakh-heartbeat", daemon=True).start()

    @contextlib.contextmanager
    def command(self, *message: Any) -> Iterator[None]:
        """Tell the others, then do your part inside the block."""
        with self._lock:
            try:
                _broadcast_object(message)
                yield
            except RuntimeError as error:  # what torch raises for a closed or silent connection
                codes = [process.poll() for process in self._processes]
                found = f"a process went away or was silent (exit codes {codes}: {str(error)[:80]})"
                raise PeerLost("tensor parallel", found, "start the server again") from None

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(PeerLost), self.command("end"):
            pass
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(CLOSE_S)
                continue
            process.kill()
            process.wait(CLOSE_S)
        dist.destroy_process_group()

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            with contextlib.suppress(PeerLost), self.command("nothing"):
                pass


def start(
    path: str, *, size: int, precision: Precision | None = None, backend: str | None = None
) -> TensorParallelGroup:
    """Processes for ranks 1 .. size - 1, on this machine, that load their share of the model behind `path`."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda" and torch.cuda.device_count() < size:
        found = f"needs {size} GPUs, and there are {torch.cuda.device_count()}"
        raise UserError(f"--tensor {size}", found, "choose at most one process per GPU")
    loaded = model_weights.read(path)  # what cannot be loaded or shared is said here, once
    for name in ("heads", "kv_heads", "ffn"):
        count = getattr(loaded.spec, name)
        if count % size:
            todo = f"choose a number that divides {count}"
            raise UserError(f"--tensor {size}", f"does not divide the model's {name} ({count})", todo)
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START_TIMEOUT_S))
    code = "import sys; from lakh.server.model.tensor_parallel import main; main(sys.argv[1])"
    processes = []
    for rank in range(1, size):
        options = {"path": path, "rank": rank, "size": size, "port": store.port}
        options |= {"precision": precision, "backend": backend, "threads": torch.get_num_threads()}
        processes.append(subprocess.Popen([sys.executable, "-c", code, json.dumps(options)]))
    try:
        _join(store, 0, size, device, backend)
    except RuntimeError as error:
        for process in processes:
            process.kill()
        raise PeerLost("tensor parallel", f"not all processes came up ({str(error)[:120]})", "try again") from None
    return TensorParallelGroup(size, device, processes)


def _join(store: dist.TCPStore, rank: int, size: int, device: torch.device, backend: str | None) -> None:
    backend = backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    if backend == "c3":
        from lakh.c3 import torch_backend

        torch_backend.register()
    limit = timedelta(seconds=PEER_TIMEOUT_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    dist.barrier()


def _all_reduce(part: Tensor) -> Tensor:
    part = part.contiguous()
    dist.all_reduce(part)
    return part


def _broadcast_object(message: Any = None) -> Any:
    """Rank 0's message, everywhere."""
    is_first = dist.get_rank() == 0
    body = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8) if is_first else torch.empty(0)
    size = torch.tensor([len(body)])
    dist.broadcast(size, src=0)
    if not is_first:
        body = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(body, src=0)
    return message if is_first else pickle.loads(body.numpy().tobytes())


# --- in the other processes ---------------------------------------------------------------------------------


def main(text: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides when work ends
        signal.signal(number, signal.SIG_IGN)
    options = json.loads(text)
    rank, size = options["rank"], options["size"]
    torch.set_num_threads(options["threads"])
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore(HOST, options["port"], timeout=timedelta(seconds=START_TIMEOUT_S))
    loaded = model_weights.read(options["path"])
    _join(store, rank, size, device, options["backend"])
    precision: Precision = options["precision"] or ("bf16" if device.type == "cuda" else "f32")

    def network(num_ids: int) -> InferenceModel:
        return InferenceModel(
            loaded.spec, loaded.weights, num_ids, device, precision, ModelShard(rank, size, _all_reduce)
        )

    with contextlib.suppress(RuntimeError):  # rank 0 has gone: nothing is left to do
        obey(network)


def obey(make: Callable[[int], InferenceModel]) -> None:
    """Do what rank 0 does."""
    network: InferenceModel | None = None
    cache: PagedCache | None = None
    while True:
        kind, *rest = _broadcast_object()
        if kind == "end":
            return
        if kind == "begin":
            num_ids, num_blocks = rest
            network = make(num_ids)
            cache = PagedCache(
                network.spec, num_blocks, device=network.device, dtype=network.dtype, kv_heads=network.kv_heads
            )
        elif kind == "forward":
            assert network is not None
            assert cache is not None
            network.forward(rest[0], cache)
        elif kind == "copy":
            assert cache is not None
            cache.copy_block(*rest)
