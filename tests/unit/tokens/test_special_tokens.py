"""The roles of special tokens come from the files of a checkpoint, else from known names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from lakh.errors import DataError, UserError
from lakh.tokens.dataset.packing import pack
from lakh.tokens.loading.stream import TokenSet, TokenSetLoader
from lakh.tokens.tokenizer import FimTokens, Tokenizer


def write(folder: Path, special: list[str], *, begin: str | None = None, **files: dict[str, Any]) -> Path:
    """A byte-level tokenizer with these special tokens after its 256 bytes, and JSON files beside it."""
    words = {word: number for number, word in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(models.BPE(words, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(special)
    if begin is not None:
        made.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, made.token_to_id(begin))]
        )
    made.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_end_tokens_are_those_of_all_files_without_repetition(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        ["<s>", "</s>", "<|eot|>"],
        generation_config={"eos_token_id": [258, 257]},
        config={"eos_token_id": 256, "pad_token_id": 256},  # overruled by generation_config.json
        tokenizer_config={"eos_token": {"content": "</s>"}, "bos_token": "<s>", "add_bos_token": True},
    )
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.end_ids == (258, 257)
    assert (tokenizer.eot, tokenizer.pad_id, tokenizer.begin_ids) == (258, 256, (256,))
    assert Tokenizer.load(folder / "tokenizer.json").end_ids == (258, 257)


@pytest.mark.parametrize("name", ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>"])
def test_a_bare_tokenizer_ends_with_a_known_name(tmp_path: Path, name: str) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, ["<unk>", name]))
    assert (tokenizer.end_ids, tokenizer.begin_ids) == ((257,), ())


def test_text_begins_as_the_tokenizer_says_unless_its_config_says_otherwise(tmp_path: Path) -> None:
    folder = write(tmp_path, ["<s>", "</s>"], begin="<s>")
    assert Tokenizer.load(folder).begin_ids == (256,)
    assert Tokenizer.load(folder).encode("a") == Tokenizer.load(write(tmp_path, ["<s>", "</s>"])).encode("a")
    folder = write(tmp_path, ["<s>"], begin="<s>", tokenizer_config={"bos_token": "<s>", "add_bos_token": False})
    assert Tokenizer.load(folder).begin_ids == ()


@pytest.mark.parametrize(
    ("special", "fim"),
    [
        (["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"], FimTokens(256, 258, 257)),
        (["<fim_prefix>", "<fim_middle>", "<fim_suffix>"], FimTokens(256, 258, 257)),
        (["<fim-prefix>", "<fim-middle>", "<fim-suffix>"], FimTokens(256, 258, 257)),
        (["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], FimTokens(256, 257, 258, has_spm=False)),
        (["▁<PRE>", "▁<MID>", "▁<SUF>"], FimTokens(256, 258, 257)),
        (["[SUFFIX]", "[PREFIX]"], FimTokens(257, 256, None)),
        (["<|fim_prefix|>", "<|fim_suffix|>"], None),
    ],
)
def test_fill_in_the_middle_tokens_of_each_family(tmp_path: Path, special: list[str], fim: FimTokens | None) -> None:
    assert Tokenizer.load(write(tmp_path, special)).fim == fim


def test_ids_outside_the_vocabulary_are_no_end(tmp_path: Path) -> None:
    folder = write(tmp_path, ["</s>"], generation_config={"eos_token_id": [999, True, 256]})
    assert Tokenizer.load(folder).end_ids == (256,)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, ["</s>"])
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(DataError, match="generation_config"):
        Tokenizer.load(folder)


def test_a_corpus_is_packed_with_a_tokenizer_that_lakh_did_not_train(corpus: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, ["<s>", "</s>"], begin="<s>", tokenizer_config={"eos_token": "</s>"}))
    pack(corpus, tokenizer, tmp_path / "tokens")
    tokens = TokenSet.open(tmp_path / "tokens", "train")
    row = TokenSetLoader(tokens, sequence=128, seed=1).read(range(1)).tokens[0]
    assert 257 in row  # </s> ends documents
    with pytest.raises(UserError, match=r"fim_rate.*no fill-in-the-middle tokens"):
        TokenSetLoader(tokens, sequence=128, seed=1, fim_rate=0.5)
    with pytest.raises(UserError, match="repo_name"):
        pack(corpus, tokenizer, tmp_path / "repositories", order="repository")


@pytest.mark.parametrize(
    ("special", "marks"),
    [(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], {257, 258, 259}), (["[PREFIX]", "[SUFFIX]"], {257, 258})],
)
def test_training_with_holes_uses_the_tokens_of_the_family(
    corpus: Path, tmp_path: Path, special: list[str], marks: set[int]
) -> None:
    pack(corpus, Tokenizer.load(write(tmp_path, ["</s>", *special])), tmp_path / "tokens")
    loader = TokenSetLoader(TokenSet.open(tmp_path / "tokens", "train"), sequence=128, seed=1, fim_rate=1.0)
    rows = loader.read(range(loader.num_sequences)).tokens
    assert marks <= set(rows.flatten().tolist())


def test_a_token_set_keeps_the_roles_that_a_checkpoint_states(tmp_path: Path) -> None:
    source = write(tmp_path, ["<|endoftext|>", "<|turn|>"], generation_config={"eos_token_id": 257})
    assert Tokenizer.load(source).eot == 257
    for name, folder, end in (("stated", source, 257), ("bare", tmp_path / "bare", 256)):
        folder.mkdir(exist_ok=True)
        tokenizer = Tokenizer.load(write(folder, ["<|endoftext|>", "<|turn|>"]))
        tokenizer.save(tmp_path / name)
        tokenizer.save_roles(tmp_path / name)
        assert Tokenizer.load(tmp_path / name).eot == end
