"""Tokenizers in GGUF files: the ids of llama.cpp for each pre-tokenizer and for SentencePiece, roles of tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tests.unit.workloads.llama_cpp import LlamaCpp
from tokenizers import models, normalizers, pre_tokenizers, trainers

from lakh.errors import CorruptCheckpoint, UserError
from lakh.spec.model import Model
from lakh.tokens.tokenizer import Tokenizer
from lakh.workloads.code.formats import gguf, gguf_tokenizer, gguf_tokenizer_save
from lakh.workloads.code.formats.gguf_pretokenizers import PRE_TOKENIZERS
from lakh.workloads.code.model import CodeModel, init_weights

PARTS = [
    "  ",
    "    ",
    " ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "def ",
    "xY",
    "I'll",
    "it's",
    "WE'VE",
    "foo_Bar",
    "HTTPServer",
    "3.14",
]
PARTS += [
    "12345",
    " 7",
    " ==",
    " //",
    "éa",
    " ДА",
    "日本",
    "가나",
    "…",
    "—",
    "“",
    "！",
    "~~",
    "$x",
    "🙂",
    "\u200d",
    "\u3000",
    "\u00a0",
]
SPECIAL = ["<|endoftext|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"]


def soup(count: int, seed: int) -> str:
    draw = random.Random(seed)
    return "".join(draw.choice(PARTS) for _ in range(count))


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
    """A vocabulary whose tokens cross every boundary of a pre-tokenizer: a missing split gives other ids."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False, max_token_length=8
    )
    made.train_from_iterator([soup(40, seed) for seed in range(100)], trainer)
    description = json.loads(made.to_str())
    vocab = description["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = [" ".join(merge) for merge in description["model"]["merges"]]
    kinds = [3 if token in SPECIAL else 1 for token in tokens]
    return {"model": "gpt2", "tokens": tokens, "token_type": kinds, "merges": merges, "eos_token_id": 0}


@pytest.fixture(scope="module")
def sentence_piece() -> dict[str, Any]:
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<start_of_turn>", "<end_of_turn>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=tokens, show_progress=False, max_token_length=8, limit_alphabet=50
    )
    made.train_from_iterator([soup(40, seed) for seed in range(60)], trainer)
    vocab = made.get_vocab()
    pieces = sorted(vocab, key=vocab.__getitem__)
    kinds = [2, 3, 3, *[6] * 256, 3, 3, *[1] * (len(pieces) - 261)]
    scores = [0.0] * 261 + [-float(number) for number in range(len(pieces) - 261)]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {"model": "llama", "tokens": pieces, "token_type": kinds, "scores": scores, **ids}


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
