"""config.json as checkpoints have it: omitted fields, null and tables of positions mean what transformers says."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.unit.workloads import families

from lakh.errors import ConfigError, LakhError, UserError
from lakh.spec.model import Model
from lakh.workloads.code.formats.hf.config import config_of, spec_of
from lakh.workloads.code.ops import rotary_tables

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 999,
}
LATE = {"use_sliding_window": True, "sliding_window": 77, "max_window_layers": 20}
CASES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {},
    "Qwen2": LATE,
    "Qwen3": LATE,
    "SeedOss": {},
    "Phi3": {"pad_token_id": None},
    "SmolLM3": {"pad_token_id": None},
    "Starcoder2": {"sliding_window": 77},
    "GPTBigCode": {},
    "StableLm": {},
    "Glm4": {"pad_token_id": None, "eos_token_id": [1]},
    "Granite": {"attention_multiplier": 0.25},
    "Olmo2": {"pad_token_id": None},
    "Gemma": {},
    "Gemma2": {},
    "Gemma3": {},
    "Mixtral": {"sliding_window": 77},
    "Qwen2Moe": {"num_experts_per_tok": 2, "mlp_only_layers": [0, 1]},
    "Qwen3Moe": {"use_sliding_window": True, "sliding_window": 77, "norm_topk_prob": True},
    "MiniMaxM2": {"num_experts_per_tok": 2},
    "DeepseekV2": {"num_key_value_heads": 32, "num_experts_per_tok": 2},
    "DeepseekV3": {"num_key_value_heads": 32},
    "Glm4Moe": {"attention_bias": True},
    "Llama4": {"interleave_moe_layer_step": 2, "no_rope_layer_interval": 3},
    "GptOss": {"sliding_window": 77},
}
LINEAR = {"rope_type": "linear", "factor": 2.0}


def written_out(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The fields as transformers understands them."""
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    given = {key: value for key, value in copy.deepcopy(config).items() if key != "model_type"}
    kind = getattr(transformers, families.CONFIGS.get(name, f"{name}Config"))
    return {**kind(**given).to_dict(), "architectures": [f"{name}ForCausalLM"]}


def llama(**changes: Any) -> Model:
    return spec_of("config.json", {**SIZES, "model_type": "llama", **changes})


@pytest.mark.parametrize("name", CASES)
def test_an_omitted_field_has_the_value_that_transformers_gives_it(name: str) -> None:
    whole = written_out(name, {**SIZES, **CASES[name]})
    compared = 0
    for field in whole.keys() - {"model_type", "architectures"}:
        config = {key: value for key, value in whole.items() if key != field}
        if field in ("use_sliding_window", "max_window_layers"):  # they decide where none are given
            config.pop("layer_types", None)
        try:
            found = spec_of("config.json", config)
        except UserError:
            continue  # refused, not guessed
        compared += 1
        assert found == spec_of("config.json", written_out(name, config)), field
    assert compared > 20


@pytest.mark.parametrize("field", ["sliding_window", "attn_logit_softcapping", "final_logit_softcapping"])
def test_null_is_not_an_omitted_field(field: str) -> None:
    whole = written_out("Gemma2", SIZES)
    without, omitted = dict(whole), dict(whole)
    without[field] = None
    del omitted[field]
    found = spec_of("config.json", without)
    assert found == spec_of("config.json", written_out("Gemma2", without)) != spec_of("config.json", omitted)


@pytest.mark.parametrize("change", [{"hidden_act": "gelu"}, {"hidden_act": "gelu", "hidden_activation": None}])
def test_the_gelu_of_old_gemma_files_is_that_by_tanh(change: dict[str, Any]) -> None:
    whole = written_out("Gemma", SIZES)
    assert spec_of("config.json", {**whole, **change}) == spec_of("config.json", whole)
    assert written_out("Gemma", {**SIZES, **change})["hidden_act"] == "gelu_pytorch_tanh"
    with pytest.raises(UserError, match=r"hidden_act .*'silu' is not 'gelu_pytorch_tanh'"):
        spec_of("config.json", {**whole, "hidden_act": "silu"})


def test_rope_scaling_is_taken_before_rope_parameters_as_in_transformers() -> None:
    both = {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 1e6}
    assert llama(**both) == spec_of("config.json", written_out("Llama", {**SIZES, **both}))


def test_yarn_without_its_original_context_takes_that_of_the_model() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    spec = llama(rope_scaling=scaling, max_position_embeddings=4096)
    assert spec.rope_scaling is not None
    assert spec.rope_scaling.original_context == 4096


def test_positions_that_differ_by_kind_of_layer_are_refused() -> None:
    with pytest.raises(UserError, match="kinds of layers"):
        llama(rope_parameters={"full_attention": LINEAR, "sliding_attention": LINEAR})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"no_rope_layers": [1, 0, 0, 1] * 8}, r"no_rope_layers .*not at regular intervals"),
        ({"no_rope_layers": [1, 1, 1, 0]}, r"no_rope_layers .*for 32 layers"),
        ({"no_rope_layers": None, "no_rope_layer_interval": 0}, r"no_rope_layer_interval .*0 is not a positive number"),
        ({"use_sliding_window": True, "sliding_window": 77}, r"use_sliding_window .*True is not False"),
        ({"mlp_bias": True}, r"mlp_bias .*True is not False"),
    ],
)
def test_what_smollm3_files_ask_for_and_lakh_does_not_compute_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        spec_of("config.json", {**SIZES, "model_type": "smollm3", **change})


@pytest.mark.parametrize("change", [{}, {"no_rope_layer_interval": 5}, {"no_rope_layers": [1] * 32}])
def test_layers_without_positions_are_those_of_transformers(change: dict[str, Any]) -> None:
    theirs = written_out("SmolLM3", {**SIZES, "pad_token_id": None, **change})
    for config in ({**SIZES, "model_type": "smollm3", **change}, theirs):
        spec = spec_of("config.json", config)
        assert [1 - spec.rope_kind(layer) for layer in range(spec.layers)] == theirs["no_rope_layers"]


OLD_GEMMA3 = {**SIZES, "model_type": "gemma3_text", "sliding_window_pattern": 4, "rope_theta": 5e5}
LOCAL_SCALED = {"full_attention": {"rope_type": "default"}, "sliding_attention": LINEAR}


def test_older_files_of_gemma3_mean_what_transformers_reads() -> None:
    for change in ({}, {"rope_scaling": LINEAR}, {"rope_local_base_freq": 50.0}, {"sliding_window_pattern": 8}):
        config = {**OLD_GEMMA3, **change}
        spec = spec_of("config.json", config)
        assert spec == spec_of("config.json", written_out("Gemma3", config))
        assert spec.rope_bases == (5e5, change.get("rope_local_base_freq", 1e4))
        windows = [spec.window(layer) is not None for layer in range(spec.layers)]
        assert windows == [(layer + 1) % config["sliding_window_pattern"] != 0 for layer in range(32)]


def test_older_files_of_olmo3_mean_what_transformers_reads() -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    kinds = ["full_attention", "sliding_attention"] * 16
    for change in ({}, {"rope_scaling": yarn}, {"layer_types": kinds}, {"sliding_window": 64}):
        config = {**SIZES, "model_type": "olmo3", "rope_theta": 5e5, "max_position_embeddings": 65_536, **change}
        spec = spec_of("config.json", config)
        assert spec == spec_of("config.json", written_out("Olmo3", config))
        assert spec.rope_bases == (5e5, 5e5)
        assert [spec.window(layer) for layer in (0, 1, 2, 3)].count(None) == (2 if "layer_types" in change else 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_parameters": LOCAL_SCALED}, r"rope_parameters .*sliding_attention is 'linear'"),
        ({"rope_parameters": LINEAR}, r"rope_parameters .*not a table each for full_attention"),
        ({"sliding_window_pattern": "6"}, r"sliding_window_pattern .*'6' is not a positive number"),
        ({"use_bidirectional_attention": True}, r"use_bidirectional_attention .*True is not None"),
    ],
)
def test_what_gemma3_files_ask_for_and_lakh_does_not_compute_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        spec_of("config.json", {**OLD_GEMMA3, **change})


DEEPSEEK_V3 = {**SIZES, "model_type": "deepseek_v3", "num_key_value_heads": 32}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_interleave": False}, r"rope_interleave .*False is not True"),
        ({"scoring_func": "softmax"}, r"scoring_func .*'softmax' is not 'sigmoid'"),
        ({"attention_bias": True}, r"attention_bias .*True is not False"),
        ({"v_head_dim": 64}, r"v_head_dim .*64 is not qk_nope_head_dim"),
        ({"n_group": 3}, r"top_groups .*4 of 3 groups"),
        ({"n_group": 5}, r"groups .*5 of 256 experts"),
        ({"routed_scaling_factor": "2.5"}, r"routed_scaling_factor .*'2.5' is not float"),
        ({"routed_scaling_factor": 0}, r"weight_scale .*0.0 is not above 0"),
        ({"num_experts_per_tok": 200}, r"top_k .*200, and 4 of 8 groups have 128 experts"),
        ({"num_nextn_predict_layers": 3}, r"num_nextn_predict_layers .*3 is not 0"),
    ],
)
def test_what_deepseek_v3_files_ask_for_and_lakh_does_not_compute_is_refused(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        spec_of("config.json", {**DEEPSEEK_V3, **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, r"attention_bias .*False is not True"),  # the default of transformers
        ({"attention_bias": True, "use_qk_norm": "yes"}, r"use_qk_norm .*'yes' is not true or false"),
        ({"attention_bias": True, "num_nextn_predict_layers": 2}, r"num_nextn_predict_layers .*2 is not 0"),
        ({"attention_bias": True, "n_group": 3}, r"groups .*3 of 128 experts"),
        ({"attention_bias": True, "partial_rotary_factor": 0.1}, r"rotary_size .*3 of heads of 32"),
    ],
)
def test_what_glm_files_ask_for_and_lakh_does_not_compute_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        spec_of("config.json", {**SIZES, "model_type": "glm4_moe", **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qkv_bias": False}, r"qkv_bias .*False is not True"),
        ({"use_sliding_window": True}, r"use_sliding_window .*True is not False"),
        ({"shared_expert_intermediate_size": 2000}, r"shared_expert_.*: 2000 is no multiple of moe_.*, 1408"),
        ({"moe_intermediate_size": 0}, r"moe_intermediate_size .*0 is not a positive number"),
        ({"mlp_only_layers": ["0"]}, r"mlp_only_layers .*is no list of layers"),
        ({"decoder_sparse_step": 2.5}, r"decoder_sparse_step .*2.5 is not a positive number"),
    ],
)
def test_what_qwen2_moe_files_ask_for_and_lakh_does_not_compute_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        spec_of("config.json", {**SIZES, "model_type": "qwen2_moe", **change})


EXPERTS_OF_QWEN = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1408}


@pytest.mark.parametrize(
    ("step", "dense"),
    [
        (1, []),
        (1, [0, 1]),
        (2, []),
        (2, [0, 1]),
        (3, [0, 2, 4, 5]),
        (33, []),
        (1, list(range(32))),
        (1, [5]),
        (2, [3, 4, 9, 31]),
        (3, [0, 8, 99]),
    ],
)
@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe"])
def test_layers_with_experts_are_those_of_transformers(kind: str, step: int, dense: list[int]) -> None:
    config = {**SIZES, **EXPERTS_OF_QWEN, "model_type": kind, "decoder_sparse_step": step, "mlp_only_layers": dense}
    spec = spec_of("config.json", config)
    assert spec.experts is not None
    found = [layer for layer in range(spec.layers) if spec.experts.are_in(layer)]
    assert found == [layer for layer in range(32) if layer not in dense and (layer + 1) % step == 0]
    assert spec.mixture_layers == len(found)
    again = spec_of("config.json", config_of(spec, torch.float32, {}))
    assert [layer for layer in range(spec.layers) if again.experts and again.experts.are_in(layer)] == found


LLAMA4 = {**SIZES, "model_type": "llama4_text", "max_position_embeddings": 1_048_576}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attention_bias": True}, r"attention_bias .*True is not False"),
        ({"num_experts_per_tok": 2}, r"experts.top_k .*is 2, and llama4 needs 1"),
        ({"moe_layers": [1, 2, 5]}, r"moe_layers .*\[1, 2, 5\] are not layers at regular intervals"),
        ({"moe_layers": []}, r"moe_layers .*\[\] are not layers at regular intervals"),
        ({"no_rope_layers": [1, 0, 0, 1] * 8}, r"no_rope_layers .*not at regular intervals"),
        (
            {"layer_types": ["sliding_attention"] * 32},
            r"layer_types .*is not a list of chunked_attention and full_attention for 32",
        ),
        ({"attention_chunk_size": "8192"}, r"attention_chunk_size .*is '8192': not a number of tokens"),
        ({"floor_scale": 0}, r"floor_scale .*is 0: not a number of tokens"),
        ({"attn_scale": "0.1"}, r"attn_scale .*is '0.1', and not a number"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, r"rope_parameters .*scaled \(linear\)"),
    ],
)
def test_what_llama4_files_ask_for_and_lakh_does_not_compute_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        spec_of("config.json", {**LLAMA4, **change})


@pytest.mark.parametrize(
    ("change", "chunk", "growth"),
    [
        ({}, 8192, 8192),
        ({"attn_temperature_tuning": False}, 8192, None),
        ({"attention_chunk_size": 4096, "floor_scale": 100}, 4096, 100),
        ({"attention_chunk_size": None, "layer_types": ["full_attention"] * 32}, None, 8192),
        ({"layer_types": ["full_attention"] * 32, "attn_temperature_tuning": False}, None, None),
        ({"max_position_embeddings": 8193}, 8192, 8192),
        ({"max_position_embeddings": 8192}, None, 8192),  # the query of token 8,191 has a factor
        ({"max_position_embeddings": 8191}, None, None),
    ],
)
def test_chunks_of_llama4_and_the_growth_of_its_queries(
    change: dict[str, Any], chunk: int | None, growth: int | None
) -> None:
    spec = spec_of("config.json", {**LLAMA4, **change})
    assert spec.context == change.get("max_position_embeddings", LLAMA4["max_position_embeddings"])
    assert spec.window(0) == chunk
    assert spec.window(3) is None
    assert (spec.growth_interval, spec.query_growth) == (growth, None if growth is None else 0.1)
    assert spec.has_query_tables == (growth is not None)


def test_the_scaling_of_llama_4_scout() -> None:
    low = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    config = {**LLAMA4, "no_rope_layers": [], "rope_scaling": {**low, "original_max_position_embeddings": 8192}}
    spec = spec_of("config.json", config)
    assert spec.rope_scaling is not None
    assert (spec.rope_scaling.low_frequency, spec.rope_scaling.high_frequency) == (1.0, 1.0)
    assert spec.unrotated_interval == 4
    (cos, _), _ = rotary_tables(spec, torch.arange(5)[None])
    theirs = transformers_frequencies("Llama4", config)
    angles = torch.arange(5)[:, None] * theirs
    assert torch.equal(cos[0, :, 0, : len(theirs)], angles.cos())


def transformers_frequencies(name: str, config: dict[str, Any]) -> torch.Tensor:
    rope = pytest.importorskip("transformers.modeling_rope_utils", reason="pip install transformers")
    theirs = getattr(pytest.importorskip("transformers"), families.CONFIGS[name])(**config)
    found: torch.Tensor = rope.ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")[0]
    return found


@pytest.mark.parametrize("field", ["attention_out_bias", "mlp_bias", "attention_bias"])
def test_what_seed_files_ask_for_and_lakh_does_not_compute_is_refused(field: str) -> None:
    config = {**SIZES, "model_type": "seed_oss", field: field != "attention_bias"}
    with pytest.raises(UserError, match=rf"{field} .*{field != 'attention_bias'} is not {field == 'attention_bias'}"):
        spec_of("config.json", config)


MINIMAX = {**SIZES, "model_type": "minimax_m2", "rope_theta": 5e6}


@pytest.mark.parametrize(
    ("change", "rotated"),
    [
        ({"head_dim": 32, "rotary_dim": 16}, 16),
        ({"rotary_dim": 64}, 64),
        ({"rotary_dim": 64, "partial_rotary_factor": 0.25}, 32),
        ({}, 128),
    ],
)
def test_the_rotated_elements_of_released_minimax_files_are_those_of_transformers(
    change: dict[str, Any], rotated: int
) -> None:
    spec = spec_of("config.json", {**MINIMAX, **change})
    assert spec.rotated_dim == rotated
    assert spec == spec_of("config.json", written_out("MiniMaxM2", {**MINIMAX, **change}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scoring_func": "softmax"}, r"scoring_func .*'softmax' is not 'sigmoid'"),
        ({"router_jitter_noise": 0.1}, r"router_jitter_noise .*0.1 is not 0.0"),
        ({"use_qk_norm": False}, r"use_qk_norm .*False is not True"),
        ({"rotary_dim": 7}, r"rotary_size .*7 of heads of 128"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, r"quantization_config .*the weights are quantized"),
    ],
)
def test_what_minimax_files_ask_for_and_lakh_does_not_compute_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        spec_of("config.json", {**MINIMAX, **change})


def test_the_forms_of_stablelm_follow_from_its_file() -> None:
    config = {**SIZES, "model_type": "stablelm"}
    assert spec_of("config.json", config) == spec_of("config.json", {**config, "qk_layernorm": False})
    spec = spec_of("config.json", {**config, "qk_layernorm": True, "use_parallel_residual": True})
    assert (spec.qk_norm, spec.parallel_residual, spec.attention_bias) == (True, True, False)
    with pytest.raises(UserError, match=r"use_parallel_residual .*1 is not true or false"):
        spec_of("config.json", {**config, "use_parallel_residual": 1})


SANTACODER = {"model_type": "gpt_bigcode", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 99}


@pytest.mark.parametrize("name", ["gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu"])
def test_the_gelu_of_gpt_bigcode_is_by_tanh_or_exact(name: str) -> None:
    assert spec_of("config.json", {**SANTACODER, "activation_function": name}).exact_gelu == (name == "gelu")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"activation_function": "relu"}, r"activation_function .*'relu' is not gelu_pytorch_tanh or .* or gelu; lakh"),
        ({"activation_function": ["gelu"]}, r"activation_function .*\['gelu'\] is not gelu_pytorch_tanh"),
        ({"multi_query": "yes"}, r"multi_query .*'yes' is not true or false"),
        ({"scale_attn_weights": False}, r"scale_attn_weights .*False is not True"),
        ({"add_cross_attention": True}, r"add_cross_attention .*True is not False"),
        ({"n_head": 5}, r"heads .*5 does not divide width 64"),
        ({"n_embd": "64"}, r"n_embd .*'64' is not a whole number"),
        ({"n_positions": 0}, r"context .*0 is not positive"),
    ],
)
def test_what_gpt_bigcode_files_ask_for_and_lakh_does_not_compute_is_refused(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        spec_of("config.json", {**SANTACODER, **change})


def test_kimi_k2_is_a_deepseek_v3() -> None:
    config = {**DEEPSEEK_V3, "architectures": ["DeepseekV3ForCausalLM"], "n_group": 1, "topk_group": 1}
    spec = spec_of("config.json", {**config, "model_type": "kimi_k2"})
    assert spec == spec_of("config.json", config)
    assert spec.family_name == "deepseek_v3"


LONGROPE = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": LONGROPE}, r"short_factors .*has 1 numbers for 16 frequencies"),
        ({"rope_scaling": {**LONGROPE, "long_factor": "all"}}, r"long_factor is not a list of numbers"),
        ({"rope_scaling": {**LONGROPE, "long_factor": [1, 2]}}, r"rope_parameters .*short_factors has 1 numbers"),
        ({"rope_scaling": {**LONGROPE, "long_factor": [-1.0]}}, r"rope_parameters .*not above 0"),
        ({"rope_scaling": LINEAR}, r"rope_parameters .*scaled \(linear\); lakh computes these .*: longrope, unscaled"),
        ({"partial_rotary_factor": "half"}, r"partial_rotary_factor .*'half' is not a number"),
        ({"partial_rotary_factor": 0.1}, r"rotary_size .*3 of heads of 32"),
        ({"attention_bias": True}, r"attention_bias .*True is not False"),
    ],
)
def test_what_phi_files_ask_for_and_lakh_does_not_compute_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        spec_of("config.json", {**SIZES, "model_type": "phi3", **change})


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_longrope_is_computed_within_its_original_context(kind: str) -> None:
    scaling = {"type": kind, "short_factor": [1.25] * 16, "long_factor": [4.0] * 16}
    config = {**SIZES, "model_type": "phi3", "rope_scaling": scaling, "max_position_embeddings": 131_072}
    spec = spec_of("config.json", config)
    assert spec.context == 4096
    assert spec.rope_scaling is not None
    assert spec.rope_scaling.factor == 32
    plain = {**config, "rope_scaling": {**scaling, "type": "longrope"}}  # transformers 5 refuses "su"
    assert spec == spec_of("config.json", written_out("Phi3", {**plain, "pad_token_id": None}))
    with pytest.raises(ConfigError, match=r"context: 4097 is above rope_scaling\.original_context, 4096"):
        replace(spec, context=4097)


def test_the_share_of_a_head_that_is_rotated_is_read_from_both_places() -> None:
    shared = {**SIZES, "model_type": "phi3", "partial_rotary_factor": 0.75}
    spec = spec_of("config.json", shared)
    assert spec.rotary_size == 24
    assert spec == spec_of("config.json", written_out("Phi3", {**shared, "pad_token_id": None}))
    with pytest.raises(UserError, match=r"a share of 0.75 of a head"):
        llama(partial_rotary_factor=0.75)


def test_a_field_of_the_wrong_kind_is_refused_by_name() -> None:
    config = {**SIZES, "model_type": "qwen2", **LATE, "max_window_layers": "all"}
    with pytest.raises(UserError, match="max_window_layers"):
        spec_of("config.json", config)


@pytest.mark.parametrize("name", ["Mistral", "Phi3", "Starcoder2", "Gemma2", "Gemma3", "GptOss"])
def test_windows_cannot_be_switched_off_where_transformers_does_not_read_the_switch(name: str) -> None:
    config = written_out(name, {**SIZES, **CASES[name], "sliding_window": 77})
    spec = spec_of("config.json", {**config, "use_sliding_window": False})
    assert spec == spec_of("config.json", config)
    assert spec.window_tokens == 77


DAMAGED = ("many", "", [], [1, 2], {}, {"a": 1}, -1, 0, 1 << 40, 1.5, float("nan"), float("inf"), True, None)


@pytest.mark.parametrize("case", ["deepseek_v3", "ministral3", "phi3 with longrope", "gemma3"])
def test_a_damaged_field_is_an_error_that_lakh_raises(case: str) -> None:
    config = families.make(case).config.to_dict()
    positions = config["rope_parameters"]
    changes = [{key: value} for key in (*config, "rope_scaling", "quantization_config") for value in DAMAGED]
    changes += [{"rope_parameters": {**positions, key: value}} for key in positions for value in DAMAGED]
    for change in changes:
        with contextlib.suppress(LakhError):
            assert spec_of("config.json", {**config, **change}).layers > 0


MIXED = ["sliding_attention", "full_attention"] * 16


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("llama", {"is_causal": False}, r"is_causal .*lakh computes causal attention only"),
        (
            "llama",
            {"layer_types": MIXED},
            r"layer_types .*is not full_attention everywhere",
        ),
        (
            "smollm3",
            {"layer_types": MIXED, "sliding_window": 77},
            r"layer_types .*is not full_attention everywhere",
        ),
        ("mistral", {"layer_types": MIXED}, r"layer_types .*MistralForCausalLM has windows in all layers or none"),
        ("phi3", {"layer_types": MIXED, "sliding_window": 77}, r"layer_types .*windows in all layers or none"),
        ("phi3", {"num_attention_heads": 0, "partial_rotary_factor": 0.5}, r"heads .*0 is not positive"),
        ("gemma2", {"num_hidden_layers": 10**9}, r"layers .*is above 10,000"),
        ("llama", {"hidden_size": 10**12 + 1}, r"heads .*32 does not divide width 1000000000001; choose one of 1, 73"),
    ],
)
def test_what_a_file_asks_for_and_lakh_does_not_compute_is_refused(
    kind: str, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        spec_of("config.json", {**SIZES, "model_type": kind, **change})


@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_the_original_context_of_the_config_is_taken_before_that_of_the_table(name: str) -> None:
    table = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = {**table, "original_max_position_embeddings": 32}
    config = {**SIZES, **CASES[name], "rope_scaling": scaling, "original_max_position_embeddings": 64}
    spec = spec_of("config.json", {**config, "model_type": name.lower()})
    assert spec == spec_of("config.json", written_out(name, config))
    assert spec.rope_scaling is not None
    assert spec.rope_scaling.original_context == 64


def test_null_for_truncate_is_false() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "truncate": None}
    assert llama(rope_scaling=scaling) == llama(rope_scaling={**scaling, "truncate": False})
