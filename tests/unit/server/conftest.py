"""A tiny random model with a tiny real tokenizer: enough to generate, stream and serve."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from lakh.server.engine import Completion, Engine, SamplingParams
from lakh.server.model.block_pool import BLOCK_TOKENS
from lakh.server.model.inference import SequenceChunk
from lakh.server.sampling.tokens import NoiseKeys, gumbel_noise, probabilities
from lakh.spec.model import Model
from lakh.tokens.tokenizer import Tokenizer
from lakh.workloads.code.formats import hf
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
    """Larger than an initialization: logits are far enough apart that rounding never decides."""
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


class FakeDecoder:
    """Runs the GPU's bursts (gpu/decode.py) with the network: uses the blocks from the start and runs steps at launch,
    also for sequences that have finished since.
    """

    max_sequences, max_steps = 128, 20

    def __init__(self, engine: Engine) -> None:
        self.runner = engine.runner
        self.launches: list[int] = []
        self.num_bursts = self.num_reads = 0

    def multi_step(
        self, tokens: Sequence[int], positions: Sequence[int], blocks: Sequence[Sequence[int]]
    ) -> PlayedBurst:
        self.num_bursts += 1
        width = self.runner.network.spec.context // BLOCK_TOKENS + 1
        scratch = self.runner.cache.num_blocks - 1
        tables = [[*table, *[scratch] * (width - len(table))] for table in blocks]
        return PlayedBurst(self, list(tokens), list(positions), tables)


class PlayedBurst:
    def __init__(self, decoder: FakeDecoder, tokens: list[int], positions: list[int], tables: list[list[int]]) -> None:
        self.decoder, self.tokens, self.positions, self.tables = decoder, tokens, positions, tables
        self.unread: deque[list[list[int]]] = deque()
        self.launched = 0

    @torch.inference_mode()
    def launch(self, steps: int) -> None:
        self.launched += steps
        assert self.launched <= self.decoder.max_steps
        assert max(self.positions) + steps <= self.decoder.runner.network.spec.context
        self.decoder.launches.append(steps)
        generated = []
        for _ in range(steps):
            seqs = zip(self.tokens, self.positions, self.tables, strict=True)
            segments = [SequenceChunk([token], at, table) for token, at, table in seqs]
            self.tokens = self.decoder.runner.forward(segments).argmax(dim=-1).tolist()
            self.positions = [at + 1 for at in self.positions]
            generated.append(self.tokens)
        self.unread.append(generated)

    def read(self) -> list[list[int]]:
        self.decoder.num_reads += 1
        return self.unread.popleft()


@pytest.fixture(scope="session")
def make_ahead_engine(make_engine: Callable[..., Engine]) -> Callable[..., tuple[Engine, FakeDecoder]]:
    """An engine that decodes ahead, as on a GPU."""

    def make(**options: Any) -> tuple[Engine, FakeDecoder]:
        made = make_engine(**options)
        decoder = FakeDecoder(made)
        made.runner.decoder = decoder  # type: ignore[assignment]
        return made, decoder

    return make


@pytest.fixture(scope="session")
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()


@pytest.fixture(scope="session")
def reference(engine: Engine) -> CodeModel:
    """The training model with the weights of `engine`: no cache, no batch, no fused weights."""
    model = CodeModel(engine.spec)
    model.load_state_dict(random_weights(engine.spec))
    return model.requires_grad_(False)


TIE = 1e-3  # logits differ by whole units; sums in another order move them by 1e-5


@pytest.fixture(scope="session")
def assert_same(engine: Engine, reference: CodeModel) -> Callable[..., None]:
    """Completions of the same prompts are equal, or first differ at a token for which two ids were within rounding of
    each other: sums in another order may decide such a tie either way. Takes Completions, or their tokens.
    """

    def competing_scores(ids: Sequence[int], sampling: SamplingParams, key: int) -> torch.Tensor:
        scores = reference(torch.tensor([list(ids)]))[:, -1, : engine.tokenizer.vocab_size]
        if sampling.temperature == 0:
            return scores[0]
        return probabilities(scores, [sampling])[0].log() + gumbel_noise(torch.tensor([key]), scores.shape[-1])[0]

    def check(
        prompts: Sequence[Sequence[int]], sampling: SamplingParams, left: Sequence[Any], right: Sequence[Any]
    ) -> None:
        copies: Counter[tuple[int, ...]] = Counter()
        for prompt, one, other in zip(prompts, left, right, strict=True):
            copy = copies[tuple(prompt)]
            copies[tuple(prompt)] += 1
            if one == other:
                continue
            a, b = (answer.tokens if isinstance(answer, Completion) else answer for answer in (one, other))
            at = next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
            assert at is not None, (one, other)
            scores = competing_scores([*prompt, *a[:at]], sampling, NoiseKeys(sampling, copy)[at])
            assert max(float(scores.max() - scores[token]) for token in (a[at], b[at])) < TIE, (one, other)

    return check


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
