"""The exchange of sharded tables with tensors of a GPU over NCCL, in a world of one rank: NCCL refuses two on one GPU.

Every type of the network travels, and is the same as on the CPU.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lakh.spec.embedding import CommDtype
from lakh.workloads.dlrm.sharding.codec import decode, encode, row_bytes
from lakh.workloads.dlrm.sharding.network import CountedGroup, SentBytes

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]
WIDTHS = np.array([8, 16, 4])


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountedGroup]:
    store = Path(tmp_path_factory.mktemp("nccl")) / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield CountedGroup([0], 0, 1, SentBytes())
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "int8"])
def test_coded_rows_travel_as_on_the_cpu(dtype: CommDtype, group: CountedGroup) -> None:
    values_MC = torch.randn(64, int(WIDTHS.sum()), generator=torch.Generator().manual_seed(1))
    size = len(values_MC) * row_bytes(dtype, WIDTHS)
    coded = encode(dtype, values_MC.cuda(), WIDTHS)
    sent = group.all_to_all("forward", coded.reshape(-1), [size], [size])
    gathered = group.all_gather("backward", coded)
    expected = decode(dtype, encode(dtype, values_MC, WIDTHS), WIDTHS)
    for found in (sent.view(len(values_MC), -1), gathered):
        assert found.is_cuda
        # int8: a value half-way between two levels may go to either, by the rounding of the division
        tolerance = 1.01 * float(values_MC.abs().max()) / 127 if dtype == "int8" else 0.0
        torch.testing.assert_close(decode(dtype, found, WIDTHS).cpu(), expected, rtol=0.0, atol=tolerance)
