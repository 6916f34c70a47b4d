"""Hugging Face directories: exports load in transformers with the same numbers, and load back unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tokenizers
import torch
from tests.unit.tokens.sentence_piece_message import message
from tokenizers import decoders, models, pre_tokenizers, trainers

from lakh import storage
from lakh.errors import CorruptCheckpoint, LakhError, UserError
from lakh.server.model import weights as model_weights
from lakh.spec.model import Model
from lakh.tokens.tokenizer import Tokenizer
from lakh.workloads.code.architectures import parameters
from lakh.workloads.code.formats import gguf, hf
from lakh.workloads.code.model import CodeModel, init_weights

SPECIAL = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>"]
TEXTS = ["", "def f(x):\n    return x", "  spaces , before . punctuation ! ", "Größe 日本 🙂\t\r\n", "a" * 40]

tied = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 320, "context": 64}
untied = {**tied, "tied": False, "kv_heads": 1, "rope_base": 50_000.0, "norm_eps": 1e-6}
full = {**tied, "kv_heads": 4, "layers": 1}
normed = {**tied, "qk_norm": True}


def make(settings: dict[str, Any], seed: int = 3) -> tuple[Model, CodeModel, dict[str, torch.Tensor]]:
    spec = Model(**settings)
    model = CodeModel(spec)
    init_weights(model, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.dim() > 1 else 1.5)  # norms that are not 1: a mix-up of names shows
    return spec, model.eval(), {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    made.train_from_iterator(TEXTS, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.mark.parametrize(
    "settings", [tied, untied, full, normed], ids=["tied", "untied", "full attention", "normed queries"]
)
def test_the_table_of_parameters_is_the_state_dict_and_names_every_hf_tensor(settings: dict[str, Any]) -> None:
    _, model, weights = make(settings)
    theirs = [info.hf for info in parameters(model.spec).values()]
    assert len(set(theirs)) == len(weights)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == hf.shapes(model.spec)


@pytest.mark.parametrize("settings", [tied, untied], ids=["tied", "untied"])
@pytest.mark.parametrize("shard_bytes", [hf.SHARD_BYTES, 20_000], ids=["one file", "shards"])
def test_a_round_trip_changes_nothing(
    tmp_path: Path, tokenizer_json: Path, settings: dict[str, Any], shard_bytes: int
) -> None:
    spec, _, weights = make(settings)
    files = hf.save(tmp_path, spec, weights, tokenizer_json, shard_bytes=shard_bytes)
    assert sorted(files) == storage.list_dir(tmp_path)
    assert files[-1] == "config.json"
    assert (len([name for name in files if name.endswith(".safetensors")]) > 1) == (shard_bytes == 20_000)
    spec_back, weights_back = hf.load(tmp_path)
    assert spec_back == spec
    assert weights_back.keys() == weights.keys()
    assert all(torch.equal(weights_back[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    "settings",
    [
        {"family": "granite"},
        {"family": "gemma2", "head_size": 16},
        {"family": "gemma3", "qk_norm": True, "head_size": 16},
        {"family": "smollm3"},
        {"family": "phi3", "tied": False},
    ],
    ids=lambda settings: settings["family"],
)
def test_a_model_without_the_options_of_its_family_loads_in_transformers(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    transformers: Any = pytest.importorskip("transformers", reason="pip install transformers")
    spec, model, weights = make({**tied, **settings})
    hf.save(tmp_path, spec, weights, None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.randint(1, spec.vocab, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (theirs(tokens).logits - model(tokens)).abs().max() < 1e-4  # float32 sums in another order


def test_weights_keep_their_type(tmp_path: Path) -> None:
    spec, _, weights = make(tied)
    hf.save(tmp_path, spec, {name: tensor.bfloat16() for name, tensor in weights.items()}, None)
    assert hf.load(tmp_path)[1]["embed.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_new_export_leaves_no_shard_of_the_old_one(tmp_path: Path) -> None:
    spec, _, weights = make(tied)
    hf.save(tmp_path, spec, weights, None, shard_bytes=20_000)
    (tmp_path / "notes.txt").write_text("mine")
    files = hf.save(tmp_path, spec, weights, None)
    assert storage.list_dir(tmp_path) == sorted([*files, "notes.txt"])


def test_an_interrupted_export_has_no_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, _, weights = make(tied)
    hf.save(tmp_path, spec, weights, None)

    def fail(*_: object, **__: object) -> bytes:
        raise RuntimeError("pulled the plug")

    monkeypatch.setattr(safetensors.torch, "save", fail)
    with pytest.raises(RuntimeError, match="plug"):
        hf.save(tmp_path, spec, weights, None)
    assert not (tmp_path / "config.json").exists()


# --- transformers -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [tied, untied, full, normed], ids=["tied", "untied", "full attention", "normed queries"]
)
def test_transformers_loads_our_export_with_equal_logits_and_greedy_tokens(
    tmp_path: Path, tokenizer_json: Path, settings: dict[str, Any]
) -> None:
    import transformers

    spec, ours, weights = make(settings)
    hf.save(tmp_path, spec, weights, tokenizer_json, shard_bytes=20_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    theirs.generation_config.eos_token_id = None  # both go on to the end: more tokens to compare
    for seed, length in enumerate([1, 2, 7, 30]):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, spec.vocab, (1, length), generator=generator)
        with torch.no_grad():
            difference = (theirs(tokens).logits - ours(tokens)).abs().max().item()
            assert difference < 1e-4  # float32 sums in another order; a wrong rotary order would give about 1
            after = theirs.generate(tokens, max_new_tokens=24, do_sample=False)
            for _ in range(24):
                tokens = torch.cat((tokens, ours(tokens)[:, -1:].argmax(dim=-1)), dim=1)
        assert after.tolist() == tokens.tolist()


def test_transformers_reads_the_same_tokenizer(tmp_path: Path, tokenizer_json: Path) -> None:
    import transformers

    spec, _, weights = make(tied)
    hf.save(tmp_path, spec, weights, tokenizer_json)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == theirs.bos_token_id == 0
    assert theirs.convert_tokens_to_ids("<|fim_middle|>") == 2
    assert theirs.pad_token == "<|fim_pad|>"
    assert set(SPECIAL) == set(theirs.all_special_tokens)
    assert theirs.decode([0, 1, 2, 3], skip_special_tokens=True) == ""


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_llama_of_transformers_loads(tmp_path: Path, is_tied: bool) -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        max_position_embeddings=64,
        tie_word_embeddings=is_tied,
        rope_parameters={"rope_type": "default", "rope_theta": 30_000.0},
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    spec, weights = hf.load(tmp_path)
    assert (spec.tied, spec.rope_base, spec.norm_eps) == (is_tied, 30_000.0, 1e-6)
    ours = CodeModel(spec)
    ours.load_state_dict(weights)
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        assert (theirs(tokens).logits - ours(tokens)).abs().max().item() < 1e-4


# --- what comes in ------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    spec, _, weights = make(tied)
    hf.save(tmp_path, spec, weights, None)
    return tmp_path


def edit(folder: Path, changes: dict[str, Any], remove: tuple[str, ...] = ()) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in remove}))


def test_older_configs_with_fewer_fields_load(folder: Path) -> None:
    edit(folder, {"rope_theta": 77_000.0}, remove=("rope_parameters", "head_dim", "architectures"))
    assert hf.load(folder)[0].rope_base == 77_000.0
    edit(folder, {}, remove=("rope_theta",))
    assert hf.load(folder)[0].rope_base == 10_000.0


REFUSED = [
    ({"attention_bias": "yes"}, "attention_bias.*'yes' is not true or false"),
    ({"mlp_bias": 1}, "mlp_bias.*1 is not true or false"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"rope_parameters": None, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "no factor"),
    ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "factor is '2'"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "rope_parameters"),
    ({"rope_parameters": 7}, "rope_parameters"),
    ({"head_dim": "16"}, "head_dim"),
    ({"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]}, "mamba2.*LlamaForCausalLM.*Gemma2ForCausalLM"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"hidden_size": "32"}, "hidden_size"),
    ({"hidden_size": 32.5}, "hidden_size"),
    ({"num_hidden_layers": True}, "num_hidden_layers"),
    ({"num_attention_heads": 5}, "heads"),
    ({"vocab_size": None}, "vocab_size"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_unsupported_config_fields_are_named(folder: Path, changes: dict[str, Any], words: str) -> None:
    edit(folder, changes)
    with pytest.raises(UserError, match=words):
        hf.load(folder)


def test_a_tied_model_may_store_an_equal_head_only(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    table = weights["model.embed_tokens.weight"]
    safetensors.torch.save_file({**weights, "lm_head.weight": table.clone()}, path)
    assert "head.weight" not in hf.load(folder)[1]
    safetensors.torch.save_file({**weights, "lm_head.weight": table + 1}, path)
    with pytest.raises(UserError, match="tie_word_embeddings"):
        hf.load(folder)


def test_a_tied_model_that_was_saved_without_a_head_has_other_names(folder: Path) -> None:
    path = folder / "model.safetensors"
    _, expected = hf.load(folder)
    weights = safetensors.torch.load_file(path)
    safetensors.torch.save_file({name.removeprefix("model."): tensor for name, tensor in weights.items()}, path)
    _, found = hf.load(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    edit(folder, {"tie_word_embeddings": False})
    with pytest.raises(CorruptCheckpoint, match=r"no tensor lm_head\.weight"):
        hf.load(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantized_weights_without_a_word_in_the_config_are_refused(folder: Path, dtype: torch.dtype) -> None:
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    safetensors.torch.save_file({**weights, name: weights[name].to(dtype)}, path)
    with pytest.raises(UserError, match=r"up_proj.*quantized"):
        hf.load(folder)


def test_a_tokenizer_in_another_format_is_named_with_the_way_to_convert_it(folder: Path) -> None:
    (folder / "spiece.model").write_bytes(b"sentencepiece")
    with pytest.raises(UserError, match=r"spiece\.model is there.*AutoTokenizer"):
        model_weights.read(folder)


def test_a_folder_with_a_tokenizer_of_sentence_piece_is_read_and_exported(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    edit(folder, {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None})
    (folder / "tokenizer.model").write_bytes(message())
    model = model_weights.read(folder)
    ids = Tokenizer.load(folder).encode("aab ba")
    hf.save(tmp_path / "out", model.spec, model.weights, model.tokenizer_json)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("aab ba")["input_ids"] == [1, *ids]
    gguf.save(tmp_path / "m.gguf", "m", model.spec, model.weights, model.tokenizer_json, quantization="f32")
    again = Tokenizer.load(model_weights.read(tmp_path / "m.gguf").tokenizer_json)
    assert (again.encode("aab ba"), again.end_ids, again.begin_ids) == (ids, (2,), (1,))


def test_weights_that_cannot_be_opened_are_not_called_damaged(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()  # unlike a file without permission, it cannot be opened by root either
    with pytest.raises(UserError, match=r"model\.safetensors: is a directory; check the path"):
        hf.load(folder)


def test_a_damaged_number_of_further_layers_takes_no_memory(folder: Path) -> None:
    expected = hf.load(folder)[1]
    edit(folder, {"num_nextn_predict_layers": 10**12})
    assert hf.load(folder)[1].keys() == expected.keys()


def test_an_unknown_tensor_is_rejected(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    safetensors.torch.save_file({**weights, **frequencies}, path)
    hf.load(folder)  # these follow from the config
    safetensors.torch.save_file({**weights, "model.vision.weight": torch.ones(4)}, path)
    with pytest.raises(UserError, match=r"model\.vision"):
        hf.load(folder)


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def other_shape(folder: Path) -> None:
    edit(folder, {"intermediate_size": 65})


def one_missing(folder: Path) -> None:
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    safetensors.torch.save_file(weights, folder / "model.safetensors")


def shards(folder: Path, files: dict[str, str]) -> None:
    """The weights as a shard, one.safetensors, with an index of the tensors in `files`."""
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    (folder / hf.INDEX).write_text(json.dumps({"weight_map": files}))


def shard_missing(folder: Path) -> None:
    shards(folder, {"model.norm.weight": "gone.safetensors"})


def shard_outside(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    outside.write_bytes((folder / "model.safetensors").read_bytes())
    shards(folder, {"model.norm.weight": "../outside.safetensors"})


def index_is_a_list(folder: Path) -> None:
    shards(folder, {})
    (folder / hf.INDEX).write_text("[]")


def twice_in_shards(folder: Path) -> None:
    shards(folder, {"model.norm.weight": "two.safetensors", "model.embed_tokens.weight": "one.safetensors"})
    norm = safetensors.torch.load_file(folder / "one.safetensors")["model.norm.weight"]
    safetensors.torch.save_file({"model.norm.weight": norm + 1}, folder / "two.safetensors")


def config_is_cut(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text()[:50])


DAMAGES = [cut, other_shape, one_missing, shard_missing, shard_outside, index_is_a_list, twice_in_shards, config_is_cut]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_a_data_error(folder: Path, damage: Any) -> None:
    damage(folder)
    with pytest.raises(CorruptCheckpoint):
        hf.load(folder)


def test_a_whole_file_is_read_before_the_index_of_shards_as_in_transformers(folder: Path) -> None:
    expected = hf.load(folder)
    (folder / hf.INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "gone.safetensors"}}))
    spec, weights = hf.load(folder)
    assert spec == expected[0]
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected[1].items())


def test_pickled_weights_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickled"):
        hf.load(folder)


def test_a_tokenizer_that_does_not_fit_the_model_is_rejected(tmp_path: Path, tokenizer_json: Path) -> None:
    spec, _, weights = make({**tied, "vocab": 200})
    with pytest.raises(UserError, match="vocabulary has 200"):
        hf.save(tmp_path / "out", spec, weights, tokenizer_json)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(LakhError, match="not a tokenizer"):
        hf.save(tmp_path / "out", spec, weights, tmp_path / "tokenizer.json")
    assert not (tmp_path / "out").exists()
