"""Faster kernels and activation checkpointing do not change what the model computes, and choices carry a reason."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lakh.errors import UserError
from lakh.spec import Model, Training
from lakh.workloads.code.acceleration import choose_compile, choose_ops
from lakh.workloads.code.attention import Documents, choose_kernel, document_ids, sdpa_attention
from lakh.workloads.code.model import CodeModel, init_weights
from lakh.workloads.code.parallelism.context import zigzag_chunks

SPEC = Model(layers=2, width=32, heads=4, kv_heads=2, ffn=48, vocab=64, context=32)


def loss_and_gradient(*, kernels: bool = True, **settings: Any) -> tuple[float, torch.Tensor]:
    model = CodeModel(SPEC)
    init_weights(model, 1)
    names = [name for name, _ in model.named_parameters()]
    ops, mode, _ = choose_ops(SPEC, Training(**settings), kernels=kernels, bf16=False, device="cpu")
    model.set_ops(ops)
    model.compile_model(mode)
    assert [name for name, _ in model.named_parameters()] == names  # checkpoints keep fitting
    tokens = torch.randint(0, 64, (2, 33), generator=torch.Generator().manual_seed(0))
    loss = model(tokens[:, :-1], targets_BT=tokens[:, 1:])
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("recomputation", ["selective", "full"])
def test_recomputation_changes_nothing_but_memory(recomputation: str) -> None:
    loss, grad = loss_and_gradient(kernels=False)  # recomputation turns the CPU kernels off
    again, grad_again = loss_and_gradient(recompute=recomputation)
    assert again == loss
    assert torch.equal(grad_again, grad)
    default, default_grad = loss_and_gradient()
    assert default == pytest.approx(loss, abs=1e-6)
    assert torch.allclose(default_grad, grad, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("recomputation", ["none", "budget"])
def test_compiled_blocks_are_equal_to_plain_ones(recomputation: str) -> None:
    loss, grad = loss_and_gradient()
    fast, fast_grad = loss_and_gradient(compile="block", recompute=recomputation)
    torch._functorch.config.activation_memory_budget = 1.0
    assert fast == pytest.approx(loss, abs=1e-6)
    assert torch.allclose(fast_grad, grad, atol=1e-6)


def test_a_budget_needs_a_compiler() -> None:
    with pytest.raises(UserError, match=r"set train\.compile=block"):
        choose_ops(SPEC, Training(recompute="budget"), bf16=False, device="cpu")


def test_choices_have_reasons_and_invalid_ones_are_rejected() -> None:
    assert choose_kernel("auto", device="cuda", bf16=True, head_dim=128)[1] == "cudnn"
    assert choose_kernel("auto", device="cpu", bf16=False, head_dim=64) == (
        sdpa_attention,
        "torch",
        "the fused kernels need a GPU",
    )
    with pytest.raises(UserError, match="cudnn does not run on cpu; choose auto or torch"):
        choose_kernel("cudnn", device="cpu", bf16=True, head_dim=64)
    with pytest.raises(UserError, match="8-bit floats"):
        choose_ops(SPEC, Training(fp8=True), bf16=False, device="cpu")
    assert choose_compile("auto", device="cuda")[0] == "block"
    assert choose_compile("auto", device="cpu")[0] == "none"


@settings(max_examples=25)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_packed_documents_equal_separate_sequences(lengths: list[int]) -> None:
    model = CodeModel(SPEC)
    init_weights(model, 1)
    total = sum(lengths)
    tokens = torch.randint(0, 64, (1, total), generator=torch.Generator().manual_seed(total))
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = Documents.padded(starts, max(lengths), total)
    assert document_ids(documents, 1, total).flatten().unique(return_counts=True)[1].tolist() == lengths
    packed = model(tokens, positions, documents=documents)
    alone = torch.cat([model(part) for part in tokens.split(lengths, dim=1)], dim=1)
    assert torch.allclose(packed, alone, atol=1e-5)


@given(ranks=st.integers(1, 6), size=st.integers(1, 5))
def test_zigzag_chunks_cover_the_sequence_at_equal_cost(ranks: int, size: int) -> None:
    sequence = torch.arange(2 * ranks * size)[None]
    chunks = [zigzag_chunks(sequence, rank, ranks) for rank in range(ranks)]
    assert sorted(torch.cat(chunks, dim=1).flatten().tolist()) == sequence.flatten().tolist()
    assert len({int((chunk + 1).sum()) for chunk in chunks}) == 1  # keys that each rank attends to
