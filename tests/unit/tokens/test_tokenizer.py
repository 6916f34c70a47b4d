from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.corpus import build, read_documents
from lakh.errors import DataError, UserError
from lakh.tokens.tokenizer import SPECIAL_TOKENS, Tokenizer, threads
from lakh.tokens.tokenizer.training import train

SPECIAL_LOOKING = st.lists(st.sampled_from(["a", " ", "\n", "1", "é", *SPECIAL_TOKENS])).map("".join)
TEXTS = st.one_of(st.text(max_size=200), SPECIAL_LOOKING)


@given(text=TEXTS)
def test_any_text_survives_the_round_trip_and_never_becomes_special(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(number >= len(SPECIAL_TOKENS) for number in ids)
    assert tokenizer.encode_batch([text, ""]) == [ids, []]


def test_special_tokens_have_the_first_ids_in_order(tokenizer: Tokenizer) -> None:
    assert [tokenizer.special(token) for token in SPECIAL_TOKENS] == list(range(16))
    assert SPECIAL_TOKENS[:4] == ("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
    assert tokenizer.eot == 0


def test_special_tokens_are_omitted_or_shown_on_request(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a"), tokenizer.eot, *tokenizer.encode("b")]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, show_special=True) == "a<|endoftext|>b"


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("1234567890")) == 10


def test_training_is_the_same_on_every_run(corpus: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    again = train(corpus, tmp_path / "again", vocab=320)
    assert not again.reused
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (tokenizer_folder / "tokenizer.json").read_bytes()
    assert again.vocab == 320


def test_a_complete_tokenizer_is_reused_until_the_settings_change(corpus: Path, tmp_path: Path) -> None:
    first = train(corpus, tmp_path, vocab=300)
    assert train(corpus, tmp_path, vocab=300).reused
    with pytest.raises(UserError, match="--force"):
        train(corpus, tmp_path, vocab=301)
    second = train(corpus, tmp_path, vocab=301, force=True)
    assert (first.vocab, second.vocab) == (300, 301)


def test_the_tokenizer_of_an_exported_model_is_kept(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"has a tokenizer.json that this would replace; choose another --out"):
        train(corpus, tmp_path, vocab=300)
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    assert train(corpus, tmp_path, vocab=300, force=True).vocab == 300


def test_a_file_on_which_the_package_panics_is_refused(tokenizer_folder: Path, tmp_path: Path) -> None:
    content = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    content["model"]["continuing_subword_prefix"] = "longer than a merge"
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="is not a tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_sample_is_a_part_of_the_documents(corpus: Path, tmp_path: Path) -> None:
    whole = sum(len(text.encode()) for b in read_documents(str(corpus), ["text"]) for text in b.column(0).to_pylist())
    assert train(corpus, tmp_path / "whole", vocab=300).sampled_bytes == whole
    part = train(corpus, tmp_path / "part", vocab=300, sample_bytes=whole // 2)
    assert 0 < part.sampled_bytes < whole


def test_a_small_corpus_gives_fewer_tokens_than_requested(corpus: Path, tmp_path: Path) -> None:
    made = train(corpus, tmp_path, vocab=50_000)
    assert made.vocab < made.vocab_asked == 50_000
    assert Tokenizer.load(tmp_path).vocab_size == made.vocab


@pytest.mark.parametrize("vocab", [0, 271])
def test_a_vocabulary_smaller_than_the_bytes_is_rejected(corpus: Path, tmp_path: Path, vocab: int) -> None:
    with pytest.raises(UserError, match="choose 272 or more"):
        train(corpus, tmp_path, vocab=vocab)
    assert train(corpus, tmp_path, vocab=272).vocab == 272


def test_a_missing_or_empty_corpus_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lakh corpus build"):
        train(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "notes.txt").write_text("no code here")
    build([f"own:{tmp_path / 'src'}"], tmp_path / "corpus")
    with pytest.raises(UserError, match="lakh corpus report"):
        train(tmp_path / "corpus", tmp_path / "out")


def test_loading_errors_name_the_problem(tokenizer_folder: Path, tmp_path: Path) -> None:
    assert Tokenizer.load(tokenizer_folder).sha256 == Tokenizer.load(tokenizer_folder / "tokenizer.json").sha256
    with pytest.raises(UserError, match="lakh tokens train"):
        Tokenizer.load(tmp_path)
    with pytest.raises(UserError, match="lakh tokens train"):
        Tokenizer.load(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{ not json")
    with pytest.raises(DataError, match="is not a tokenizer"):
        Tokenizer.load(tmp_path)
    other = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    other["added_tokens"] = []
    other["model"]["vocab"].pop("<|endoftext|>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    without_end = Tokenizer.load(tmp_path)  # refused where the token is needed, not before
    with pytest.raises(UserError, match=r"no token that ends a text.*eos_token"):
        _ = without_end.eot


def test_a_copy_is_byte_for_byte_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    assert Tokenizer.load(tmp_path).sha256 == tokenizer.sha256


def test_half_a_surrogate_pair_is_a_user_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="surrogate"):
        tokenizer.encode("a\ud800")


def test_threads_restores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    with threads():
        assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    assert "TOKENIZERS_PARALLELISM" not in os.environ
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # the user's word stands
    with threads():
        assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
