"""The model of --model: directories of transformers are planned with the parameters that they have there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner
from tests.unit.workloads.families import CASES, CONFIGS, SIZES

from lakh.cli.main import cli
from lakh.cli.plan_model import planned_model
from lakh.errors import CorruptCheckpoint, UserError
from lakh.planner.catalogue import load_model


@pytest.mark.parametrize("case", CASES)
def test_a_directory_of_transformers_has_its_number_of_parameters(case: str, tmp_path: Path) -> None:
    name, settings = CASES[case]
    config = getattr(transformers, CONFIGS.get(name, f"{name}Config"))(**SIZES | settings)
    config.architectures = [f"{name}ForCausalLM"]
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    # Files have the biases of routers, which are buffers of transformers.
    biases = [bias for name, bias in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert planned_model(str(tmp_path)).parameters == sum(p.numel() for p in (*model.parameters(), *biases))


def test_a_directory_is_planned_like_the_model_of_the_catalogue(tmp_path: Path) -> None:
    transformers.Qwen3MoeConfig(
        hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, vocab_size=151_936,
        architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    ours, known = planned_model(str(tmp_path)), load_model("qwen3-30b-a3b")
    assert (ours.parameters, ours.active_parameters) == (known.parameters, known.active_parameters)
    options = ["--cluster", "8xh100", "--gpus", "8", "--shard", "8", "--batch", "64", "--json"]
    result = CliRunner().invoke(cli, ["plan", "estimate", "--model", str(tmp_path), *options])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["step_s"] > 0


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CorruptCheckpoint, match="not a JSON object"):
            planned_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(UserError, match="mamba"):
        planned_model(str(tmp_path))
    for name in ("no-such-model", str(tmp_path / "missing.gguf")):
        with pytest.raises(UserError):
            planned_model(name)
