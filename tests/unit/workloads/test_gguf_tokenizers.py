"""Tokenizers in GGUF files: the ids of llama.cpp for each pre-tokenizer and for SentencePiece, roles of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.workloads.llama_cpp import LlamaCpp
from tests.unit.workloads.small_tokenizers import byte_level_settings, sentence_piece_settings, soup

from lakh.errors import CorruptCheckpoint, UserError
from lakh.spec.model import Model
from lakh.tokens.tokenizer import Tokenizer
from lakh.tokens.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from lakh.workloads.code.formats import gguf, gguf_tokenizer, gguf_tokenizer_save
from lakh.workloads.code.model import CodeModel, init_weights


def write(folder: Path, settings: dict[str, Any]) -> Path:
    """A small model with the tokenizer of these settings, as lakh writes it."""
    found = {f"tokenizer.ggml.{key}": value for key, value in settings.items()}
    tokenizer_json, files = gguf_tokenizer.read("m.gguf", found)
    for name, content in {"tokenizer.json": tokenizer_json, **files}.items():
        (folder / name).write_bytes(content)
    spec = Model(layers=1, width=32, heads=2, kv_heads=1, ffn=32, vocab=len(settings["tokens"]), context=64, tied=True)
    model = CodeModel(spec)
    init_weights(model, 1)
    path = folder / "model.gguf"
    gguf.save(path, "small", spec, dict(model.state_dict()), folder / "tokenizer.json", quantization="f32")
    return path


@pytest.fixture(scope="module")
def byte_level() -> dict[str, Any]:
    return byte_level_settings()


@pytest.fixture(scope="module")
def sentence_piece() -> dict[str, Any]:
    return sentence_piece_settings()


@pytest.mark.parametrize(
    "pre", list(dict.fromkeys({one.patterns: name for name, one in PRE_TOKENIZERS.items()}.values()))
)
def test_each_pre_tokenizer_gives_the_ids_of_llama_cpp(pre: str, byte_level: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="pip install xllamacpp")
    theirs = LlamaCpp(write(tmp_path, {**byte_level, "pre": pre}))
    ours, again = (
        Tokenizer(raw)
        for raw in ((tmp_path / "tokenizer.json").read_bytes(), gguf.load(tmp_path / "model.gguf").tokenizer_json)
    )
    for text in [
        soup(150, 1000),
        soup(150, 1001),
        "def f(x):\n        return x  # it's 12345\n\n\n",
        "<|fim_prefix|> a",
    ]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ids == again.encode(text)
        assert ours.decode(ids) == text


@pytest.mark.parametrize("has_prefix", [True, False], ids=["Llama", "Gemma"])
def test_sentence_piece_gives_the_ids_of_llama_cpp(
    has_prefix: bool, sentence_piece: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("xllamacpp", reason="pip install xllamacpp")
    theirs = LlamaCpp(write(tmp_path, {**sentence_piece, "add_space_prefix": has_prefix}))
    ours = Tokenizer.load(tmp_path)
    assert gguf.load(tmp_path / "model.gguf").tokenizer_json == ours.raw
    for text in [soup(150, 1000), soup(150, 1001), "def f(x):\n        return x  # it's 12345\n\n\n", "a 語 <s> b"]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == text
    assert theirs.encode("a", begin=True)[:1] == list(ours.begin_ids) == [1]


def test_roles_of_tokens_and_the_chat_template_are_read_and_written(byte_level: dict[str, Any], tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    settings = {**byte_level, "pre": "qwen2", "eos_token_id": 1, "padding_token_id": 5, "bos_token_id": 0}
    found = {f"tokenizer.ggml.{key}": value for key, value in settings.items()} | {"tokenizer.chat_template": template}
    tokenizer_json, files = gguf_tokenizer.read("m.gguf", found)
    for name, content in {"tokenizer.json": tokenizer_json, **files}.items():
        (tmp_path / name).write_bytes(content)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.end_ids == (1, 0, 5)  # stated, and known by their names
    assert (tokenizer.begin_ids, tokenizer.pad_id) == ((), 5)
    assert tokenizer.fim is not None
    assert tokenizer.fim[:3] == (2, 3, 4)
    spec = Model(layers=1, width=32, heads=2, kv_heads=1, ffn=32, vocab=1600)
    keys = gguf_tokenizer_save.keys_of(tmp_path / "tokenizer.json", spec)
    assert keys["tokenizer.chat_template"] == template
    expected = {"pre": "qwen2", "eos_token_id": 1, "eot_token_id": 0, "padding_token_id": 5, "add_bos_token": False}
    expected |= {"fim_pre_token_id": 2, "fim_suf_token_id": 3, "fim_mid_token_id": 4, "fim_sep_token_id": 5}
    assert {key: keys[f"tokenizer.ggml.{key}"] for key in expected} == expected
    assert keys["tokenizer.ggml.tokens"][-1] == "<|unused_1599|>"
    assert keys["tokenizer.ggml.token_type"][-1] == 5


def test_the_separator_that_code_gemma_writes_after_a_middle_ends_a_text(
    sentence_piece: dict[str, Any], tmp_path: Path
) -> None:
    turn, at = (sentence_piece["tokens"].index(token) for token in ("<end_of_turn>", "<|file_separator|>"))
    raw, files = gguf_tokenizer.read("m", {f"tokenizer.ggml.{key}": value for key, value in sentence_piece.items()})
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [2, turn, at]
    (tmp_path / "tokenizer.json").write_bytes(raw)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')  # as published
    assert Tokenizer.load(tmp_path).end_ids == (2, at)
    spec = Model(layers=1, width=32, heads=2, kv_heads=1, ffn=32, vocab=1600)
    keys = gguf_tokenizer_save.keys_of(tmp_path / "tokenizer.json", spec)
    ends = {"eos_token_id": 2, "fim_sep_token_id": at}
    assert {key: keys[f"tokenizer.ggml.{key}"] for key in ends} == ends


def test_fim_tokens_with_unknown_names_are_those_that_the_file_states(
    byte_level: dict[str, Any], tmp_path: Path
) -> None:
    tokens = [token.replace("<|fim_", "<hole_") for token in byte_level["tokens"]]
    for keys in (("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")):  # of now, and of older files
        stated = {f"{key}_token_id": number for key, number in zip(keys, (2, 3, 4), strict=True)}
        settings = {**byte_level, "tokens": tokens, "pre": "gpt-2", **stated}
        raw, files = gguf_tokenizer.read("m", {f"tokenizer.ggml.{key}": value for key, value in settings.items()})
        for name, content in {"tokenizer.json": raw, **files}.items():
            (tmp_path / name).write_bytes(content)
        fim = Tokenizer.load(tmp_path).fim
        assert fim is not None
        assert fim[:3] == (2, 3, 4)


def test_an_ordinary_token_named_as_an_end_does_not_end_a_text(byte_level: dict[str, Any], tmp_path: Path) -> None:
    settings = {**byte_level, "tokens": [*byte_level["tokens"], "</s>"], "token_type": [*byte_level["token_type"], 1]}
    _, files = gguf_tokenizer.read("m", {f"tokenizer.ggml.{key}": value for key, value in settings.items()})
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [0, 1, 5]


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"pre": "viking"}, UserError, "tokenizer.ggml.pre .*is 'viking'; lakh knows smollm"),
        ({"model": "rwkv"}, UserError, "is of the kind 'rwkv'"),
        ({"tokens": None}, UserError, "is missing"),
        ({"model": "llama"}, CorruptCheckpoint, "has no scores"),
        ({"token_type": [1]}, CorruptCheckpoint, "tokens repeat, or lack a type"),
        ({"merges": ["x"]}, CorruptCheckpoint, "damaged tokenizer"),
    ],
)
def test_other_tokenizers_are_refused(
    change: dict[str, Any], kind: type[Exception], words: str, byte_level: dict[str, Any]
) -> None:
    settings = {**byte_level, "pre": "gpt-2", **change}
    with pytest.raises(kind, match=words):
        gguf_tokenizer.read("m.gguf", {f"tokenizer.ggml.{key}": value for key, value in settings.items()})


def test_tokenizers_that_llama_cpp_would_not_reproduce_are_not_written(
    byte_level: dict[str, Any], sentence_piece: dict[str, Any], tmp_path: Path
) -> None:
    spec = Model(layers=1, width=32, heads=2, kv_heads=1, ffn=32, vocab=1600)
    path = tmp_path / "tokenizer.json"

    def refuse(settings: dict[str, Any], change: Any, words: str) -> None:
        raw, _ = gguf_tokenizer.read("m", {f"tokenizer.ggml.{key}": value for key, value in settings.items()})
        description = json.loads(raw)
        change(description)
        path.write_text(json.dumps(description))
        with pytest.raises(UserError, match=words):
            gguf_tokenizer_save.keys_of(path, spec)

    pattern = {"type": "Split", "pattern": {"Regex": "[a-c]+"}, "behavior": "Isolated", "invert": False}
    refuse({**byte_level, "pre": "gpt-2"}, lambda it: it.update(pre_tokenizer=pattern), "without a name in GGUF files")
    refuse(sentence_piece, lambda it: it["model"]["merges"].pop(7), "merges that do not follow from scores")
    refuse(sentence_piece, lambda it: it.update(normalizer={"type": "NFKC"}), "normalizes by")
