"""What torch builds on a process group works on c3: the same values as Gloo, and c3 really called.

Ranks are this very file, forked once for each number of ranks and hosts (pretended: they talk over TCP); every
scenario runs in them, one after the other, and each is a test here. A scenario returns the names of c3 operations that
it must have used.
"""

import json
import os
import sys
import tempfile
import time
import traceback
import warnings

import pytest

TIMEOUT_S = 240


def scenario_collectives(dist, torch, c3, gloo):
    """Every plain collective, several types and ragged sizes, compared with Gloo."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def data(count, dtype, salt=0):
        generator = torch.Generator().manual_seed(1000 * rank + salt)
        return torch.randint(-9, 9, (count,), generator=generator).to(dtype)

    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8):
        for count in (0, 1, 7, 1000, 65_537, 600_001):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
                one = data(count, dtype).abs() if dtype == torch.uint8 else data(count, dtype)
                other = one.clone()
                dist.all_reduce(one, op, group=c3)
                dist.all_reduce(other, op, group=gloo)
                assert torch.equal(one, other), (dtype, count, op)
    averaged, summed = data(5000, torch.float32), data(5000, torch.float32)
    dist.all_reduce(averaged, dist.ReduceOp.AVG, group=c3)
    dist.all_reduce(summed, group=gloo)
    assert torch.equal(averaged, summed / size)
    for count in (1, 1000, 300_001):
        one, flat = data(count, torch.float32), torch.empty(count * size)
        dist.all_gather_into_tensor(flat, one, group=c3)
        pieces = [torch.empty(count) for _ in range(size)]
        dist.all_gather(pieces, one, group=gloo)
        assert torch.equal(flat, torch.cat(pieces))
        pieces = [torch.empty(count) for _ in range(size)]
        dist.all_gather(pieces, one, group=c3)
        assert torch.equal(flat, torch.cat(pieces))
        many, part = data(count * size, torch.float32), torch.empty(count)
        dist.reduce_scatter_tensor(part, many, group=c3)
        whole = many.clone()
        dist.all_reduce(whole, group=gloo)
        assert torch.equal(part, whole[rank * count : (rank + 1) * count])
        for root in (0, size - 1):
            here = data(count, torch.float32)
            there = here.clone()
            dist.broadcast(here, root, group=c3)
            dist.broadcast(there, root, group=gloo)
            assert torch.equal(here, there)
            here = data(count, torch.float32)
            there = here.clone()
            dist.reduce(here, root, group=c3)
            dist.reduce(there, root, group=gloo)
            assert rank != root or torch.equal(here, there)
            lists = [torch.empty(count) for _ in range(size)] if rank == root else None
            dist.gather(data(count, torch.float32), lists, root, group=c3)
            assert rank != root or torch.equal(torch.cat(lists), flat)
            out = torch.empty(count)
            parts = list(data(count * size, torch.float32).split(count)) if rank == root else None
            dist.scatter(out, parts, root, group=c3)
            generator = torch.Generator().manual_seed(1000 * root)
            sent = torch.randint(-9, 9, (count * size,), generator=generator).float()
            assert torch.equal(out, sent[rank * count : (rank + 1) * count])
    for rows in (1, 5, 70_000):  # uneven splits: rank r sends (r + 1) * rows to every rank
        given = data(rows * (rank + 1) * size, torch.float32)
        sends, receives = [rows * (rank + 1)] * size, [rows * (r + 1) for r in range(size)]
        here, there = torch.empty(sum(receives)), torch.empty(sum(receives))
        dist.all_to_all_single(here, given, receives, sends, group=c3)
        dist.all_to_all_single(there, given, receives, sends, group=gloo)
        assert torch.equal(here, there)
    inputs = [torch.full((rank + 1,), float(10 * rank + to)) for to in range(size)]
    outputs = [torch.empty(source + 1) for source in range(size)]
    dist.all_to_all(outputs, inputs, group=c3)
    assert [tensor[0].item() for tensor in outputs] == [10 * source + rank for source in range(size)]
    dist.barrier(group=c3)
    return [
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "all_to_all",
        "barrier",
    ]


def scenario_uneven_parts(dist, torch, c3, gloo):
    """Parts of any size, some of them empty, read from the peers' memory and through the slots in chunks."""
    import lakh.c3.group

    rank, size = dist.get_rank(), dist.get_world_size()
    before, lakh.c3.group.SINGLE_COPY_FROM_BYTES = lakh.c3.group.SINGLE_COPY_FROM_BYTES, -1
    try:
        through_slots = dist.new_group(backend="c3")
    finally:
        lakh.c3.group.SINGLE_COPY_FROM_BYTES = before
    generator = torch.Generator().manual_seed(7)
    for most in (3, 90_000, 700_000):
        for _ in range(3):
            splits = torch.randint(0, most, (size, size), generator=generator)
            splits[torch.rand(size, size, generator=generator) < 0.25] = 0
            sends, receives = splits[rank].tolist(), splits[:, rank].tolist()
            given = torch.arange(sum(sends), dtype=torch.int32) + (rank << 24)
            expected = torch.empty(sum(receives), dtype=torch.int32)
            dist.all_to_all_single(expected, given, receives, sends, group=gloo)
            for group in (c3, through_slots):
                found = torch.empty_like(expected)
                dist.all_to_all_single(found, given, receives, sends, group=group)
                assert torch.equal(found, expected), (most, splits)
    return ["all_to_all"]


def scenario_odd_tensors(dist, torch, c3, gloo):
    """Not contiguous, boolean, complex, half-registered, asynchronous."""
    from lakh.c3.torch.registered_memory import registered_empty, registered_like

    rank, size = dist.get_rank(), dist.get_world_size()
    matrix = torch.arange(12.0).view(3, 4) + rank
    dist.all_reduce(matrix.t(), group=c3)
    assert torch.equal(matrix, size * torch.arange(12.0).view(3, 4) + sum(range(size)))
    flags = torch.tensor([rank == 0, False])
    dist.all_reduce(flags, dist.ReduceOp.MAX, group=c3)
    assert flags.tolist() == [True, False]
    waves, everyone = torch.tensor([1j * rank]), torch.empty(size, dtype=torch.complex64)
    dist.all_gather_into_tensor(everyone, waves, group=c3)
    assert everyone.tolist() == [1j * r for r in range(size)]
    for count in (10, 100_000, 3_000_001):
        ordinary = torch.arange(count, dtype=torch.float32) + rank
        registered = registered_like(ordinary)
        half = registered_like(ordinary) if rank == 0 else ordinary.clone()
        works = [dist.all_reduce(tensor, group=c3, async_op=True) for tensor in (ordinary, registered, half)]
        for work in works:
            work.wait()
        assert torch.equal(ordinary, registered)
        assert torch.equal(ordinary, half)
        assert ordinary[0] == sum(range(size))
    del registered
    again = registered_empty(3_000_001)  # from the pool
    again.fill_(1)
    dist.all_reduce(again, group=c3)
    assert (again == size).all()
    works = []
    with dist._coalescing_manager(c3, async_ops=True) as together:
        for _ in range(3):
            works.append(torch.ones(10))
            dist.all_reduce(works[-1], group=c3)
    together.wait()
    assert all((one == size).all() for one in works)
    # polling instead of waiting also completes the result
    asked = torch.zeros(3, 1000).t()
    asked += rank
    work = dist.all_reduce(asked, group=c3, async_op=True)
    peer = (rank + 1) % size if rank % 2 == 0 else (rank - 1) % size
    got = torch.empty(10)
    messages = [dist.isend(torch.full((10,), float(rank)), peer, c3), dist.irecv(got, peer, c3)]
    patient_until_s = time.monotonic() + 60
    while not all(one.is_completed() for one in (work, *messages)):
        assert time.monotonic() < patient_until_s, "an operation in progress never completes"
        time.sleep(0.001)
    assert work.is_success()
    assert (asked == sum(range(size))).all()
    assert (got == peer).all()
    future = dist.all_reduce(torch.ones(100_000), group=c3, async_op=True).get_future()
    assert (future.wait()[0] == size).all()
    return ["all_reduce", "all_gather"]


def scenario_objects_and_messages(dist, torch, c3, gloo):
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * 1000 * rank}, group=c3)
    assert [one["rank"] for one in everyone] == list(range(size))
    box = [{"from": rank}]
    dist.broadcast_object_list(box, 0, group=c3)
    assert box == [{"from": 0}]
    right, left = (rank + 1) % size, (rank - 1) % size
    for count in (1, 1_000_000):
        got = torch.empty(count)
        sends = [
            dist.P2POp(dist.isend, torch.full((count,), float(rank)), right, c3),
            dist.P2POp(dist.irecv, got, left, c3),
        ]
        for work in dist.batch_isend_irecv(sends):
            work.wait()
        assert (got == left).all()
    # tags out of order
    if rank == 0:
        dist.send(torch.tensor([1.0]), 1, c3, tag=1)
        dist.send(torch.tensor([2.0]), 1, c3, tag=2)
    elif rank == 1:
        got = torch.empty(1)
        dist.recv(got, 0, c3, tag=2)
        assert got.item() == 2
        dist.recv(got, 0, c3, tag=1)
        assert got.item() == 1
    dist.barrier(group=c3)
    if rank == 0:
        seen = set()
        for _ in range(size - 1):
            got = torch.empty(1)
            source = dist.recv(got, None, c3, tag=9)
            assert got.item() == source
            seen.add(source)
        assert seen == set(range(1, size))
    else:
        dist.send(torch.tensor([float(rank)]), 0, c3, tag=9)
    return ["all_gather", "broadcast", "send", "recv"]


def _net(torch):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))


def _losses(torch, model, optimizer, rank, steps=3):
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        loss = model(torch.randn(16, 32, generator=generator)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def scenario_ddp(dist, torch, c3, gloo):
    from torch.nn.parallel import DistributedDataParallel

    found = []
    for group in (c3, gloo):
        model = DistributedDataParallel(_net(torch), process_group=group)
        found.append(_losses(torch, model, torch.optim.SGD(model.parameters(), 0.1), dist.get_rank()))
    # the orders of addition differ by rank count; two ranks add one pair
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    both = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(both, weights, group=c3)
    assert all(torch.equal(one, weights) for one in both)
    return ["all_reduce", "broadcast", "all_gather"]


def scenario_fsdp2_and_hsdp(dist, torch, c3, gloo):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    from lakh.c3.torch import registered_memory
    from lakh.c3.torch.fsdp import register_buffers

    size = dist.get_world_size()
    found = []
    for group, registered in ((c3, False), (gloo, False), (c3, True)):
        mesh = DeviceMesh.from_group(group, "cpu")
        model = _net(torch)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert not registered or register_buffers(model) == 1 + len(model)
        losses = _losses(torch, model, torch.optim.AdamW(model.parameters(), 1e-2), dist.get_rank())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) if losses else 0
        found.append((losses, float(norm.full_tensor()) if hasattr(norm, "full_tensor") else float(norm)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-6)
    assert found[2] == found[0]  # registered buffers change no bit
    whole = 4 * (32 * 64 + 64)  # bytes of the first layer, gathered
    assert registered_memory._pool.get(whole), f"FSDP2 did not take its buffers from {sorted(registered_memory._pool)}"
    if size == 4:
        mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = fully_shard(_net(torch), mesh=mesh)
        losses = _losses(torch, model, torch.optim.AdamW(model.parameters(), 1e-2), dist.get_rank())
        assert losses == pytest.approx(found[1][0], rel=1e-5)
        for name in ("replicate", "shard"):
            assert mesh.get_group(name).calls, f"the {name} group was never used"
        _encoded_replicas(dist, torch, mesh, losses)
    return ["all_gather", "reduce_scatter"]


def _encoded_replicas(dist, torch, mesh, plain_losses):
    """HSDP encodes gradients between replicas, but not inside a replica or in other sums."""
    from torch.distributed.fsdp import fully_shard

    from lakh.c3.torch.hsdp import encode_replicas
    from lakh.errors import UserError

    copies = mesh.get_group("replicate")
    for codec, feedback, near in (("int8", True, 2e-2), ("int4", True, 0.2), ("int4", False, 0.2)):
        model = fully_shard(_net(torch), mesh=mesh)
        before = copies.calls.get("encoded", 0)
        (unit,) = encode_replicas(model, copies, codec, feedback=feedback)
        losses = _losses(torch, model, torch.optim.AdamW(model.parameters(), 1e-2), dist.get_rank())
        assert losses == pytest.approx(plain_losses, rel=near)
        assert losses != plain_losses
        assert copies.calls["encoded"] - before == unit.sums == 3
        assert (unit.residual is not None and bool(unit.residual.any())) == feedback
        exact = torch.tensor([1 / 3 + dist.get_rank()])
        expected = exact.clone()
        dist.all_reduce(exact, group=copies)
        peers = dist.get_process_group_ranks(copies)
        assert float(exact) == pytest.approx(float(expected) * 2 + sum(peers) - 2 * dist.get_rank(), rel=1e-6)
        for parameter in model.parameters():
            mine, sums = parameter.to_local().detach().clone(), parameter.to_local().detach().clone()
            dist.all_reduce(sums, group=copies, op=dist.ReduceOp.MAX)
            assert torch.equal(mine, sums)  # the replicas have identical bits
    with pytest.raises(UserError, match="no FSDP2 units"):
        encode_replicas(_net(torch), copies)


def scenario_dtensor_and_functional(dist, torch, c3, gloo):
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = DeviceMesh.from_group(c3, "cpu")
    whole = torch.arange(64.0).view(8, 8)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(sharded.redistribute(placements=[Replicate()]).to_local(), whole)
    assert torch.equal(sharded.redistribute(placements=[Shard(1)]).full_tensor(), whole)
    product = sharded @ distribute_tensor(whole, mesh, [Replicate()])
    assert torch.equal(product.full_tensor(), whole @ whole)
    ones = torch.ones(size * 2)
    assert functional.all_reduce(ones, "sum", c3).tolist() == [size] * (2 * size)
    assert functional.all_gather_tensor(torch.tensor([float(rank)]), 0, c3).tolist() == list(map(float, range(size)))
    assert functional.reduce_scatter_tensor(ones, "sum", 0, c3).tolist() == [size] * 2
    turned = functional.all_to_all_single(torch.full((size,), float(rank)), None, None, c3)
    assert turned.tolist() == list(map(float, range(size)))
    return ["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "scatter"]


def scenario_compile(dist, torch, c3, gloo):
    import torch.distributed._functional_collectives as functional

    def step(x):
        return functional.all_reduce(x * 2, "sum", c3) + 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert compiled(torch.ones(8)).tolist() == [2 * dist.get_world_size() + 1] * 8
    return ["all_reduce"]


def scenario_dcp(dist, torch, c3, gloo):
    import torch.distributed.checkpoint as dcp

    box = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(box, 0, group=c3)
    state = {"w": torch.arange(10.0), "step": torch.tensor(3)}
    dcp.save(state, checkpoint_id=box[0], process_group=c3)
    loaded = {"w": torch.zeros(10), "step": torch.tensor(0)}
    dcp.load(loaded, checkpoint_id=box[0], process_group=c3)
    assert torch.equal(loaded["w"], state["w"])
    assert loaded["step"] == 3
    return ["gather", "scatter"]


def scenario_mistakes_reach_every_rank(dist, torch, c3, gloo):
    """If ranks disagree, all get an error with each rank's call; on one host the group stays usable."""
    from lakh.errors import UserError

    rank, size = dist.get_rank(), dist.get_world_size()
    if not c3.group.on_one_host:
        with pytest.raises(UserError, match=r"disagree.*11 f32"):
            dist.all_reduce(torch.ones(10 + (rank == 0)), group=c3)
        return ["all_reduce"]

    def refused(call, *words):
        with pytest.raises(UserError) as refusal:
            call()
        for word in words:
            assert word in str(refusal.value)
        check = torch.ones(3)
        dist.all_reduce(check, group=c3)
        assert check.tolist() == [size] * 3

    for count in (10, 1_000_000):
        refused(lambda n=count: dist.all_reduce(torch.ones(n + (rank == 0)), group=c3), "rank(s) 0", f"{count + 1} f32")
    kinds = [torch.float32, torch.float64]
    refused(lambda: dist.all_reduce(torch.ones(4, dtype=kinds[rank == 0]), group=c3), "f64", "f32")
    refused(
        lambda: dist.barrier(group=c3) if rank == 0 else dist.all_reduce(torch.ones(4), group=c3),
        "barrier",
        "all_reduce",
    )
    refused(lambda: dist.all_reduce(torch.ones(4, dtype=torch.int64), dist.ReduceOp.AVG, group=c3), "operator")
    refused(lambda: dist.all_reduce(torch.ones(4, dtype=torch.int32), dist.ReduceOp.BXOR, group=c3), "operator")
    sends = [2] * size
    receives = [2] * size
    if rank == 0:
        receives = [3] + [2] * (size - 1)
    refused(
        lambda: dist.all_to_all_single(torch.empty(sum(receives)), torch.ones(2 * size), receives, sends, group=c3),
        "all_to_all",
    )
    work = dist.all_reduce(torch.ones(5 + (rank == 0)), group=c3, async_op=True)
    refused(work.wait, "rank(s) 0")
    failing = dist.all_reduce(torch.ones(5 + (rank == 0)), group=c3, async_op=True).get_future()
    with pytest.raises(RuntimeError, match="disagree"):
        failing.wait()
    return ["all_reduce"]


SCENARIOS = {name.removeprefix("scenario_"): value for name, value in globals().items() if name.startswith("scenario_")}


def rank_main(rank: int, size: int, rendezvous: str) -> None:
    warnings.filterwarnings("ignore")
    import torch
    import torch.distributed as dist

    import lakh.c3.torch.backend

    torch.set_num_threads(1)
    dist.init_process_group("c3", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    assert dist.get_backend() == lakh.c3.torch.backend.BACKEND
    gloo = dist.new_group(backend="gloo")
    results = {}
    for name, scenario in SCENARIOS.items():
        c3 = dist.new_group(backend="c3")
        try:
            needed = scenario(dist, torch, c3, gloo)
            unused = [operation for operation in needed if not c3.calls.get(operation)]
            results[name] = f"c3 was not called for {unused}" if unused else "ok"
        except BaseException:  # noqa: BLE001 - the report carries it to the test
            results[name] = traceback.format_exc()
            print(json.dumps(results), flush=True)
            os._exit(1)  # the other ranks now get PeerLost, never a hang
    print(json.dumps(results), flush=True)
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[(2, 1), (4, 1), (2, 2)], ids=["2 ranks", "4 ranks", "2 ranks on 2 hosts"])
def reports(request, forks, tmp_path_factory):
    size, hosts = request.param
    rendezvous = str(tmp_path_factory.mktemp("c3") / "meet")
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        forks.start(
            "tests.multiproc.test_c3_torch",
            *(str(rank), str(size), rendezvous),
            **environment | ({"LAKH_C3_HOST": f"host-{rank % hosts}"} if hosts > 1 else {}),
        )
        for rank in range(size)
    ]
    found = []
    try:
        for rank in ranks:
            done = rank.finish(TIMEOUT_S)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            found.append(json.loads(lines[-1]) if lines else {"start": done.stderr[-3000:]})
    finally:
        for rank in ranks:
            rank.end()
    return found


@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_torch_on_c3(reports, scenario) -> None:
    for rank, report in enumerate(reports):
        assert report.get(scenario) == "ok", f"rank {rank}: {report.get(scenario, report)}"


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
