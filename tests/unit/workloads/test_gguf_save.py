"""GGUF files that lakh writes: read back as the same model and tokenizer, and understood by other readers."""

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from lakh.errors import UserError
from lakh.spec import Model
from lakh.tokens.tokenizer import SPECIAL_TOKENS, Tokenizer
from lakh.workloads.code.formats import gguf
from lakh.workloads.code.model import CodeModel, init_weights

SPEC = Model(layers=2, width=64, heads=4, kv_heads=2, ffn=96, vocab=512, context=64, rope_base=5000.0)
TEXT = "def add(first, second):\n    return first + second  # 1234\n" * 50


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    inner = tokenizers.Tokenizer(models.BPE())
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    inner.pre_tokenizer = pre_tokenizers.Sequence(parts)
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([TEXT], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    inner.save(str(path))
    return path


def model_of(spec: Model) -> CodeModel:
    model = CodeModel(spec)
    init_weights(model, seed=3)
    return model


def weights_of(model: CodeModel) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


@pytest.mark.parametrize("tied", [True, False])
def test_settings_survive_a_round_trip_as_the_same_model(tmp_path: Path, tokenizer_json: Path, tied: bool) -> None:
    spec = Model(layers=2, width=64, heads=4, kv_heads=2, ffn=96, vocab=512, context=64, rope_base=5000.0, tied=tied)
    model = model_of(spec)
    size = gguf.save(tmp_path / "m.gguf", "tiny", spec, weights_of(model), tokenizer_json)
    assert (tmp_path / "m.gguf").stat().st_size == size
    back = gguf.load(tmp_path / "m.gguf")
    assert back.spec == spec
    assert back.name == "tiny"
    again = CodeModel(spec)
    again.load_state_dict(back.weights, strict=True)
    tokens = torch.arange(40).view(1, -1)
    exact, rounded = (m(tokens).log_softmax(-1) for m in (model, again))
    assert (exact - rounded).abs().max() < 0.02  # 8 bits of weights of size 0.02, over two blocks


def test_the_tokenizer_round_trips_with_its_special_tokens(tmp_path: Path, tokenizer_json: Path) -> None:
    gguf.save(tmp_path / "m.gguf", "tiny", SPEC, weights_of(model_of(SPEC)), tokenizer_json)
    ours, theirs = Tokenizer.load(tokenizer_json), Tokenizer(gguf.load(tmp_path / "m.gguf").tokenizer_json)
    assert theirs.encode(TEXT) == ours.encode(TEXT)
    assert [theirs.special(mark) for mark in SPECIAL_TOKENS] == [ours.special(mark) for mark in SPECIAL_TOKENS]


def test_llama_cpp_loads_the_file_and_tokenizes_equally(tmp_path: Path, tokenizer_json: Path) -> None:
    xllamacpp = pytest.importorskip("xllamacpp", reason="pip install xllamacpp")
    gguf.save(tmp_path / "m.gguf", "tiny", SPEC, weights_of(model_of(SPEC)), tokenizer_json)
    options = xllamacpp.CommonParams()
    options.model.path = str(tmp_path / "m.gguf")
    options.n_ctx, options.n_parallel, options.warmup, options.verbosity = 64, 1, False, -1
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(options)
    prompt = "def add(first, second):\n    return 12"
    answer = server.handle_completions({"prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True})
    usage = (json.loads(answer) if isinstance(answer, str | bytes) else answer)["usage"]
    assert usage["prompt_tokens"] == len(Tokenizer.load(tokenizer_json).encode(prompt))
    assert usage["completion_tokens"] == 3


def test_other_tokenizers_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}')
    with pytest.raises(UserError, match="is of the kind WordLevel; GGUF files hold BPE"):
        gguf.save(tmp_path / "m.gguf", "tiny", SPEC, weights_of(model_of(SPEC)), tmp_path / "tokenizer.json")
