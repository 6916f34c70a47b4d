"""On a GPU: CUDA tensors over c3, with several processes on one card. Skipped where there is none.

Ranks are this very file; each checks its own results and its exit code tells.
"""

import os
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(180),
]


def join(folder: str, rank: int, size: int):
    import torch.distributed as dist

    import lakh.c3.torch.backend  # noqa: F401 - makes the name known

    torch.cuda.set_device(0)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("c3", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    return dist


def both(call, *tensors: torch.Tensor) -> None:
    """The call has the same result on CPU tensors and on device copies of them."""
    on_gpu = [tensor.cuda() for tensor in tensors]
    call(*tensors)
    call(*on_gpu)
    for a, b in zip(tensors, on_gpu, strict=True):
        assert torch.equal(a, b.cpu()), (call, a.shape, a.dtype)


def collectives(folder: str, rank: int, size: int) -> None:
    """Every collective on CUDA tensors gives the same result as on the CPU."""
    dist = join(folder, rank, size)
    generator = torch.Generator().manual_seed(rank)
    for count in (1, 1000, 5_000_000):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            there = (torch.randn(count, generator=generator) * 100).to(dtype)

            both(dist.all_reduce, there.clone())
            both(lambda x: dist.all_reduce(x, dist.ReduceOp.MAX), there.clone())
            both(lambda x: dist.broadcast(x, 1), there.clone())
            both(lambda out, x: dist.all_gather_into_tensor(out, x), torch.empty(size * count, dtype=dtype), there)
            whole = there.repeat(size)
            both(lambda out, x: dist.reduce_scatter_tensor(out, x), torch.empty(count, dtype=dtype), whole)
            both(lambda out, x: dist.all_to_all_single(out, x), torch.empty_like(whole), whole)
            both(lambda *outs: dist.all_gather(list(outs), outs[0] * 0 + rank), *torch.zeros(size, count, dtype=dtype))
            if rank == 0:
                dist.send(torch.full((count,), 7, dtype=dtype, device="cuda"), 1)
            elif rank == 1:
                message = torch.empty(count, dtype=dtype, device="cuda")
                dist.recv(message, 0)
                assert bool((message == 7).all())
    strided = torch.arange(12.0, device="cuda").view(3, 4).t()
    dist.all_reduce(strided)
    assert torch.equal(strided.cpu(), torch.arange(12.0).view(3, 4).t() * size)
    dist.destroy_process_group()


def streams(folder: str, rank: int, size: int) -> None:
    """Work after wait() sees the result on any stream; starting a collective does not block the host."""
    dist = join(folder, rank, size)
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    slow = torch.randn(4096, 4096, device="cuda")
    for turn in range(5):
        data = torch.zeros(3_000_000, device="cuda")
        for _ in range(20):  # the input is made late on the device
            slow = torch.nn.functional.normalize(slow @ slow)
        data += turn + rank + slow[0, 0] * 0
        began = time.monotonic()
        if rank == 1:
            time.sleep(0.5)
        work = dist.all_reduce(data, async_op=True)
        assert rank == 1 or time.monotonic() - began < 0.3
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            work.wait()
            copy = data * 2
        side.synchronize()
        expected = 2.0 * sum(turn + r for r in range(size))
        assert bool((copy == expected).all()), (turn, copy[:3], expected)
    dist.destroy_process_group()


def training(folder: str, rank: int, size: int) -> None:
    """DDP and FSDP2 on CUDA over c3 train like one process with the whole batch."""
    dist = join(folder, rank, size)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def losses(wrap):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).cuda()
        wrapped = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        found = []
        for step in range(5):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).cuda()
            mine = x if wrap is alone else x.chunk(size)[rank]
            loss = wrapped(mine).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total = loss.detach().clone()
            if wrap is not alone:
                dist.all_reduce(total, dist.ReduceOp.AVG)
            found.append(float(total))
        return torch.tensor(found)

    def alone(model):
        return model

    expected = losses(alone)
    mesh = init_device_mesh("cuda", (size,))
    # Sums in another order: float32 differs in the last places.
    assert torch.allclose(losses(torch.nn.parallel.DistributedDataParallel), expected, rtol=1e-4)
    assert torch.allclose(losses(lambda model: fully_shard(model, mesh=mesh)), expected, rtol=1e-4)
    dist.destroy_process_group()


def encoded(folder: str, rank: int, size: int) -> None:
    """Encoded gradients: identical bits on all ranks, and the average within 4-bit precision."""
    dist = join(folder, rank, size)
    from torch.distributed.distributed_c10d import _get_default_group

    group = _get_default_group()
    data = torch.randn(1_000_001, generator=torch.Generator().manual_seed(rank)).cuda()
    exact = data.clone()
    dist.all_reduce(exact, dist.ReduceOp.AVG)
    residual = torch.zeros_like(data)
    group.allreduce_encoded(data, "int4", residual).wait()
    everyone = [torch.empty_like(data) for _ in range(size)]
    dist.all_gather(everyone, data)
    assert all(torch.equal(everyone[0], other) for other in everyone)
    error = float((data - exact).norm() / exact.norm())
    assert 0.01 < error < 0.15, error
    assert float(residual.abs().max()) > 0
    dist.destroy_process_group()


def killed(folder: str, rank: int, size: int) -> None:
    """A dead peer raises an exception, never hangs, and invalidates the result."""
    from lakh.errors import PeerError

    dist = join(folder, rank, size)
    data = torch.ones(2_000_000, device="cuda")
    dist.all_reduce(data)
    if rank == 1:
        os._exit(9)
    began = time.monotonic()

    def until_noticed() -> None:  # at the latest, the call after the failed one raises
        for _ in range(3):
            dist.all_reduce(data)
            torch.cuda.synchronize()

    with pytest.raises(PeerError, match="rank 1"):
        until_noticed()
    torch.cuda.synchronize()
    assert bool(data.isnan().all())
    assert time.monotonic() - began < 10


def run(case: str, tmp_path, size: int = 2, codes=None) -> str:
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, case, str(tmp_path), str(rank), str(size)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    outputs = []
    try:
        for rank, process in enumerate(ranks):
            out, _ = process.communicate(timeout=100)
            outputs.append(out)
            assert process.returncode == (codes or {}).get(rank, 0), out[-3000:]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return "".join(outputs)


@pytest.mark.parametrize("case", ["collectives", "streams", "training", "encoded"])
def test_cuda_tensors_over_c3(case: str, tmp_path) -> None:
    print(run(case, tmp_path))


def test_three_ranks_on_one_card(tmp_path) -> None:
    run("collectives", tmp_path, size=3)


def test_a_killed_peer_is_an_error_and_invalidates_the_result(tmp_path) -> None:
    run("killed", tmp_path, codes={1: 9})


@pytest.mark.parametrize("codec", ["int4", "int8"])
@pytest.mark.parametrize("count", [1, 31, 32, 33, 1000, 5_000_001])
def test_the_kernels_produce_the_bytes_of_the_native_codec(codec: str, count: int) -> None:
    from lakh.c3 import native
    from lakh.c3.torch import gpu_codec

    library, number = native.require_library(), native.CODECS[codec]
    generator = torch.Generator().manual_seed(count)
    spread = torch.exp2(torch.randint(-30, 30, (count,), generator=generator).float())
    wires, residual = [], torch.randn(count, generator=generator) * 0.1
    for values in (torch.randn(count, generator=generator), torch.randn(count, generator=generator) * spread):
        values[count // 3] = float("nan") if count == 33 else values[count // 3]
        if count >= 1000:  # whole groups at the edges of float32
            values[32:64], values[64], values[96:128] = 0.0, float("inf"), values[96:128] * 1e-38
            values[128:160], values[160:192], values[192] = values[128:160] * 1e-44, 3.4e38, -3.4028234e38
        kept = residual.cuda()
        wire = torch.zeros(library.lakh_c3_codec_bytes(number, count), dtype=torch.uint8)
        library.lakh_c3_encode(number, values.data_ptr(), count, 0, wire.data_ptr(), residual.data_ptr())
        made = gpu_codec.encode(codec, values.cuda(), kept)
        assert torch.equal(wire, made.cpu())
        assert torch.equal(residual.nan_to_num(), kept.cpu().nan_to_num())
        residual.nan_to_num_()
        wires.append(wire)
    total = torch.zeros(count)
    for place, wire in enumerate(wires):
        library.lakh_c3_decode(number, wire.data_ptr(), count, total.data_ptr(), int(place > 0))
    made = gpu_codec.decode_sum(codec, [wire.cuda() for wire in wires], count).cpu()
    assert torch.equal(total.nan_to_num(7.0), made.nan_to_num(7.0))


if __name__ == "__main__":
    import faulthandler

    faulthandler.dump_traceback_later(90, exit=True)
    case_, folder_, rank_, size_ = sys.argv[1:]
    globals()[case_](folder_, int(rank_), int(size_))
