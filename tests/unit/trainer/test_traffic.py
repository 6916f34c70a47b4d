"""The bytes of a step are counted equally for compiled and uncompiled blocks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lakh.spec import Model
from lakh.spec.cluster import load_cluster
from lakh.trainer.observability.traffic import TrafficCounter
from lakh.workloads.code.model import CodeModel, init_weights
from lakh.workloads.code.ops import ModelOps
from lakh.workloads.code.parallelism.context import context_parallel_ops
from lakh.workloads.code.parallelism.tensor import shard_weights, tensor_parallel_ops

SPEC = Model(layers=1, width=32, heads=4, kv_heads=2, ffn=64, vocab=64, context=32, tied=False)


@pytest.fixture
def two_ranks():
    """A group of two of which this process is one; the other one is imagined, and what it sends is nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def sent_bytes(mesh, cut: str, *, compiled: bool) -> dict[tuple[str, str], int]:
    model = CodeModel(SPEC)
    init_weights(model, 1)
    if cut == "tp":
        shard_weights(model, mesh)
        model.set_ops(tensor_parallel_ops(ModelOps(), mesh))
    else:
        model.set_ops(context_parallel_ops(ModelOps(), mesh.get_group()))
    if compiled:
        torch.compiler.reset()
        for block in model.each_block():
            block.compile(dynamic=False, backend="aot_eager", fullgraph=True)  # the graph of any compiler, none made
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    with TrafficCounter(load_cluster("laptop")) as traffic:
        model(tokens, targets_BT=tokens).backward()
    return dict(traffic.sent_bytes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cut", "gathered"),
    [
        # Half of 32 x 32 float32 values: before two pairs of matrices and the head, and back for what left the
        # embedding and two pairs.
        ("tp", 6 * 32 * 32 * 4 // 2),
        # Half of the keys and values, 32 x 2 x 16, once.
        ("cp", 32 * 2 * 16 * 4 // 2),
    ],
)
def test_collectives_inside_compiled_blocks_count(cut: str, gathered: int, two_ranks) -> None:
    plain, compiled = (sent_bytes(two_ranks, cut, compiled=compiled) for compiled in (False, True))
    assert plain == compiled
    assert plain["node", "allgather"] == gathered
