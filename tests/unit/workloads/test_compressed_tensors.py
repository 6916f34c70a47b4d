"""Folders that compressed-tensors itself writes are read with the values that it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.workloads import families
from torch import Tensor

from lakh.workloads.code.formats import hf
from lakh.workloads.code.formats.hf import checkpoint

pytest.importorskip("transformers", reason="pip install transformers")
package: Any = pytest.importorskip(
    "compressed_tensors", reason="compressed-tensors is not installed; it is no dependency of lakh"
)

INT4, INT8 = {"num_bits": 4, "type": "int"}, {"num_bits": 8, "type": "int"}
FP8 = {"num_bits": 8, "type": "float"}
GROUP, CHANNEL, TENSOR = {"strategy": "group", "group_size": 32}, {"strategy": "channel"}, {"strategy": "tensor"}
BLOCK = {"strategy": "block", "block_structure": [48, 64]}  # does not divide the matrices
TOKENS = {"strategy": "token", "dynamic": True}
ASYMMETRIC = {"symmetric": False}
# Settings of the weights, and of the activations: with those the numbers are not packed.
SCHEMES: dict[str, list[tuple[dict[str, Any], dict[str, Any] | None]]] = {
    "int4 in groups": [({**INT4, **GROUP}, None)],
    "int4 in groups with zeros": [({**INT4, **GROUP, **ASYMMETRIC}, None)],
    "int4 in rows": [({**INT4, **CHANNEL}, None)],
    "int4 with one scale and zero": [({**INT4, **TENSOR, **ASYMMETRIC}, None)],
    "int8 in groups with zeros": [({**INT8, **GROUP, **ASYMMETRIC}, None)],
    "int8 products": [({**INT8, **CHANNEL}, {**INT8, **TOKENS})],
    "int8 products with zeros": [({**INT8, **CHANNEL, **ASYMMETRIC}, {**INT8, **TOKENS})],
    "fp8 products in rows": [({**FP8, **CHANNEL}, {**FP8, **TOKENS})],
    "fp8 products with scales of activations": [({**FP8, **TENSOR}, {**FP8, **TENSOR, "dynamic": False})],
    "fp8 in blocks": [({**FP8, **BLOCK}, {**FP8, **GROUP, "dynamic": True})],
    "int4 feed-forward, int8 attention": [({**INT4, **GROUP}, None), ({**INT8, **CHANNEL}, None)],
}
PARTS = (["re:.*mlp.*_proj"], ["re:.*self_attn.*_proj"])


def bounds(weight: Tensor, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The least and the greatest number that shares each scale."""
    rows, columns = weight.shape
    kind = settings["strategy"]
    height, width = {"tensor": (rows, columns), "channel": (1, columns), "group": (1, 32)}.get(kind, (48, 64))
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % width, 0, -rows % height))
    blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def write(folder: Path, name: str) -> dict[str, Tensor]:
    """A small model, compressed; returns the values of its matrices."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization import apply_quantization_config as apply
    from compressed_tensors.quantization.utils import calculate_qparams

    model, groups = families.make("llama", hidden_size=64, intermediate_size=96, num_hidden_layers=1).bfloat16(), {}
    for (weights, inputs), targets in zip(SCHEMES[name], PARTS, strict=False):
        scheme = {"targets": targets if len(SCHEMES[name]) > 1 else ["Linear"], "weights": QuantizationArgs(**weights)}
        scheme |= {"input_activations": None if inputs is None else QuantizationArgs(**inputs)}
        groups[f"group_{len(groups)}"] = QuantizationScheme(**scheme)
    apply(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        scale, zero = calculate_qparams(*bounds(module.weight.detach(), vars(scheme.weights)), scheme.weights)
        module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero.reshape(module.weight_zero_point.shape).to(torch.int8))
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.5)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    compressor.decompress_model(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name.endswith("_proj.weight")}


@pytest.mark.parametrize("name", SCHEMES)
def test_its_folders_are_read_with_its_values(name: str, tmp_path: Path) -> None:
    values = write(tmp_path, name)
    found = dict(checkpoint._file_tensors(*hf.load(tmp_path)))
    assert len(values) == 7
    assert all(torch.equal(found[name], value) for name, value in values.items())
