"""The batch detokenizer gives the text of the `tokenizers` package."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakh.tokens.dataset.packing import pack
from lakh.tokens.loading import fim
from lakh.tokens.loading.stream import TokenSet, TokenSetLoader
from lakh.tokens.tokenizer import Tokenizer
from lakh.tokens.tokenizer.detokenizer import BatchDetokenizer


@settings(max_examples=100)
@given(data=st.data())
def test_ids_decode_as_in_the_package_including_split_characters(tokenizer: Tokenizer, data: st.DataObject) -> None:
    spelling = BatchDetokenizer.of(tokenizer.raw)
    assert spelling is not None
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30)
    texts = data.draw(st.lists(ids, max_size=5))
    found = spelling.decode([np.array(text, np.uint16) for text in texts])
    assert [raw.decode(errors="replace") for raw in found] == [tokenizer.decode(text) for text in texts]


def test_other_decoders_are_not_supported(tokenizer: Tokenizer) -> None:
    document = json.loads(tokenizer.raw)
    assert BatchDetokenizer.of(json.dumps({**document, "decoder": {"type": "WordPiece"}}).encode()) is None
    assert BatchDetokenizer.of(json.dumps({**document, "decoder": None}).encode()) is None
    assert BatchDetokenizer.of(b"{}") is None


def test_fim_gives_the_same_rows_with_and_without_the_fast_encoder(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba", reason="the compiled encoder needs numba: pip install 'lakh[corpus]'")
    pack(corpus, tokenizer, tmp_path, heldout_fraction=0)
    rows = {}
    for way, limit in (("package", 1 << 60), ("fast", 1)):
        monkeypatch.setattr(fim, "FAST_FROM_CHARACTERS", limit)
        loader = TokenSetLoader(TokenSet.open(tmp_path, "train"), sequence=256, seed=3, fim_rate=0.8)
        assert loader._fim is not None
        if way == "package":
            loader._fim._detokenizer = None
        rows[way] = loader.read(range(loader.num_sequences)).tokens
        assert (loader._fim._fast is not None) == (way == "fast")
    assert np.array_equal(rows["package"], rows["fast"])
    assert (rows["fast"] == tokenizer.special("<|fim_middle|>")).any()
