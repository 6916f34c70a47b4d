"""Faster kernels and activation checkpointing do not change what the model computes, and choices carry a reason."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lakh.errors import ConfigError, UserError
from lakh.spec import Data, Model, Run, Training
from lakh.workloads.code.acceleration import choose_compile, choose_ops
from lakh.workloads.code.attention import Documents, choose_kernel, document_ids, sdpa_attention
from lakh.workloads.code.kernels.eight_bit.blockwise import blockwise_linear
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
    with pytest.raises(UserError, match=r"compute capability 8\.9"):
        choose_ops(SPEC, Training(fp8=True), bf16=False, device="cpu")
    none_left = Training(fp8=True, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1)
    with pytest.raises(UserError, match=r"1 first and 1 last layers in bf16 leave none of 2 for fp8; choose fewer"):
        choose_ops(SPEC, none_left, bf16=True, device="cpu")
    assert choose_compile("auto", device="cuda")[0] == "block"
    assert choose_compile("auto", device="cpu")[0] == "none"


@pytest.mark.parametrize(
    ("recipe", "capability", "bf16", "message"),
    [
        ("tensorwise", (8, 0), True, "tensorwise needs a GPU of compute capability 8.9"),
        ("rowwise", (8, 9), True, "rowwise needs a GPU of compute capability 9.0"),
        ("rowwise", (9, 0), False, r"rowwise products have bf16 results.*set train\.precision = bf16"),
        ("blockwise", (9, 0), True, r"multiples of 128; they are \(32, 48, 16\)"),
    ],
)
def test_8_bit_products_need_a_device_a_precision_and_sizes(
    recipe: Any, capability: tuple[int, int], bf16: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(UserError, match=message):
        choose_ops(SPEC, Training(fp8=True, fp8_recipe=recipe), kernels=False, bf16=bf16, device="cuda")


def test_first_and_last_blocks_keep_bf16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    spec = Model(layers=5, width=32, heads=4, kv_heads=2, ffn=48, vocab=64, context=32)
    ends = Training(fp8=True, fp8_recipe="rowwise", num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=1)
    ops, _, _ = choose_ops(spec, ends, kernels=False, bf16=True, device="cuda")
    model = CodeModel(spec)
    model.set_ops(ops)
    is_plain = [block.ops.linear is torch.nn.functional.linear for block in model.each_block()]
    assert is_plain == [True, True, False, False, True]
    is_fused = [block.ops.fused_feed_forward is not None for block in model.each_block()]
    assert is_fused == [False, False, True, True, False]


def test_a_blockwise_product_needs_whole_blocks_of_tokens() -> None:
    with pytest.raises(UserError, match=r"100 tokens on a rank, not a multiple of 128; change data\.sequence"):
        blockwise_linear(torch.zeros(2, 50, 128), torch.zeros(256, 128))


def test_the_embedding_has_an_initial_size_of_its_own() -> None:
    small, large = (CodeModel(SPEC) for _ in range(2))
    init_weights(small, 1)
    init_weights(large, 1, embedding_std=1.0)
    for name, weight in small.named_parameters():
        factor = 50 if name == "embed.weight" else 1
        assert torch.allclose(weight * factor, large.get_parameter(name), rtol=1e-5)
    with pytest.raises(ConfigError, match="embedding_init_std"):
        Training(embedding_init_std=0.0)
    with pytest.raises(ConfigError, match=r"which model\.tied shares; choose 0\.02, or set model\.tied = false"):
        Run(name="r", model=SPEC, data=Data(sequence=32), train=Training(embedding_init_std=1.0))


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
