"""Copies of the training state in memory, every checkpoint.memory_every steps: on this node, and on another one.

Each rank copies its tensors to host memory, which is all that training waits for. A thread writes the copy to the
node's memory (checkpoint/memory_copies.py) and sends it to a rank of the next node, in ranks of its own process group.
After a restart, ranks whose node is still there read their own copy, and the ranks of a lost node receive theirs from
the node that kept it. No storage is touched.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lakh import checkpoint, storage
from lakh.checkpoint.memory_copies import CopyFacts, MemoryFolder, choose_copies, read_facts
from lakh.errors import CorruptCheckpoint, LakhError, PeerLost
from lakh.trainer.launch.world import World

__all__ = ["PeerMemory", "memory_folder"]

SHARED_MEMORY = "/dev/shm"
COPY_TIMEOUT_S = 600.0  # for one copy to another node


def memory_folder(run_id: str) -> MemoryFolder:
    """Where this node keeps the copies of a run: on tmpfs, or below $LAKH_MEMORY_DIR."""
    base = os.environ.get("LAKH_MEMORY_DIR") or SHARED_MEMORY
    name = hashlib.sha256(run_id.encode()).hexdigest()[:16]
    return MemoryFolder(Path(base) / f"lakh-{os.getuid()}-{name}")


class PeerMemory:
    """This rank's copies, and those that it keeps for a rank of another node."""

    def __init__(self, folder: MemoryFolder, world: World) -> None:
        """A collective."""
        self._folder, self._world = folder, world
        self._copies = checkpoint.HostCopies()
        self._thread: threading.Thread | None = None
        self._failure: LakhError | None = None
        self._group = None
        if self.has_partner:  # apart from the training's own collectives, which run at the same time
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=COPY_TIMEOUT_S))

    @property
    def has_partner(self) -> bool:
        return self._world.size > self._world.local_size

    def begin(self, facts: CopyFacts, tensors: Mapping[str, Tensor]) -> int:
        """Copy the tensors; the rest happens behind the next steps. Waits for the copy before. Returns the bytes.

        Raises the error of the copy before.
        """
        self.finish()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        taken = self._copies.take(tensors)
        self._thread = threading.Thread(target=self._keep, args=(facts, taken), name="lakh-memory-copy", daemon=True)
        self._thread.start()
        return sum(tensor.nbytes for tensor in taken.values())

    def finish(self) -> None:
        """Wait for the copy in progress."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(COPY_TIMEOUT_S)

    def _keep(self, facts: CopyFacts, tensors: Mapping[str, Tensor]) -> None:
        try:
            self._folder.write(facts, tensors)
            if self.has_partner:
                size, step = self._world.size, self._world.local_size
                self._exchange(facts, to=(self._world.rank + step) % size, source=(self._world.rank - step) % size)
        except LakhError as error:
            self._failure = error
        except RuntimeError as error:  # of torch.distributed: the training's own collectives fail too, and say why
            self._failure = PeerLost(str(self._folder.path), f"a peer was lost ({error})", "the next copy tries again")

    def _exchange(self, facts: CopyFacts, *, to: int, source: int) -> None:
        """Send this rank's copy and receive that of `source`."""
        document = torch.frombuffer(bytearray(self._folder.document(facts)), dtype=torch.uint8)
        file = self._folder.tensor_file(facts)
        sizes = torch.tensor([document.numel(), file.stat().st_size])
        their_sizes = torch.empty_like(sizes)
        self._swap(sizes, to, their_sizes, source)
        theirs = torch.empty(int(their_sizes[0]), dtype=torch.uint8)
        self._swap(document, to, theirs, source)
        their_facts = read_facts(bytes(theirs.numpy()))
        kept, no_space = _new_file(self._folder.tensor_file(their_facts), int(their_sizes[1]))
        self._swap(_mapped(file), to, kept, source)
        if no_space is not None:
            raise no_space
        self._folder.commit(their_facts, bytes(theirs.numpy()))

    def _swap(self, mine: Tensor, to: int, theirs: Tensor, source: int) -> None:
        sent = dist.isend(mine, to, group=self._group)
        dist.recv(theirs, source, group=self._group)
        if sent is not None:
            sent.wait()

    def restore(
        self, wanted: CopyFacts, after_step: int, into: Mapping[str, Tensor]
    ) -> tuple[CopyFacts, list[int]] | None:
        """Fill the tensors from the newest complete copy after `after_step`. A collective.

        `wanted`: only copies with its world, mesh, run and data count. Returns the facts of the copy and the ranks that
        received theirs from another node; None if there is no such copy or if one is damaged.
        """
        held = [facts for facts in self._folder.list_copies() if _same_run(facts, wanted)]
        holdings = self._world.broadcast(self._world.gather([(facts.step, facts.rank) for facts in held]))
        chosen = choose_copies(holdings, self._world.size)
        if chosen is None or chosen[0] <= after_step:
            return None
        step, holders = chosen
        here = {(facts.step, facts.rank): facts for facts in held}
        received = [rank for rank, holder in enumerate(holders) if holder != rank]
        for rank in received:
            if holders[rank] == self._world.rank:
                self._send(here[step, rank], rank)
            if rank == self._world.rank:
                here[step, rank] = self._receive(holders[rank])
        facts = here[step, self._world.rank]
        tensors = self._read(facts, into)
        if self._world.sum(float(tensors is None))[0] or tensors is None:
            return None
        with torch.no_grad():
            for name, tensor in into.items():
                tensor.copy_(tensors[name])
        return facts, received

    def _read(self, facts: CopyFacts, into: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """The tensors of a copy; None if it is damaged or does not fit."""
        try:
            tensors = self._folder.read(facts)
        except (LakhError, OSError, ValueError):
            return None
        fits = {name: t.shape for name, t in tensors.items()} == {name: t.shape for name, t in into.items()}
        return tensors if fits else None

    def _send(self, facts: CopyFacts, rank: int) -> None:
        document = torch.frombuffer(bytearray(self._folder.document(facts)), dtype=torch.uint8)
        file = self._folder.tensor_file(facts)
        dist.send(torch.tensor([document.numel(), file.stat().st_size]), rank, group=self._group)
        dist.send(document, rank, group=self._group)
        dist.send(_mapped(file), rank, group=self._group)

    def _receive(self, rank: int) -> CopyFacts:
        sizes = torch.empty(2, dtype=torch.int64)
        dist.recv(sizes, rank, group=self._group)
        document = torch.empty(int(sizes[0]), dtype=torch.uint8)
        dist.recv(document, rank, group=self._group)
        facts = read_facts(bytes(document.numpy()))
        kept, no_space = _new_file(self._folder.tensor_file(facts), int(sizes[1]))
        dist.recv(kept, rank, group=self._group)
        if no_space is not None:
            raise no_space
        self._folder.commit(facts, bytes(document.numpy()))
        return facts


def _same_run(facts: CopyFacts, wanted: CopyFacts) -> bool:
    fixed = {name: getattr(wanted, name) for name in ("world", "mesh", "run_id", "run_sha256", "data_sha256")}
    return dataclasses.replace(facts, **fixed) == facts


def _mapped(file: Path) -> Tensor:
    """The bytes of a file in memory."""
    return torch.from_file(str(file), shared=True, size=file.stat().st_size, dtype=torch.uint8)


def _new_file(file: Path, size_bytes: int) -> tuple[Tensor, LakhError | None]:
    """The bytes of a new file to receive into. Where there is no space, other memory and the error: the sender must not
    wait for us."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as opened:
            os.posix_fallocate(opened.fileno(), 0, size_bytes)  # writing to a mapping without space is a SIGBUS
    except OSError as error:
        file.unlink(missing_ok=True)
        found = storage.explain(error, file) or CorruptCheckpoint(str(file), f"cannot be written ({error})", "check it")
        return torch.empty(size_bytes, dtype=torch.uint8), found
    return _mapped(file), None
