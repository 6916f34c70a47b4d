"""A tiny random model with a tiny real tokenizer: enough to generate, stream and serve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from lakh.server.engine import Engine
from lakh.spec.model import Model
from lakh.tokens.tokenizer import Tokenizer
from lakh.workloads.code import hf
from lakh.workloads.code.model import CodeModel, init_weights

SPECIAL = [
    "<|endoftext|>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
]
TEXT = ["def add(left, right):\n    return left + right\n", "class Größe:\n    pass  # été, 日本, 🙂\n"]


def tiny_spec(**changes: object) -> Model:
    base = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 320, "context": 96}
    return Model(**{**base, **changes})  # type: ignore[arg-type]


def random_weights(spec: Model, seed: int = 1) -> dict[str, torch.Tensor]:
    """Larger than at the start of a training: scores far enough apart that rounding never decides."""
    model = CodeModel(spec)
    init_weights(model, seed)
    return {
        name: tensor.detach().clone() * (10 if tensor.dim() > 1 else 1) for name, tensor in model.state_dict().items()
    }


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    made.train_from_iterator(TEXT * 4, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture(scope="session")
def make_engine(tokenizer_json: Path) -> Callable[..., Engine]:
    def make(seed: int = 1, options: dict[str, Any] | None = None, **changes: object) -> Engine:
        spec = tiny_spec(**changes)
        tokenizer = Tokenizer.load(tokenizer_json)
        return Engine("tiny", spec, random_weights(spec, seed), tokenizer, device="cpu", **(options or {}))

    return make


@pytest.fixture(scope="session")
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()


@pytest.fixture(scope="session")
def reference(engine: Engine) -> CodeModel:
    """The model of `engine` as it is trained: no cache, no batch, no fused weights."""
    model = CodeModel(engine.spec)
    model.load_state_dict(random_weights(engine.spec))
    return model.requires_grad_(False)


@pytest.fixture
def save_model(tmp_path: Path, tokenizer_json: Path) -> Callable[..., Path]:
    """A tiny model as a Hugging Face directory."""

    def save(tokenizer: Path | None = tokenizer_json, **changes: object) -> Path:
        spec = tiny_spec(**changes)
        hf.save(tmp_path / "tiny", spec, random_weights(spec), tokenizer)
        return tmp_path / "tiny"

    return save


@pytest.fixture
def model_dir(save_model: Callable[..., Path]) -> Path:
    """The model of `engine` as a Hugging Face directory."""
    return save_model()
