"""AdamW on the local parts of sharded tensors has the bits of torch's."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lakh.spec import Model, Optimizer
from lakh.trainer.optim.optimizer import build_optimizer, named_state
from lakh.trainer.optim.sharded_adamw import ShardedAdamW
from lakh.workloads.code.model import CodeModel, init_weights


@pytest.fixture
def meshes(tmp_path: Path) -> Iterator[list[DeviceMesh]]:
    """Two meshes of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield [init_device_mesh("cpu", (1,), mesh_dim_names=(name,)) for name in ("shards", "experts")]
    dist.destroy_process_group()


def model_of(meshes: list[DeviceMesh] | None) -> nn.Module:
    """Parameters of both meshes, and one of which this rank holds nothing."""
    model = CodeModel(Model(layers=1, width=8, heads=2, kv_heads=1, ffn=8, vocab=16, context=8))
    init_weights(model, 1)
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 4)))
    for owner in list(model.modules()) if meshes else ():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            mesh = meshes[parameter.dim() % 2]  # type: ignore[index]
            setattr(owner, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    return model


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        grad = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):  # autograd may leave a gradient under another placement
            grad = distribute_tensor(grad, parameter.device_mesh, [Replicate() if step == 2 else Shard(0)])
        parameter.grad = grad


def test_its_bits_are_those_of_torch(meshes: list[DeviceMesh]) -> None:
    settings = Optimizer(lr=0.01, weight_decay=0.1)
    plain, sharded = model_of(None), model_of(meshes)
    expected, optimizer = build_optimizer(plain, settings), build_optimizer(sharded, settings)
    assert not isinstance(expected, ShardedAdamW)
    assert isinstance(optimizer, ShardedAdamW)
    for step in range(5):
        for model, one in ((plain, expected), (sharded, optimizer)):
            set_gradients(model, step)
            one.found_inf = torch.tensor(float(step == 3))  # type: ignore[attr-defined]
            one.step()
    found = named_state(sharded, optimizer)
    for name, tensor in named_state(plain, expected).items():
        local = found[name].to_local() if isinstance(found[name], DTensor) else found[name]
        assert torch.equal(local, tensor), name
    assert float(found["optim.norm.weight.step"]) == 4.0  # one of five was not finite


def test_a_parameter_without_a_gradient_stays(meshes: list[DeviceMesh]) -> None:
    model = model_of(meshes)
    optimizer = build_optimizer(model, Optimizer(lr=0.01))
    set_gradients(model, 0)
    weight = model.get_parameter("norm.weight")
    before, weight.grad = weight.detach().clone(), None
    optimizer.step()
    assert torch.equal(weight.to_local(), before.to_local())  # type: ignore[operator]
    assert float(optimizer.state[weight]["step"]) == 0.0
