"""The megakernel: which models it supports, and that its source gets all of its macros and compiles."""

import ctypes
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.cuda_emulation import compiled, needs_compiler

from lakh.server.model.gpu import megakernel, quantized
from lakh.server.model.gpu.megakernel import Megakernel, MegakernelPlan
from lakh.server.model.inference import InferenceModel
from lakh.spec.model import Model
from lakh.workloads.code.formats import hf
from lakh.workloads.code.kernels.cuda import nvrtc

pytestmark = pytest.mark.slow

MODEL = Model(layers=24, width=2048, heads=16, kv_heads=8, ffn=5504, vocab=32064, context=4096)
SMS, SHARED_BYTES = 132, 232448  # of an H200


def test_a_model_of_a_usual_shape_fills_the_shared_memory_with_weights() -> None:
    plan = megakernel.plan(MODEL, MODEL.vocab, SMS, SHARED_BYTES)
    assert isinstance(plan, MegakernelPlan)
    assert (plan.splits, plan.chunk_bytes, plan.slots) == (8, 16384, 13)
    assert SHARED_BYTES - plan.chunk_bytes < plan.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize("ffn", [8192, 14336])
def test_a_chunk_holds_a_whole_row(ffn: int) -> None:
    plan = megakernel.plan(replace(MODEL, ffn=ffn), MODEL.vocab, SMS, SHARED_BYTES, 16, False)
    assert isinstance(plan, MegakernelPlan)
    assert plan.chunk_bytes == 2 * ffn
    assert plan.slots >= megakernel.MIN_SLOTS


@pytest.mark.parametrize("wgmma", [False, True])
@pytest.mark.parametrize(("width", "heads", "ffn"), [(64, 2, 64), (64, 2, 320), (128, 4, 256), (256, 2, 64)])
def test_in_a_small_model_every_block_publishes_flags_for_all_others(
    width: int, heads: int, ffn: int, wgmma: bool
) -> None:
    spec = replace(MODEL, width=width, heads=heads, kv_heads=1, ffn=ffn, vocab=64)
    plan = megakernel.plan(spec, spec.vocab, SMS, SHARED_BYTES, 16, wgmma)
    assert isinstance(plan, MegakernelPlan)
    qkv_rows = width + 2 * spec.head_dim
    of_qkv, of_width, of_gates = (8, 8, 4) if wgmma else (1, 2, 2)  # rows that one block has together

    def least(lines: int) -> int:
        return min(lines * (block + 1) // plan.blocks - lines * block // plan.blocks for block in range(plan.blocks))

    assert least(width // of_width) > 0 or (least(ffn // of_gates) > 0 and least(qkv_rows // of_qkv) > 0)


@pytest.mark.parametrize(
    "other",
    [
        {"qk_norm": True},
        {"mlp_bias": True},
        {"ffn": 5505 + 31},  # 5536 is no multiple of 64
        {"width": 1568, "heads": 16},  # heads of 98
        {"ffn": 65536},  # four rows do not fit
    ],
    ids=str,
)
def test_other_models_use_separate_kernels_for_a_reason(other: dict[str, int]) -> None:
    reason = megakernel.plan(replace(MODEL, **other), MODEL.vocab, SMS, SHARED_BYTES, 16, False)
    assert isinstance(reason, str)


def test_the_chunks_of_a_row_of_4_bits_fit_into_shared_memory_together() -> None:
    plan = megakernel.plan(MODEL, MODEL.vocab, SMS, SHARED_BYTES, 4)
    assert isinstance(plan, MegakernelPlan)
    assert (plan.chunk_bytes, plan.slots) == (16 * (1024 + 128), 8)
    assert plan.keeps_tokens
    plan = megakernel.plan(replace(MODEL, ffn=16384), MODEL.vocab, SMS, SHARED_BYTES, 4)
    assert isinstance(plan, MegakernelPlan)
    assert not plan.keeps_tokens
    assert "are needed" in megakernel.plan(replace(MODEL, ffn=28672), MODEL.vocab, SMS, SHARED_BYTES, 4)


def test_wgmma_needs_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(MODEL, layers=1, width=64, heads=2, kv_heads=1, ffn=64, vocab=64)
    weights = {name: torch.zeros(shape) for name, shape in hf.shapes(spec).items()}
    network = InferenceModel(spec, weights, spec.vocab, torch.device("cpu"), "f32")
    network.dtype, network.precision = torch.bfloat16, "fp8"
    chip = SimpleNamespace(multi_processor_count=SMS, shared_memory_per_block_optin=SHARED_BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: chip)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "none"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    plan = Megakernel.plan(network)
    assert isinstance(plan, MegakernelPlan)
    assert (plan.bits, plan.wgmma) == (8, True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert "Hopper" in Megakernel.plan(network)
    monkeypatch.setitem(megakernel.WGMMA, 16, True)
    for network.precision in ("int4", "bf16"):
        plan = Megakernel.plan(network)
        assert isinstance(plan, MegakernelPlan)
        assert not plan.wgmma


@pytest.mark.parametrize("bits", [8, 4])
def test_behind_quantized_weights_are_zeros(bits: int) -> None:
    """The kernel reads groups of 128 bytes, also the last of a row that has fewer."""
    values, *_ = quantized.empty(2, 3, 64, bits, torch.device("cpu"))
    memory = torch.empty(0, dtype=torch.uint8).set_(values.untyped_storage())
    assert len(memory) >= values.numel() + 128 - values.shape[-1] % 128
    assert not memory[values.numel() :].any()


def test_a_gpu_with_little_shared_memory_uses_them_too() -> None:
    assert "fit into shared memory" in megakernel.plan(MODEL, MODEL.vocab, 80, 100 * 1024, 16, False)


def test_the_source_gets_the_macros_that_it_lists() -> None:
    text = megakernel.source()
    plan = megakernel.plan(MODEL, MODEL.vocab, SMS, SHARED_BYTES)
    assert isinstance(plan, MegakernelPlan)
    text = text[text.index("Macros that must") :]
    needs = text[: text.index("constexpr")]
    promised = {
        word
        for line in needs.splitlines()[1:]
        for word in re.split(r"\s{2,}", line[3:].strip())[0].split()
        if word.isupper() or "_" in word
    }
    given = megakernel.defines(MODEL, MODEL.vocab, plan)
    assert promised == set(given)
    for word in given:
        assert len(re.findall(rf"\b{word}\b", text)) > 1, f"{word} is unused"


@pytest.mark.parametrize(("bits", "wgmma"), [(16, False), (16, True), (8, True), (4, False)])
@pytest.mark.parametrize("ffn", [5504, 8192, 14336])  # chunks of four rows and of one
def test_the_source_compiles(ffn: int, bits: int, wgmma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", torch.version.cuda or "13.0")
    try:
        nvrtc._nvrtc()
    except nvrtc.CudaCompileError as error:
        pytest.skip(f"{error} (pip install nvidia-cuda-nvrtc)")
    spec = replace(MODEL, ffn=ffn)
    plan = megakernel.plan(spec, spec.vocab, SMS, SHARED_BYTES, bits, wgmma)
    assert isinstance(plan, MegakernelPlan)
    defines = "".join(f"#define {word} {value}\n" for word, value in megakernel.defines(spec, spec.vocab, plan).items())
    suffix = "a" if plan.tile_rows else ""
    assert nvrtc.compile_cubin(defines + megakernel.source(), megakernel.KERNEL_NAME, (9, 0), suffix)[:4] == b"\x7fELF"
    little = defines.replace(f"SHARED_BYTES {plan.shared_bytes}", f"SHARED_BYTES {plan.shared_bytes - 16}")
    with pytest.raises(nvrtc.CudaCompileError, match="more shared memory is needed"):
        nvrtc.compile_cubin(little + megakernel.source(), megakernel.KERNEL_NAME, (9, 0), suffix)


PAIRS = """
extern "C" void round_trip(const float* values, u32 round, u32 count, u32* tags, u32* bits) {
  for (u32 i = 0; i < count; i++) {
    const u32 pair = to_codes(values[i], -values[i]) | tag_of(round);
    tags[i] = pair & TAGS, bits[i] = from_codes(pair);
  }
}
"""


@needs_compiler
def test_tagged_pairs_keep_numbers_of_bf16_and_the_round(tmp_path: Path) -> None:
    """The functions of the CUDA source, compiled for the CPU: every number of bf16, with its negative beside it."""
    text = megakernel.source()
    needed = ["u32 TAGS", "u32 MOVED", "tag_of(u32", "to_code(u32", "to_codes(float", "from_codes(u32"]
    # A line, or all lines to the closing brace.
    parts = [re.search(rf"^.*{re.escape(name)}.*(?:[;}}].*|\{{.*\n(?:  .*\n)*}})$", text, re.M) for name in needed]
    assert all(parts)
    round_trip = compiled(tmp_path, "\n".join(part[0] for part in parts if part), {}, PAIRS).round_trip
    numbers = np.arange(1 << 16, dtype=np.uint32)
    values = (numbers << 16).view(np.float32)
    kept = (np.abs(values) >= 2.0**-46) & (np.abs(values) < 2.0**81)
    assert kept.sum() == 2 * 127 * 128
    tags, bits = np.zeros((5, 1 << 16), np.uint32), np.zeros(1 << 16, np.uint32)
    for round_ in range(5):
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (values, tags[round_], bits)]
        round_trip(pointers[0], round_, 1 << 16, *pointers[1:])
        first, second = bits & 0xFFFF, bits >> 16
        assert (first[kept] == numbers[kept]).all()
        assert (second == first ^ 0x8000)[~np.isnan(values)].all()
        read = (first << 16).view(np.float32)
        assert (np.abs(read[np.abs(values) < 2.0**-46]) < 2.0**-46).all()
        assert (np.abs(read[~(np.abs(values) < 2.0**81)]) > 2.0**80).all()
        assert (np.abs(read) < 2.0**81).all()
    assert (tags == tags[:, :1]).all()
    assert len(set(tags[:4, 0].tolist())) == 4
    assert tags[4, 0] == tags[0, 0]


def test_it_is_not_used_where_processes_share_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(MODEL, layers=1, width=64, heads=2, kv_heads=1, ffn=64, vocab=64)
    weights = {name: torch.zeros(shape) for name, shape in hf.shapes(spec).items()}
    network = InferenceModel(spec, weights, spec.vocab, torch.device("cpu"), "f32")
    network.dtype = torch.bfloat16
    chip = SimpleNamespace(multi_processor_count=SMS, shared_memory_per_block_optin=SHARED_BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: chip)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "none"))
    assert isinstance(Megakernel.plan(network), MegakernelPlan)
    assert "KV cache of int8" in Megakernel.plan(network, torch.int8)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    assert isinstance(Megakernel.plan(network), MegakernelPlan)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    assert "MPS or NCCL" in Megakernel.plan(network)
    monkeypatch.undo()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert "MPS or NCCL" in Megakernel.plan(network)
