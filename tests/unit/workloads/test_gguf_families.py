"""GGUF files of every family: the same tensors after a round trip, and the same numbers in llama.cpp."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tests.unit.workloads import families
from tests.unit.workloads.llama_cpp import LlamaCpp
from tokenizers import decoders, models, pre_tokenizers

from lakh.errors import CorruptCheckpoint, LakhError, UserError
from lakh.spec.model import Experts, Model
from lakh.workloads.code.architectures import POSITIONS, architecture_of, architectures, parameters
from lakh.workloads.code.formats import gguf, gguf_config, gguf_layouts, gguf_rope, hf
from lakh.workloads.code.formats.hf.config import spec_of
from lakh.workloads.code.model import CodeModel

pytest.importorskip("transformers", reason="pip install transformers")
package = pytest.importorskip("gguf", reason="pip install gguf")

CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16},  # llama.cpp takes the head size
    "gemma3": {"query_pre_attn_scalar": 16},
    "qwen3_moe": {"norm_topk_prob": True},
    "gpt_bigcode with many heads of keys, exact GELU": {"activation_function": "gelu_fast"},
}
"""Where llama.cpp has no setting."""
UNSAYABLE = (
    "qwen2 with late windows",
    "qwen2_moe with experts in some layers",
    "qwen3_moe with experts in some layers",
    "qwen3_moe with a layer without experts",
    "llama4 without norms of heads, with experts in all layers",
    "llama4 with chunks and growing queries",
    "llama4 with chunks in every second layer",
)
CASES = [case for case in families.CASES if case not in UNSAYABLE]
WINDOWED = ("mistral", "phi3", "starcoder2")
"""llama.cpp has no windows for them: compared up to 7 tokens."""
NEVER = 11
"""The id that llama.cpp takes as the end of a text where a file names none, and does not generate here."""
PROMPT = [20, 31, 45, 90, 7, 25]
TOLERANCE = 2e-3  # llama.cpp reads GELU from a table of float16; other families differ by 1e-6


def plain_tokenizer() -> bytes:
    """A token for each printable character, so that llama.cpp reports every token at once."""
    vocab = {chr(number): number - 33 for number in range(33, 126)} | {"th": 93, "Ġ": 94, "Ċ": 95}
    made = tokenizers.Tokenizer(models.BPE(vocab, [("t", "h")]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return bytes(made.to_str().encode())


class Exported:
    """A random model of transformers, and the GGUF file that lakh writes of it."""

    def __init__(self, case: str, folder: Path, **changes: Any) -> None:
        self.case = case
        families.make(case, **CHANGES.get(case, {}), **changes).save_pretrained(folder / "hf")
        self.spec, weights = hf.load(folder / "hf")
        # As published models have them: Gemma's norms plus 1 are then exact. In the order of a checkpoint.
        self.weights = {name: tensor.bfloat16().float() for name, tensor in sorted(weights.items())}
        self.path, self.tokenizer = folder / "model.gguf", folder / "tokenizer.json"
        self.tokenizer.write_bytes(plain_tokenizer())
        self.save()

    def save(self, quantization: str = "f32") -> None:
        gguf.save(self.path, "small", self.spec, self.weights, self.tokenizer, quantization=quantization)


@pytest.fixture(scope="module", params=CASES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return Exported(request.param, tmp_path_factory.mktemp("gguf"))


def test_a_round_trip_gives_the_same_model_and_tensors(exported: Exported) -> None:
    loaded = gguf.load(exported.path)
    assert loaded.spec == exported.spec
    assert loaded.weights.keys() == exported.weights.keys()
    assert all(torch.equal(loaded.weights[name], tensor) for name, tensor in exported.weights.items())
    for name, info in parameters(loaded.spec).items():
        if len(info.shape) > 1 and info.shape[-1] > 1:
            stored = loaded.weights.stored(name)
            assert torch.equal(
                torch.from_numpy(stored.rows.view(np.float32).copy()), exported.weights[name].flatten(0, -2)
            )


@torch.no_grad()
def test_llama_cpp_computes_the_same_log_probabilities_and_tokens(exported: Exported, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="pip install xllamacpp")
    if exported.case == "gpt_oss":  # llama.cpp rounds the bounds of YaRN to whole dims
        exported = Exported("gpt_oss", tmp_path, rope_parameters={**families.YARN, "truncate": True})
    model = CodeModel(exported.spec).eval()
    model.load_state_dict(exported.weights)
    theirs = LlamaCpp(exported.path)
    tokens = theirs.greedy(PROMPT, 1 if exported.case in WINDOWED else 16)
    whole = torch.tensor([[*PROMPT, *tokens]])
    expected = model(whole)[0].log_softmax(dim=-1)
    likely = expected[len(PROMPT) - 1 : -1].clone()
    likely[:, NEVER] = -torch.inf
    assert likely.argmax(dim=-1).tolist() == tokens
    found = theirs.log_probabilities([*PROMPT, *tokens[:-1]], top=40)
    assert len(found) == 40
    assert max(abs(float(expected[-2, token]) - value) for token, value in found.items()) < TOLERANCE


@pytest.mark.parametrize("case", ["llama", "qwen2", "starcoder2", "qwen3_moe"])
@torch.no_grad()
def test_transformers_reads_the_same_model_from_the_file(case: str, tmp_path: Path) -> None:
    """Its reader does not know Qwen3's head size, Gemma's bounds, divisors of frequencies, nor the other families."""
    import transformers

    exported = Exported(case, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=exported.path.name, dtype=torch.float32
    )
    ours = CodeModel(exported.spec).eval()
    ours.load_state_dict(exported.weights)
    tokens = torch.tensor([PROMPT])
    assert (theirs.eval()(tokens).logits - ours(tokens)).abs().max() < 1e-5


def test_every_family_has_a_name_in_gguf_files() -> None:
    assert all(one.gguf is not None for one in architectures())


@pytest.mark.parametrize("case", ["qwen2", "gpt_bigcode", "gemma2", "gpt_oss"])
def test_quantized_files_hold_nearly_the_same_numbers(case: str, tmp_path: Path) -> None:
    exported = Exported(case, tmp_path, hidden_size=64, intermediate_size=64)
    exported.save("q8_0")
    loaded = gguf.load(exported.path)
    assert loaded.weights.is_quantized
    for name, tensor in exported.weights.items():
        error = (loaded.weights[name] - tensor).norm() / tensor.norm()
        is_quantized = tensor.dim() > 1 and min(tensor.shape[-2:]) > 1 and name != POSITIONS
        assert error < (0.01 if is_quantized else 1e-6), name


def test_experts_in_mxfp4_are_read(tmp_path: Path) -> None:
    exported = Exported("gpt_oss", tmp_path, hidden_size=64, intermediate_size=64)
    name = "blocks.0.ffn.gate_up.weight"
    kind = package.GGMLQuantizationType.MXFP4
    generator = np.random.default_rng(0)
    gate, up = (generator.integers(0, 256, (5, 64, 34), np.uint8) for _ in range(2))
    for part in (gate, up):
        part[..., ::17] = 120 + part[..., ::17] % 8  # exponents of groups
    reader = package.GGUFReader(exported.path)
    writer = package.GGUFWriter(tmp_path / "mxfp4.gguf", "gpt-oss")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=sub)
    for tensor in reader.tensors:
        replaced = {"blk.0.ffn_gate_exps.weight": gate, "blk.0.ffn_up_exps.weight": up}.get(tensor.name)
        if replaced is None:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        else:
            writer.add_tensor(tensor.name, replaced, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = gguf.load(tmp_path / "mxfp4.gguf").weights[name]
    for at, part in enumerate((gate, up)):
        expected = package.quants.dequantize(part, kind)
        assert np.array_equal(found[:, at::2].numpy(), expected)
    # By hand: half a byte of group 0 is a float of 4 bits, its first byte the exponent.
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    nibble = int(gate[0, 0, 1] & 15)
    by_hand = values[nibble & 7] * (-1) ** (nibble >> 3) * 2.0 ** (int(gate[0, 0, 0]) - 127)
    assert float(found[0, 0, 0]) == by_hand


def test_the_undivided_matrix_of_older_deepseek_files_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = Exported("deepseek_v2", tmp_path)
    whole = {"attention.kv_b.weight": "attn_kv_b.weight"}

    def undivided(spec: Model, name: str, info: Any, values: np.ndarray) -> dict[str, np.ndarray]:
        key = ".".join(name.split(".")[2:])
        return {info.gguf.format("kv"): values} if key in whole else {info.gguf: values}

    keys = gguf_config.keys_of(exported.spec)
    sizes = {"attention.head_count_kv": 4, "attention.key_length": 16, "attention.value_length": 10}
    old = {key: value for key, value in keys.items() if not key.endswith("_mla")} | sizes
    with monkeypatch.context() as patch:
        patch.setattr(gguf_layouts, "to_file", undivided)
        patch.setattr(gguf_config, "keys_of", lambda spec: old)
        exported.save()
    loaded = gguf.load(exported.path)
    assert loaded.spec == exported.spec
    assert all(torch.equal(loaded.weights[name], tensor) for name, tensor in exported.weights.items())


def test_layers_that_predict_further_tokens_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """llama.cpp's files of GLM-4.5 count such a layer, and have its tensors."""
    exported = Exported("glm4_moe", tmp_path)
    keys, real = gguf_config.keys_of(exported.spec), gguf_layouts.to_file
    keys |= {"block_count": exported.spec.layers + 1, "nextn_predict_layers": 1}

    def with_another_layer(spec: Model, name: str, info: Any, values: np.ndarray) -> dict[str, np.ndarray]:
        last = f"blk.{spec.layers}."
        more = {f"{last}nextn.eh_proj.weight": values, f"{last}attn_norm.weight": values}
        return {**real(spec, name, info, values), **(more if name == "norm.weight" else {})}

    with monkeypatch.context() as patch:
        patch.setattr(gguf_layouts, "to_file", with_another_layer)
        patch.setattr(gguf_config, "keys_of", lambda spec: keys)
        exported.save()
    loaded = gguf.load(exported.path)
    assert loaded.spec == exported.spec
    assert loaded.weights.keys() == exported.weights.keys()
    assert "left out 1 layers that predict further tokens" in caplog.text


@pytest.mark.parametrize(
    ("base", "factor", "high"),
    [(500_000.0, 8.0, 4.0), (500_000.0, 32.0, 4.0), (500_000.0, 16.0, 1.0)],
    ids=["Llama 3.1", "Llama 3.2", "Llama 4 Scout"],
)
def test_the_scaling_of_published_models_follows_from_its_divisors(base: float, factor: float, high: float) -> None:
    from lakh.spec.model import RopeScaling

    scaling = RopeScaling(kind="llama3", factor=factor, original_context=8192, high_frequency=high)
    spec = Model(layers=1, width=256, heads=2, kv_heads=1, ffn=32, vocab=64, rope_base=base, rope_scaling=scaling)
    factors = gguf_rope.factors_of(spec)[gguf_rope.FACTORS]
    assert factors.min() == 1
    assert factors.max() == factor
    plain = replace(spec, rope_scaling=None)
    assert gguf_rope.scaling_of("m.gguf", plain, {}, factors) == scaling
    with pytest.raises(UserError, match=r"divisors in rope_freqs\.weight that are not those of Llama 3"):
        gguf_rope.scaling_of("m.gguf", plain, {}, factors[::-1].copy())


@pytest.mark.parametrize(("context", "chunk"), [(20_000, 8192), (8192, None)])
def test_released_llama4_is_exported_with_the_context_of_its_first_chunk(
    context: int, chunk: int | None, tmp_path: Path
) -> None:
    families.make("llama4", max_position_embeddings=context).save_pretrained(tmp_path)
    spec, _ = hf.load(tmp_path)
    assert (spec.context, spec.window(0), spec.growth_interval) == (context, chunk, 8192)
    keys = gguf_config.keys_of(spec)
    assert keys["context_length"] == 8191
    assert "attention.sliding_window" not in keys


@pytest.mark.parametrize(("context", "chunk", "growth"), [(20_000, 8192, 0.1), (8192, None, 0.1), (8191, None, None)])
def test_chunks_of_llama4_are_those_of_its_files(context: int, chunk: int | None, growth: float | None) -> None:
    experts = Experts(count=6, top_k=1, ffn=24, shared=1, normalize=False)
    sizes: dict[str, Any] = {"layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 40, "vocab": 96, "tied": False}
    short = Model(**sizes, family="llama4", experts=experts, qk_norm=True, unrotated_interval=4, context=8191)
    keys = {f"llama4.{key}": value for key, value in gguf_config.keys_of(short).items()}
    keys |= {"general.architecture": "llama4", "llama4.context_length": context}
    spec = gguf_config.spec_of("m.gguf", keys, tensors=["output.weight"], rope_factors=None)
    assert (spec.window(0), spec.window(3), spec.query_growth) == (chunk, None, growth)
    assert replace(spec, context=8191, sliding_window=None, query_growth=None, growth_interval=None) == short


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        ("qwen2 with late windows", {}, "sliding_window: is in other layers"),
        ("qwen2_moe with experts in some layers", {}, "experts.interval: is 2; llama.cpp has experts in all blocks"),
        ("qwen2_moe", {"mlp_only_layers": [0]}, "experts.dense_layers: is set"),
        ("qwen2_moe", {"norm_topk_prob": True}, "experts.normalize: is True; llama.cpp computes the opposite"),
        ("qwen3_moe with experts in some layers", {}, "experts.interval: is 2; llama.cpp has experts in all blocks"),
        ("qwen3_moe with a layer without experts", {}, "experts.dense_blocks: is set; llama.cpp has experts in all"),
        ("qwen3_moe", {"norm_topk_prob": False}, "experts.normalize: is False"),
        ("smollm3", {"no_rope_layer_interval": 2}, "unrotated_interval: is 2; llama.cpp computes 4"),
        ("ministral3", {"sliding_window": 7}, "sliding_window: is set; llama.cpp does not compute it"),
        ("llama4", {"use_qk_norm": False}, "qk_norm: is False; llama.cpp decides by the number of experts, 6"),
        ("llama4", {"no_rope_layers": [1, 0, 1, 0]}, "unrotated_interval: is 2; llama.cpp computes 4"),
        (
            "llama4 with chunks and growing queries",
            {},
            "sliding_window: has chunks of 16, query_growth 0.4; llama.cpp computes 8192 and 0.1",
        ),
        ("olmo2", {"tie_word_embeddings": True}, "tied: is true; llama.cpp needs a head"),
        ("olmo3", {"num_hidden_layers": 3}, "sliding_window: is in other layers"),
        (
            "olmo3",
            {"rope_parameters": {"sliding_attention": {**families.DEFAULT, "rope_theta": 50.0}}},
            "local_rope_base: is missing or of another base",
        ),
        ("gemma", {"tie_word_embeddings": False}, "tied: is false"),
        ("gemma2", {"query_pre_attn_scalar": 9}, "query_scale: is 9; llama.cpp computes 16"),
        ("gemma3", {"query_pre_attn_scalar": 9}, "query_scale: is 9; llama.cpp computes 16"),
        ("gemma3", {"attn_logit_softcapping": 2.0}, "attention_softcap: is set"),
        ("gemma3", {"num_hidden_layers": 3}, "sliding_window: is in other layers"),
        ("gemma2", {"final_logit_softcapping": None}, "logit_softcap: is missing"),
        ("qwen3", {"rope_parameters": families.LLAMA3}, "does not compute llama3 for qwen3"),
        ("llama", {"rope_parameters": {**families.YARN, "beta_fast": 16.0}}, "llama.cpp has 32 and 1"),
        ("gpt_bigcode", {"activation_function": "gelu"}, "exact_gelu: is true; llama.cpp computes GELU by tanh"),
        ("deepseek_v2", {"rms_norm_eps": 1e-5}, "norm_eps: is 1e-05"),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "norm_eps: is 1e-05"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_not_exported(
    case: str, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    families.make(case, **{**CHANGES.get(case, {}), **change}).save_pretrained(tmp_path)
    spec, _ = hf.load(tmp_path)
    with pytest.raises(UserError, match=words):
        gguf_config.keys_of(spec)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"general.architecture": "mamba"},
            "is 'mamba'; lakh loads llama, mistral3, qwen2, qwen3, seed_oss, phi3, smollm3",
        ),
        ({"qwen2.attention.clamp_kqv": 3.0}, "attention.clamp_kqv .*is a setting of qwen2 that lakh does not know"),
        ({"qwen2.expert_weights_scale": 2.5}, "expert_weights_scale .*is 2.5; lakh computes"),
        ({"qwen2.rope.dimension_count": 4}, "is 4 of heads of 8"),
        ({"qwen2.attention.head_count_kv": [2, 1]}, "differs from layer to layer"),
        ({"qwen2.rope.scaling.type": "longrope"}, "is 'longrope'"),
        ({"qwen2.attention.value_length": 4}, "keys have 8 elements without position, values 4"),
    ],
)
def test_settings_that_change_results_are_refused_by_name(change: dict[str, Any], words: str) -> None:
    spec = Model(layers=2, width=32, heads=4, kv_heads=2, ffn=48, vocab=96, family="qwen2", tied=False)
    settings = {f"qwen2.{key}": value for key, value in gguf_config.keys_of(spec).items()}
    settings |= {"general.architecture": "qwen2"}
    assert gguf_config.spec_of("m.gguf", settings, tensors=["output.weight"], rope_factors=None) == spec
    with pytest.raises(UserError, match=words):
        gguf_config.spec_of("m.gguf", {**settings, **change}, tensors=["output.weight"], rope_factors=None)


DAMAGED = ("many", "", [], [1, 2], -1, 0, 1 << 40, 1.5, float("nan"), float("inf"), True)


@pytest.mark.parametrize("case", ["llama", "deepseek_v3", "llama4", "ministral3", "phi3 with longrope", "qwen2_moe"])
def test_a_damaged_setting_is_an_error_that_lakh_raises(case: str) -> None:
    spec = spec_of("config.json", families.make(case).config.to_dict())
    kind = architecture_of(spec).gguf
    settings = {f"{kind}.{key}": value for key, value in gguf_config.keys_of(spec).items()}
    settings |= {"general.architecture": kind, "tokenizer.ggml.tokens": ["a"] * spec.vocab}
    further = f"{kind}.{gguf_config.FURTHER_LAYERS}"
    for key in (*settings, further, *(f"{kind}.{name}" for name in gguf_rope.KEYS)):
        for value in DAMAGED:
            with contextlib.suppress(LakhError):
                found = gguf_config.spec_of(
                    "m.gguf", {**settings, key: value}, tensors=["output.weight"], rope_factors=None
                )
                assert found.layers <= spec.layers
    for value in ("many", [1, 2], -3, 1.5, 1 << 40):
        with pytest.raises(LakhError, match=gguf_config.FURTHER_LAYERS):
            gguf_config.spec_of("m.gguf", {**settings, further: value}, tensors=["output.weight"], rope_factors=None)


def test_files_of_olmo_with_windows_are_of_olmo3(tmp_path: Path) -> None:
    """Those of llama.cpp's converter say of each layer whether it has a window."""
    exported = Exported("olmo3", tmp_path)
    settings = {f"olmo2.{key}": value for key, value in gguf_config.keys_of(exported.spec).items()}
    settings |= {"general.architecture": "olmo2"}
    key = "olmo2.attention.sliding_window_pattern"
    for more in ({}, {key: 4}, {key: [True, True, True, False]}):
        given = {**settings, **more}
        assert gguf_config.spec_of("m.gguf", given, tensors=["output.weight"], rope_factors=None) == exported.spec
    given = {**settings, key: [True, False, True, False]}
    with pytest.raises(
        UserError, match=r"sliding_window_pattern .*is \[True, False, True, False\]; lakh computes \[True"
    ):
        gguf_config.spec_of("m.gguf", given, tensors=["output.weight"], rope_factors=None)
    del settings["olmo2.attention.sliding_window"]
    found = gguf_config.spec_of("m.gguf", settings, tensors=["output.weight"], rope_factors=None)
    assert (found.family, found.sliding_window) == ("olmo2", None)


def test_files_of_minimax_may_say_that_weights_of_experts_sum_to_one() -> None:
    experts = Experts(count=4, top_k=2, ffn=48)
    spec = Model(layers=2, width=32, heads=4, kv_heads=2, ffn=48, vocab=96, family="minimax_m2", tied=False,
                 qk_norm=True, rotary_size=4, experts=experts)  # fmt: skip
    settings = {f"minimax-m2.{key}": value for key, value in gguf_config.keys_of(spec).items()}
    settings |= {"general.architecture": "minimax-m2"}
    for value in (None, True):
        given = settings if value is None else {**settings, "minimax-m2.expert_weights_norm": value}
        assert (
            gguf_config.spec_of(
                "m.gguf", given, tensors=["output.weight", "blk.0.attn_q_norm.weight"], rope_factors=None
            )
            == spec
        )
    given = {**settings, "minimax-m2.expert_weights_norm": False}
    with pytest.raises(UserError, match=r"expert_weights_norm .*is False; lakh computes True only"):
        gguf_config.spec_of("m.gguf", given, tensors=["output.weight"], rope_factors=None)


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("rope_factors_long.weight", "needs rope_factors_short.weight, rope_factors_long.weight"),
        ("phi3.rope.scaling.original_context_length", "original_context_length, and one is missing"),
    ],
)
def test_a_file_with_a_part_of_longrope_is_refused(
    lost: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = Exported("phi3 with longrope", tmp_path)
    factors, keys = gguf_rope.factors_of(exported.spec), gguf_config.keys_of(exported.spec)
    assert keys["context_length"] == 4 * keys["rope.scaling.original_context_length"]
    factors.pop(lost, None)
    keys.pop(lost.removeprefix("phi3."), None)
    with monkeypatch.context() as patch:
        patch.setattr(gguf_rope, "factors_of", lambda spec: factors)
        patch.setattr(gguf_config, "keys_of", lambda spec: keys)
        exported.save()
    with pytest.raises(UserError, match=words):
        gguf.load(exported.path)


def test_missing_and_unknown_tensors_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = Exported("qwen2", tmp_path)
    lost = exported.weights.pop("blocks.1.attention.k_bias.weight")
    exported.save()
    with pytest.raises(CorruptCheckpoint, match=r"has no tensor blk.1.attn_k.bias"):
        gguf.load(exported.path)
    exported.weights["blocks.1.attention.k_bias.weight"] = lost
    real = gguf_layouts.to_file

    def with_another(spec: Model, name: str, info: Any, values: np.ndarray) -> dict[str, np.ndarray]:
        found = real(spec, name, info, values)
        return {**found, "blk.0.attn_qkv.weight": values} if name == "norm.weight" else found

    monkeypatch.setattr(gguf_layouts, "to_file", with_another)
    exported.save()
    with pytest.raises(UserError, match=r"has an unknown tensor blk\.0\.attn_qkv\.weight"):
        gguf.load(exported.path)
