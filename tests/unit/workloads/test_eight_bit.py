"""Checkpoints with weights in 8-bit floats are read as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.unit.workloads import families
from torch import Tensor

from lakh.errors import CorruptCheckpoint, UserError
from lakh.workloads.code.formats import hf
from lakh.workloads.code.formats.hf import checkpoint, eight_bit

transformers = pytest.importorskip("transformers", reason="pip install transformers")

BLOCK = (16, 16)
MOST = 448.0  # of e4m3
BLOCKS = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
CHANNELS = {"quant_method": "compressed-tensors", "format": "float-quantized"}
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "blocks": (BLOCKS, "weight_scale_inv"),
    "whole matrices": ({"quant_method": "fp8", "weight_block_size": None}, "weight_scale_inv"),
    "rows": (CHANNELS, "weight_scale"),
}
"""Of scales: their quantization_config and their name."""


def quantize(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """A matrix of whole blocks in 8 bits, and its scales."""
    if kind == "whole matrices":
        scale = weight.abs().max() / MOST
        return (weight / scale).to(torch.float8_e4m3fn), scale
    if kind == "rows":
        scale = weight.abs().amax(dim=-1, keepdim=True) / MOST
        return (weight / scale).to(torch.float8_e4m3fn), scale
    blocks = weight.unflatten(-1, (-1, BLOCK[1])).unflatten(-3, (-1, BLOCK[0]))  # r BLOCK c BLOCK
    scale = blocks.abs().amax(dim=(-3, -1)) / MOST
    values = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return values.flatten(-2).flatten(0, 1), scale


def write(folder: Path, case: str, kind: str) -> dict[str, Tensor]:
    """A checkpoint whose matrices in blocks are in 8 bits; returns the values that they stand for, by their names."""
    families.make(case).to(torch.bfloat16).save_pretrained(folder)
    file, values = folder / "model.safetensors", dict[str, Tensor]()
    tensors = safetensors.torch.load_file(file)
    quantization, ending = KINDS[kind]
    for name, tensor in list(tensors.items()):
        if ".layers." in name and tensor.dim() == 2 and len(tensor) % BLOCK[0] == 0:  # routers stay as they are
            small, scale = quantize(tensor.float(), kind)
            stem = name.removesuffix("weight")
            tensors |= {name: small.contiguous(), stem + ending: scale.contiguous()}
            tensors[stem + "input_scale"] = torch.tensor(1.0)
            whole = torch.kron(scale, torch.ones(BLOCK)) if kind == "blocks" else scale
            values[name] = (small.float() * whole).bfloat16()
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return values


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["qwen3", "minimax_m2"])
def test_a_checkpoint_is_loaded_with_its_values(case: str, kind: str, tmp_path: Path) -> None:
    values = write(tmp_path, case, kind)
    spec, weights = hf.load(tmp_path)
    written = dict(checkpoint._file_tensors(spec, weights))
    assert values.keys() <= written.keys()
    assert all(torch.equal(written[name], value) for name, value in values.items())
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_the_values_are_those_of_transformers() -> None:
    from transformers.integrations import finegrained_fp8 as theirs

    torch.manual_seed(0)
    weight = torch.randn(3, 37, 21).to(torch.float8_e4m3fn)
    for block, shape in (((16, 8), (3, 3, 3)), ((37, 1), (3, 1, 21)), (None, (3, 1, 1))):
        scale = torch.rand(shape) + 0.5
        size = None if block is None else list(block)
        expected = theirs._dequantize_fp8_weight(weight, scale, size, torch.float32).bfloat16()
        assert torch.equal(eight_bit.dequantize(weight, scale, block), expected)


def test_the_size_of_a_block() -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 64]}
    assert eight_bit.block_size_of(BLOCKS) == BLOCK
    assert eight_bit.block_size_of({"config_groups": {"group_0": {"weights": weights}}}) == (128, 64)
    for other in ({}, "fp8", {"weight_block_size": [128]}, {"config_groups": {"group_0": None}}, {"config_groups": 1}):
        assert eight_bit.block_size_of(other) is None


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "qwen3", "blocks")
    file = tmp_path / "model.safetensors"
    tensors, name = safetensors.torch.load_file(file), "model.layers.1.self_attn.o_proj.weight"
    scale = tensors[f"{name}_scale_inv"]
    for wrong in (scale[:1], torch.cat((scale, scale)), scale[0], scale[None]):
        safetensors.torch.save_file({**tensors, f"{name}_scale_inv": wrong.contiguous()}, file)
        with pytest.raises(CorruptCheckpoint, match=rf"{name} has shape .* and scales"):
            hf.load(tmp_path)
    del tensors[f"{name}_scale_inv"]
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(CorruptCheckpoint, match=f"has 8-bit weights {name} without a scale"):
        hf.load(tmp_path)


def test_other_quantized_weights_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "qwen3", "rows")
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight_other"] = torch.zeros(48, 4, dtype=torch.int32)
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(UserError, match="holds int32: the weights are quantized"):
        hf.load(tmp_path)
