"""A folder with vocab.json and merges.txt gives the ids that transformers gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tests.unit.workloads.small_tokenizers import SPECIAL, soup
from tokenizers import models, pre_tokenizers, trainers

from lakh.errors import CorruptCheckpoint, UserError
from lakh.tokens.tokenizer import Tokenizer, convert

ADDED = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<tool_call>"]
FLAGS = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, int], str]:
    """vocab.json and merges.txt whose tokens cross every boundary: a missing split gives other ids."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    made.train_from_iterator([soup(40, seed) for seed in range(200)], trainer)
    vocab, merges = made.model.save(str(tmp_path_factory.mktemp("words")))
    return json.loads(Path(vocab).read_text(encoding="utf-8")), Path(merges).read_text(encoding="utf-8")


def write(folder: Path, words: tuple[dict[str, int], str], **changes: Any) -> Path:
    """A folder in the form of Qwen2.5-Coder's."""
    vocab, merges = words
    decoder = {
        str(len(vocab) + at): {"content": token, "special": token.startswith("<|"), **FLAGS}
        for at, token in enumerate(ADDED)
    }
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": decoder,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        **changes,
    }
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "config.json").write_text('{"model_type": "qwen2"}', encoding="utf-8")
    return folder


TEXTS = [soup(30, seed) for seed in range(1000, 1200)]
TEXTS += ["", "A\u030angstro\u0308m e\u0301", "a <tool_call> b<tool_call>", "ﬁ Å", *SPECIAL]


def test_ids_are_those_of_transformers(tmp_path: Path, words: tuple[dict[str, int], str]) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    write(tmp_path, words)
    ours = Tokenizer.load(tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text, split_special_tokens=True)["input_ids"], text
    inner = tokenizers.Tokenizer.from_buffer(ours.raw)
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|>\n"]:
        assert inner.encode(text).ids == theirs(text)["input_ids"], text
    assert ours.end_ids == (len(words[0]) + ADDED.index("<|im_end|>"),)
    assert ours.pad_id == len(words[0])
    assert ours.vocab_size == len(words[0]) + len(ADDED)


FAR = {
    "added_tokens_decoder": {"5000": {"content": "<|endoftext|>"}},
    "additional_special_tokens": [],
    "eos_token": None,
}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (
            {"tokenizer_class": "GPT2Tokenizer"},
            r"tokenizer_class .*'GPT2Tokenizer', from which .*tokenizer\.json there",
        ),
        ({"tokenizer_class": None}, r"tokenizer_class .*None"),
        ({"add_prefix_space": True}, "tokenizer_class"),
        ({"eos_token": "<|never|>"}, r"names <\|never\|> as a special token, which has no id"),
        (FAR, r"gives <\|endoftext\|> the id 5000"),
    ],
)
def test_what_does_not_follow_from_the_files_is_refused(
    change: dict[str, Any], found: str, tmp_path: Path, words: tuple[dict[str, int], str]
) -> None:
    with pytest.raises(UserError, match=found):
        convert(str(write(tmp_path, words, **change)))


def test_an_added_token_without_a_description_is_refused(tmp_path: Path, words: tuple[dict[str, int], str]) -> None:
    write(tmp_path, words)
    (tmp_path / "added_tokens.json").write_text('{"<|new|>": 4000}')
    with pytest.raises(UserError, match=r"added_tokens\.json: has <\|new\|>, which added_tokens_decoder"):
        convert(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "content"), [("vocab.json", "[]"), ("vocab.json", '{"a": "b"}'), ("merges.txt", "a b c\n")]
)
def test_damaged_files_are_named(file: str, content: str, tmp_path: Path, words: tuple[dict[str, int], str]) -> None:
    write(tmp_path, words)
    (tmp_path / file).write_text(content)
    with pytest.raises(CorruptCheckpoint, match=file.replace(".", r"\.")):
        convert(str(tmp_path))
