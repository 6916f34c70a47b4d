"""MXFP4 experts of GPT-OSS are read as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.unit.workloads import families

from lakh.errors import CorruptCheckpoint, UserError
from lakh.workloads.code.formats import hf
from lakh.workloads.code.formats.hf import mxfp4

pytest.importorskip("transformers", reason="pip install transformers")


def packed(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(118, 126, shape, generator=generator, dtype=torch.uint8)


def test_values_are_those_of_transformers() -> None:
    from transformers.integrations import mxfp4 as theirs

    convert: Any = theirs.convert_moe_packed_tensors
    blocks, scales = packed(3, 8, 2)
    expected = convert(blocks, scales, dtype=torch.bfloat16)  # E inputs outputs
    assert torch.equal(mxfp4.unpack("test", {"w_blocks": blocks, "w_scales": scales})["w"], expected)
    one = torch.tensor([[0x72] + [0] * 15], dtype=torch.uint8)
    assert mxfp4.dequantize(one, torch.tensor([128])).tolist()[:3] == [2.0, 12.0, 0.0]  # twice 1.0 and 6.0


@pytest.fixture
def wide_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inner sizes that are whole groups."""
    name, settings = families.CASES["gpt_oss"]
    monkeypatch.setitem(families.CASES, "gpt_oss", (name, {**settings, "intermediate_size": 64}))


@pytest.mark.usefixtures("wide_experts")
def test_a_packed_checkpoint_is_loaded_with_its_values(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    families.make("gpt_oss").to(torch.bfloat16).save_pretrained(tmp_path)
    tensors, values = safetensors.torch.load_file(file), {}
    for layer in range(4):
        for name, rows, inputs in (("gate_up_proj", 128, 32), ("down_proj", 32, 64)):
            stem = f"model.layers.{layer}.mlp.experts.{name}"
            assert tensors.pop(stem).shape == (5, inputs, rows)
            blocks, scales = packed(5, rows, inputs // 32, seed=layer)
            tensors |= {f"{stem}_blocks": blocks, f"{stem}_scales": scales}
            values[f"blocks.{layer}.ffn.{name.removesuffix('_proj')}.weight"] = mxfp4.dequantize(blocks, scales)
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    _, weights = hf.load(tmp_path)
    for name, expected in values.items():
        assert torch.equal(weights[name], expected)

    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CorruptCheckpoint, match="down_proj_blocks and its scales do not fit"):
        hf.load(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "bitsandbytes"}})
    )
    with pytest.raises(UserError, match="quantized"):
        hf.load(tmp_path)
