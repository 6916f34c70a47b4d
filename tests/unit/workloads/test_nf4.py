"""A frozen base in 4 bits: its numbers, and training on it with adapters."""

from __future__ import annotations

import pytest
import torch

from lakh.errors import ConfigError, InfeasiblePlan, UserError
from lakh.spec import Adapter, Data, Mesh, Model, Run, Training
from lakh.spec.parallel_check import check_parallelism
from lakh.trainer.optim.optimizer import build_optimizer
from lakh.trainer.step import update
from lakh.workloads.code.adapters import add_adapters
from lakh.workloads.code.batch import Batch
from lakh.workloads.code.kernels import nf4
from lakh.workloads.code.model import CodeModel, init_weights
from lakh.workloads.code.parallel import ParallelGroups, parallelise

SPEC = Model(layers=2, width=64, heads=4, kv_heads=2, ffn=128, vocab=96, context=32)


def run_of(bits: int) -> Run:
    return Run(
        name="tune",
        model=SPEC,
        init_from="built below",
        data=Data(sequence=32, batch=4, micro_batch=2),
        train=Training(device="cpu"),
        adapter=Adapter(rank=4, base_bits=bits),
    )


def build(bits: int, *, quantized: bool = False) -> CodeModel:
    """`quantized`: with weights that 4 bits hold exactly."""
    model = CodeModel(SPEC)
    init_weights(model, 1)
    if quantized:
        with torch.no_grad():
            for block in model.each_block():
                for _, module in block.matrices():
                    module.weight.copy_(nf4.dequantize(*nf4.quantize(module.weight), torch.float32))
    add_adapters(model, run_of(bits).adapter, 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(2))
    return model


def parallel(bits: int, *, quantized: bool = False) -> CodeModel:
    run, device = run_of(bits), torch.device("cpu")
    made = parallelise(
        run, Mesh(), ParallelGroups(), lambda: build(bits, quantized=quantized), bf16=False, device=device
    )
    assert isinstance(made, CodeModel)
    return made


def test_numbers_are_the_nearest_levels_of_their_group() -> None:
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    packed, scales = nf4.quantize(weight)
    assert (packed.dtype, packed.shape, scales.shape) == (torch.uint8, (8, 64), (8, 2))
    found = nf4.dequantize(packed, scales, torch.float32)
    levels, factors = torch.tensor(nf4.LEVELS), scales.float().repeat_interleave(nf4.GROUP, dim=1)
    nearest = (weight[..., None] - levels * factors[..., None]).abs().amin(-1)
    assert torch.allclose((weight - found).abs(), nearest, atol=1e-6)
    again = nf4.dequantize(*nf4.quantize(found), torch.float32)
    assert torch.equal(again, found)
    assert torch.equal(nf4.dequantize(*nf4.quantize(torch.zeros(1, 64)), torch.float32), torch.zeros(1, 64))


def test_training_on_4_bits_equals_training_on_their_values() -> None:
    tokens = torch.randint(0, SPEC.vocab, (4, 33), generator=torch.Generator().manual_seed(1))
    batch, losses = Batch(tokens[:, :-1], tokens[:, 1:]), []
    for bits in (16, 4):
        model = parallel(bits, quantized=True)
        optimizer = build_optimizer(model, run_of(bits).optim)
        losses.append([float(update(model, optimizer, [batch], lr=1e-2).loss) for _ in range(4)])
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_the_base_takes_an_eighth_of_its_memory() -> None:
    def frozen_bytes(model: CodeModel) -> int:
        held = [p for p in model.parameters() if not p.requires_grad and p.dim() != 1]
        held += [t for block in model.each_block() for t in (*block._frozen.values(), *block._scales.values())]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held if t.numel()}
        return sum(storages.values()) - model.embed.weight.nbytes  # type: ignore[union-attr]

    assert frozen_bytes(parallel(4)) * 32 == frozen_bytes(parallel(16)) * 4.25


def test_what_4_bits_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"base_bits.*neither 4 nor 16"):
        Adapter(rank=4, base_bits=8)
    with pytest.raises(InfeasiblePlan, match=r"base_bits.*2 ranks"):
        check_parallelism(run_of(4), 2)
    model = CodeModel(Model(layers=1, width=48, heads=4, kv_heads=2, ffn=128, vocab=96, context=32))
    with pytest.raises(UserError, match="48 columns, not a multiple of 64"):
        add_adapters(model, Adapter(rank=4, base_bits=4), 1)
