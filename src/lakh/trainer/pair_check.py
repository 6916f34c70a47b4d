"""All-reduce between every pair of ranks, with checked sums and measured bandwidth. For the time between jobs."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from lakh.health.pairs import PairResult, pair_rounds
from lakh.trainer.launch.world import World

__all__ = ["check_pairs"]

REPEATS = 3


def check_pairs(world: World, megabytes: float) -> list[PairResult]:
    """The results of all pairs, on every rank. A collective."""
    count = max(1, int(megabytes * 2**20 / 4))
    device = world.device if world.backend == "nccl" else torch.device("cpu")
    # Whole numbers below 2^24: their sums are exact in float32.
    mine = (torch.arange(count, dtype=torch.float32, device=device) % 4093) + world.rank
    found = []
    for pairs in pair_rounds(world.size):
        partner = {rank: other for a, b in pairs for rank, other in ((a, b), (b, a))}.get(world.rank)
        if partner is not None:
            seconds, is_right = _reduce_with(partner, mine)
            if world.rank < partner:
                moved = 2 * mine.nbytes  # each direction once
                found.append(PairResult(world.rank, partner, moved / seconds / 1e9, is_right))
        dist.barrier()
    gathered = world.broadcast(world.gather(found))
    return sorted((result for part in gathered for result in part), key=lambda result: (result.first, result.second))


def _reduce_with(partner: int, mine: Tensor) -> tuple[float, bool]:
    """(seconds of the fastest all-reduce with a partner, whether its sums were right)."""
    theirs, is_right, best_s = torch.empty_like(mine), True, float("inf")
    expected = 2 * mine + (partner - dist.get_rank())
    for _ in range(REPEATS):
        theirs.zero_()
        began_s = time.perf_counter()
        operations = [dist.P2POp(dist.isend, mine, partner), dist.P2POp(dist.irecv, theirs, partner)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        total = mine + theirs
        if total.is_cuda:
            torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - began_s)
        is_right &= bool(torch.equal(total, expected))
    return best_s, is_right
