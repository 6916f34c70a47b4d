from __future__ import annotations

from pathlib import Path

import pytest

from lakh.corpus import build
from lakh.tokens.tokenizer import Tokenizer
from lakh.tokens.tokenizer.training import train

TRAP = '''
def cut_documents(stream, limit):
    """Split a stream of text where a document ends."""
    documents = []
    for part in stream.split("<|endoftext|>"):
        if len(part) > limit:
            documents.append(part[:limit])
        else:
            documents.append(part)
    return documents


def is_hole(token):
    return token in ("<|fim_prefix|>", "<|reserved_3|>")
'''
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 small documents, no two alike."""
    home = tmp_path_factory.mktemp("tokens")
    (home / "proj").mkdir()
    for i in range(120):
        lines = [f"def {WORDS[(i + k) % 8]}_{i}(x):\n    return x + {i * k}\n" for k in range(1 + i % 5)]
        (home / "proj" / f"f{i}.py").write_text("\n".join(lines))
    (home / "proj" / "trap.py").write_text(TRAP)
    build([f"own:{home / 'proj'}"], home / "corpus")
    return home / "corpus"


@pytest.fixture(scope="session")
def tokenizer_folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train(corpus, folder, vocab=320)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)
