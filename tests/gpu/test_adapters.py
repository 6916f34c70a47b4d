"""Low-rank adapters on the GPU: compiled blocks over a frozen bf16 base train as float32 on the CPU does."""

import pytest
import torch

from lakh.spec import Adapter, Data, Mesh, Model, Run, Training
from lakh.trainer.optim.optimizer import build_optimizer
from lakh.trainer.step import update
from lakh.workloads.code.adapters import add_adapters
from lakh.workloads.code.batch import Batch
from lakh.workloads.code.model import CodeModel, init_weights
from lakh.workloads.code.parallel import ParallelGroups, parallelise

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"), pytest.mark.timeout(300)]

SPEC = Model(layers=2, width=256, heads=4, kv_heads=2, ffn=384, vocab=512, context=128)


def losses(device: str) -> list[float]:
    run = Run(
        name="a",
        model=SPEC,
        init_from="built below",
        data=Data(sequence=128, batch=4, micro_batch=4),
        train=Training(device=device),  # type: ignore[arg-type]
        adapter=Adapter(rank=8),
    )

    def build() -> CodeModel:
        model = CodeModel(SPEC)
        init_weights(model, 1)
        add_adapters(model, run.adapter, 1)
        return model

    on = torch.device(device)
    model = parallelise(run, Mesh(), ParallelGroups(), build, bf16=device == "cuda", device=on)
    frozen = {p.dtype for p in model.parameters() if not p.requires_grad and p.dim() == 2}
    assert frozen == {torch.bfloat16 if device == "cuda" else torch.float32}
    optimizer = build_optimizer(model, run.optim)
    tokens = torch.randint(0, SPEC.vocab, (4, 129), generator=torch.Generator().manual_seed(1)).to(on)
    batch = Batch(tokens[:, :-1], tokens[:, 1:])
    return [float(update(model, optimizer, [batch], lr=3e-3).loss) for _ in range(12)]


def test_losses_on_the_gpu_are_those_of_the_cpu() -> None:
    expected, found = losses("cpu"), losses("cuda")
    assert expected[-1] < expected[0] - 0.1  # the adapters learn
    assert found == pytest.approx(expected, abs=0.03)  # bf16 products
