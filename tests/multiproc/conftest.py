"""A tiny random model with a tiny real tokenizer, as a directory that `lakh serve` takes; undisturbed runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    from lakh.spec.model import Model
    from lakh.tokens.tokenizer import SPECIAL_TOKENS
    from lakh.workloads.code.formats import hf
    from lakh.workloads.code.model import CodeModel, init_weights

    folder = tmp_path_factory.mktemp("served")
    spec = Model(layers=2, width=64, heads=4, kv_heads=2, ffn=128, vocab=512, context=512)
    model = CodeModel(spec)
    init_weights(model, 1)
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet)
    made.train_from_iterator([Path(__file__).read_text()] * 4, trainer)
    made.save(str(folder / "tokenizer.json"))
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    hf.save(folder / "model", spec, weights, folder / "tokenizer.json")
    return folder / "model"


@pytest.fixture(scope="session")
def train_in_process():
    """Trains an undisturbed run on one rank in this process: what a disturbed one is compared with. Much quicker than a
    command, which imports torch. Returns what `lakh train --json` prints of the result."""

    def run(recipe: Path, run_dir: Path, *settings: str) -> dict[str, Any]:
        from lakh.spec import load_run
        from lakh.trainer.launch.rank import describe_result
        from lakh.trainer.loop import train
        from lakh.trainer.run_folder import with_absolute_paths

        return describe_result(train(with_absolute_paths(load_run(str(recipe), settings)), str(run_dir)))

    return run


@pytest.fixture(scope="session")
def run_launcher(shared_fork_server):
    """Runs `lakh train` or `lakh resume` with this process as the launcher: real ranks, which start in milliseconds.
    Returns what `--json` prints, and raises the command's error. Tests of signals, of the launcher's death and of
    exit codes run the command."""

    def run(*arguments: str) -> dict[str, Any]:
        from lakh.cli.main import cli

        with shared_fork_server():
            result = CliRunner().invoke(cli, [*arguments, "--json"])
        if result.exception is not None:
            raise result.exception
        return json.loads(result.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def assert_equal_bits():
    """Compares the newest checkpoints of two runs: weights and the optimizer's state."""
    import torch

    from lakh import checkpoint

    def tensors(run_dir: Path) -> dict[str, torch.Tensor]:
        manifest = checkpoint.verify(checkpoint.find(run_dir))
        into = {name: torch.empty(one.shape, dtype=getattr(torch, one.dtype)) for name, one in manifest.tensors.items()}
        checkpoint.load(checkpoint.find(run_dir), into)
        return into

    def compare(left: Path, right: Path) -> None:
        a, b = tensors(left), tensors(right)
        assert a.keys() == b.keys()
        assert [name for name in a if not torch.equal(a[name], b[name])] == []

    return compare
