"""A server process under a crowd: bounded, fair in its answers, and empty-handed afterwards."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

import lakh
from lakh.server.load.generator import Load, run_load
from lakh.spec.model import Model
from lakh.tokens.tokenizer import SPECIAL_TOKENS
from lakh.workloads.code import hf
from lakh.workloads.code.model import CodeModel, init_weights

CLIENTS = 500
SECONDS = 12.0
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    spec = Model(layers=2, width=64, heads=4, kv_heads=2, ffn=128, vocab=512, context=512)
    model = CodeModel(spec)
    init_weights(model, 1)
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet)
    made.train_from_iterator([Path(__file__).read_text()], trainer)
    made.save(str(folder / "tokenizer.json"))
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    hf.save(folder / "model", spec, weights, folder / "tokenizer.json")
    return folder / "model"


@pytest.fixture
def url(model_dir: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "lakh", "serve", str(model_dir), "--http", "127.0.0.1:0", "--json"]
    process = subprocess.Popen([*command, "--threads", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
        process.send_signal(signal.SIGTERM)
        _, talk = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, talk
        assert "Traceback" not in talk, talk
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_five_hundred_clients_get_answers_or_a_429_and_leave_nothing_behind(url: str) -> None:
    load = Load(
        rate=1,
        clients=CLIENTS,
        seconds=SECONDS,
        max_tokens=4,
        timeout_s=DEADLINE_S,
        prefix_chars=300,
        suffix_chars=60,
    )
    report = run_load(url, Path(lakh.__file__).parent, load)
    found = report.as_dict(price_per_hour=1.0)
    assert found["timeouts"] == 0
    assert found["failed"] == 0, found["failures"]
    assert found["completed"] > 50
    assert found["rejected"] > 0  # the queue has a bound, and 500 clients find it
    assert found["cancelled"] > 0  # one in five goes away
    assert max(e2e_s for _, _, e2e_s in report.answers) < DEADLINE_S
    assert found["blocks_held_most"] > 0
    assert found["blocks_held_after"] == 0
    # From a third on everything is at work: what grows after that would grow for ever. 64 MiB is allocator noise.
    assert found["memory_bytes_after"] - found["memory_bytes_early"] < 64 << 20
