"""lakh: train code language models from one laptop to one lakh (100,000) GPUs, with one tool.

    import lakh
    lakh.build_corpus(["src"], out="corpus")

The functions are those of lakh.api, imported when they are first used.
"""

from typing import Any

__version__ = "0.1.0"

_API = ("build_corpus", "load_engine", "pack_tokens", "resume", "serve", "train", "train_tokenizer")


def __getattr__(name: str) -> Any:
    if name not in _API:  # also asked for submodules, before Python imports them
        raise AttributeError(f"module 'lakh' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("lakh.api"), name)
