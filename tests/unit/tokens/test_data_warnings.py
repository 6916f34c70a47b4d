"""Data that a run can use and its user should know about."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from lakh.spec import Data
from lakh.tokens.dataset.packing import pack
from lakh.tokens.loading import data_warnings as module
from lakh.tokens.loading.data_warnings import data_warnings


def test_a_tokenizer_smaller_than_the_models_vocabulary(corpus: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    pack(str(corpus), str(tokenizer_folder), str(tmp_path), heldout_fraction=0.2)
    data = Data(tokens=str(tmp_path), sequence=16, batch=2, micro_batch=1)
    assert data_warnings(data, 320) == []
    assert data_warnings(data, 512) == []  # rounded up
    [text] = data_warnings(data, 4096)
    assert text.startswith(f"model.vocab = 4,096: the tokenizer of {tmp_path} has 320 entries, so 3,776 rows")
    assert text.endswith("--set model.vocab=320")


def test_a_held_out_set_of_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = SimpleNamespace(heldout=SimpleNamespace(vocab=320, num_documents=1))
    monkeypatch.setattr(module, "open_data", lambda data, vocab: opened)
    [text] = data_warnings(Data(tokens="tokens"), 320)
    assert text.startswith("tokens, heldout: is one document")
    opened.heldout.num_documents = 2
    assert data_warnings(Data(tokens="tokens"), 320) == []
