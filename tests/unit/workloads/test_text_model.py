"""The language models of checkpoints that also see images are loaded as transformers loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.unit.workloads import families

from lakh.errors import UserError
from lakh.workloads.code.formats import hf
from lakh.workloads.code.formats.hf.config import spec_of
from lakh.workloads.code.model import CodeModel

transformers = pytest.importorskip("transformers", reason="pip install transformers")

VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "head_dim": 8,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
}
TOKENS = torch.tensor([[20, 31, 45, 90, 7, 25, 3, 3, 61, 14, 2, 88]])
# Name of a case -> (class, its vision and language config, the case of the language model, whether the head is tied).
CASES: dict[str, tuple[str, str, str, str, bool]] = {
    "gemma3": ("Gemma3", "SiglipVisionConfig", "Gemma3TextConfig", "gemma3", True),
    "mistral": ("Mistral3", "PixtralVisionConfig", "MistralConfig", "mistral", False),
    "ministral3": ("Mistral3", "PixtralVisionConfig", "Ministral3Config", "ministral3", False),
    "llama4": ("Llama4", "Llama4VisionConfig", "Llama4TextConfig", "llama4", False),
    "qwen3": ("Qwen3VL", "Qwen3VLVisionConfig", "Qwen3VLTextConfig", "qwen3", False),
}


def make(case: str, **outer: Any) -> Any:
    name, vision, language, of_family, is_tied = CASES[case]
    text = {**families.SIZES, **families.CASES[of_family][1], "tie_word_embeddings": is_tied}
    if case == "qwen3":
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 2, 2]}
    known = vars(getattr(transformers, vision)())
    sees = getattr(transformers, vision)(**{key: value for key, value in VISION.items() if key in known})
    reads = getattr(transformers, language)(**text)
    whole = {"tie_word_embeddings": is_tied, **outer}
    config = getattr(transformers, f"{name}Config")(text_config=reads, vision_config=sees, **whole)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1.3)
    return model


@pytest.mark.parametrize("names", ["of transformers 4", "of transformers 5"])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_of_a_text_are_those_of_transformers(case: str, names: str, tmp_path: Path) -> None:
    theirs = make(case)
    theirs.save_pretrained(tmp_path, save_original_format=names == "of transformers 4")
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    if names == "of transformers 5":
        tensors = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
        if CASES[case][4]:
            del tensors["lm_head.weight"]
        prefix = "language_model.model" if case == "llama4" else "model.language_model"
        assert any(name.startswith(f"{prefix}.layers.") for name in tensors)
        safetensors.torch.save_file(tensors, file, {"format": "pt"})
    spec, weights = hf.load(tmp_path)
    assert spec.tied == CASES[case][4]
    assert spec == spec_of("config.json", json.loads((tmp_path / "config.json").read_text()))
    model = CodeModel(spec).eval()
    model.load_state_dict(weights)
    expected = theirs(input_ids=TOKENS).logits
    assert (model(TOKENS) - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_config_that_does_not_say_whether_the_head_is_tied(tmp_path: Path) -> None:
    make("mistral").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]
    path.write_text(json.dumps(config))
    spec, weights = hf.load(tmp_path)
    assert not spec.tied
    assert "head.weight" in weights


def test_an_unknown_language_model_is_refused(tmp_path: Path) -> None:
    make("mistral").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for text, found in (({"model_type": "cohere2"}, "'cohere2'"), (None, "None"), ({"model_type": []}, r"\[\]")):
        path.write_text(json.dumps({**config, "text_config": text}))
        with pytest.raises(
            UserError, match=rf"text_config .*has model_type {found}; lakh loads mistral and ministral3"
        ):
            hf.load(tmp_path)


def test_defaults_of_published_gemma_3_files() -> None:
    """They omit what is the default in transformers."""
    text = {"hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    scaling = {"factor": 8.0, "rope_type": "linear"}
    config = {"model_type": "gemma3", "text_config": {**text, "rope_scaling": scaling, "sliding_window": 1024}}
    spec = spec_of("config.json", config)
    expected = transformers.Gemma3TextConfig(**{**text, "rope_scaling": scaling, "sliding_window": 1024})
    found = (spec.heads, spec.kv_heads, spec.head_dim, spec.vocab, spec.context, spec.norm_eps, spec.tied)
    assert found == (
        *(expected.num_attention_heads, expected.num_key_value_heads, expected.head_dim, expected.vocab_size),
        *(expected.max_position_embeddings, expected.rms_norm_eps, True),
    )
    assert spec.rope_scaling is not None
    assert (spec.rope_base, spec.local_rope_base, spec.rope_scaling.factor) == (1e6, 10_000.0, 8.0)
    assert spec.sliding_window is not None
    assert spec.sliding_window.tokens == 1024


def test_a_model_type_that_is_no_name_is_refused() -> None:
    with pytest.raises(UserError, match=r"model_type .*is \['mistral3'\]"):
        spec_of("config.json", {"model_type": ["mistral3"]})
