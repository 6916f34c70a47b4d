"""Checkpoints with several integers in an int32 are read with the values that their tools gave them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.unit.workloads import families
from torch import Tensor

from lakh.errors import CorruptCheckpoint, UserError
from lakh.workloads.code.formats import hf
from lakh.workloads.code.formats.hf import checkpoint

pytest.importorskip("transformers", reason="pip install transformers")

GROUP = 16
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column that each place of an int32 holds."""


def pack(numbers: Tensor, bits: int, dim: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Numbers along `dim` in int32 words, written one after the other."""
    count = 32 // bits
    rows = numbers.movedim(dim, -1)
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % count)).long()
    words = torch.zeros(*rows.shape[:-1], rows.shape[-1] // count, dtype=torch.int64)
    for place in range(count):
        words |= rows[..., (places[place] if places else place) :: count] << (bits * place)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return words.to(torch.int32).movedim(-1, dim).contiguous()


Parts = tuple[dict[str, Tensor], Tensor]
"""Tensors of a matrix by the ends of their names, and its values."""


def awq(rows: int, columns: int, bits: int, is_symmetric: bool) -> Parts:
    numbers, zeros = torch.randint(16, (columns, rows)), torch.randint(16, (columns // GROUP, rows))
    scales = torch.rand(columns // GROUP, rows).half() / 50
    values = (numbers - zeros.repeat_interleave(GROUP, 0)) * scales.float().repeat_interleave(GROUP, 0)
    packed = {"qweight": pack(numbers, 4, 1, AWQ_PLACES), "qzeros": pack(zeros, 4, 1, AWQ_PLACES), "scales": scales}
    return packed, values.T.half()


def gptq(rows: int, columns: int, bits: int, is_symmetric: bool, offset: int = 1) -> Parts:
    numbers, zeros = torch.randint(1 << bits, (columns, rows)), torch.randint(1 << bits, (columns // GROUP, rows))
    scales = torch.rand(columns // GROUP, rows).half() / 50
    group = torch.arange(columns) // GROUP
    ones = torch.tensor({4: 0x11111111, 8: 0x01010101}[bits], dtype=torch.int32)
    words = pack(zeros, bits, 1) - offset * ones  # as GPTQModel converts them, also zeros of 0
    packed = {"qweight": pack(numbers, bits, 0), "qzeros": words, "scales": scales}
    if not is_symmetric:  # inputs in another order, as with desc_act
        group = group[torch.randperm(columns)]
        packed["g_idx"] = group.int()
    return packed, ((numbers - zeros[group]) * scales.float()[group]).T.half()


def gptq_2(rows: int, columns: int, bits: int, is_symmetric: bool) -> Parts:
    return gptq(rows, columns, bits, is_symmetric, offset=0)


def compressed(rows: int, columns: int, bits: int, is_symmetric: bool) -> Parts:
    numbers, half = torch.randint(1 << bits, (rows, columns)), 1 << (bits - 1)
    zeros = torch.full((rows, columns // GROUP), half)
    scales = torch.rand(rows, columns // GROUP).bfloat16() / 50
    packed = {"weight_packed": pack(numbers, bits, 1), "weight_scale": scales}
    packed["weight_shape"] = torch.tensor([rows, columns])
    group = torch.arange(columns) // GROUP
    packed["weight_g_idx"] = torch.full((columns,), -1, dtype=torch.int32)
    if not is_symmetric:  # inputs in another order, as with actorder
        zeros, group = torch.randint(1 << bits, zeros.shape), group[torch.randperm(columns)]
        packed |= {"weight_zero_point": pack(zeros, bits, 0), "weight_g_idx": group.int()}
    return packed, ((numbers - zeros[:, group]) * scales.float()[:, group]).bfloat16()


def groups(bits: int) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"weights": {"num_bits": bits, "group_size": GROUP, "type": "int"}}}}


METHODS: dict[str, tuple[Callable[[int, int, int, bool], Parts], Callable[[int], dict[str, Any]]]] = {
    "awq": (awq, lambda bits: {"quant_method": "awq", "bits": bits, "group_size": GROUP, "version": "gemm"}),
    "gptq": (gptq, lambda bits: {"quant_method": "gptq", "bits": bits, "group_size": GROUP}),
    "gptq_v2": (gptq_2, lambda bits: {"quant_method": "gptq", "bits": bits, "checkpoint_format": "gptq_v2"}),
    "compressed-tensors": (compressed, lambda bits: {"quant_method": "compressed-tensors", **groups(bits)}),
}
"""How a matrix is quantized, and the quantization_config."""


def write(folder: Path, method: str, bits: int = 4, *, is_symmetric: bool = True) -> dict[str, Tensor]:
    """A checkpoint with packed matrices in its blocks; returns their values by their names."""
    families.make("qwen2").half().save_pretrained(folder)
    file, values = folder / "model.safetensors", dict[str, Tensor]()
    tensors = safetensors.torch.load_file(file)
    quantize, settings = METHODS[method]
    torch.manual_seed(0)
    for name, tensor in list(tensors.items()):
        if ".layers." in name and tensor.dim() == 2:
            packed, values[name] = quantize(*tensor.shape, bits, is_symmetric)
            del tensors[name]
            tensors |= {name.removesuffix("weight") + part: packed[part] for part in packed}
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings(bits)}))
    return values


@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize(
    ("method", "bits"),
    [(name, bits) for name in METHODS for bits in (4, 8) if (name, bits) != ("awq", 8)],
)
def test_a_checkpoint_is_loaded_with_its_values(method: str, bits: int, is_symmetric: bool, tmp_path: Path) -> None:
    values = write(tmp_path, method, bits, is_symmetric=is_symmetric)
    spec, weights = hf.load(tmp_path)
    written = dict(checkpoint._file_tensors(spec, weights))
    assert len(values) == 4 * 7
    assert all(torch.equal(written[name], value) for name, value in values.items())


@pytest.mark.parametrize(
    ("method", "change", "words"),
    [
        ("gptq", {"bits": 3}, r"quantization_config .*weights have 3 bits; give a model in 4 or 8 bits"),
        ("awq", {"bits": 8}, r"quantization_config .*weights have 8 bits; give a model in 4 bits"),
        ("gptq", {"bits": None}, r"weights have None bits"),
        ("awq", {"version": "gemv"}, r"quantization_config.version .*is 'gemv', another order"),
        ("compressed-tensors", {"config_groups": {"group_0": {"weights": {"num_bits": 2}}}}, "weights have 2 bits"),
    ],
)
def test_other_forms_are_refused(method: str, change: dict[str, Any], words: str, tmp_path: Path) -> None:
    write(tmp_path, method)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": {**config["quantization_config"], **change}}))
    with pytest.raises(UserError, match=words):
        hf.load(tmp_path)


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
def test_matrices_of_other_bits_than_the_config_are_refused(method: str, tmp_path: Path) -> None:
    write(tmp_path, method, 8)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": METHODS[method][1](4)}))
    with pytest.raises(CorruptCheckpoint, match=r"do not fit|has shape"):
        hf.load(tmp_path)


@pytest.mark.parametrize(
    ("method", "part"), [("awq", "qzeros"), ("gptq", "scales"), ("compressed-tensors", "weight_scale")]
)
def test_damaged_matrices_are_named(method: str, part: str, tmp_path: Path) -> None:
    write(tmp_path, method)
    file, stem = tmp_path / "model.safetensors", "model.layers.2.mlp.up_proj."
    tensors = safetensors.torch.load_file(file)
    whole = tensors.pop(stem + part)
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(CorruptCheckpoint, match=f"has {stem}.* and no {stem}{part}"):
        hf.load(tmp_path)
    for wrong in (whole[:, :-1].contiguous(), whole[:0]):
        safetensors.torch.save_file({**tensors, stem + part: wrong}, file)
        with pytest.raises(CorruptCheckpoint, match=f"{stem}.*(do not fit|has shape)"):
            hf.load(tmp_path)
