"""Weights reach a running engine: over collectives, and from a run's folder as checkpoints appear."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from lakh import checkpoint, config
from lakh.errors import UserError
from lakh.server.engine import Engine, SamplingParams
from lakh.server.weights.follow import CheckpointFollower
from lakh.server.weights.transfer import buckets
from lakh.spec import Data, Run
from lakh.spec.model import Model
from lakh.tokens.tokenizer import SPECIAL_TOKENS
from lakh.workloads.code.model import CodeModel, init_weights

pytestmark = pytest.mark.timeout(280)  # busy machines take a minute to start two processes
SPEC = Model(layers=2, width=64, heads=4, kv_heads=2, ffn=96, vocab=280, context=128)

# Rank 0 trains (makes other weights each time), rank 1 serves and never stops stepping. Both print one JSON line.
SCRIPT = """
import json, sys, threading, datetime
import torch, torch.distributed as dist
from lakh.errors import LakhError
from lakh.server.engine import Engine, SamplingParams
from lakh.server.weights.transfer import WeightReceiver, send
from lakh.spec.model import Model
from lakh.tokens.tokenizer import Tokenizer
from lakh.workloads.code.model import CodeModel, init_weights

rank, store, backend, tokenizer, wrong = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5] == "wrong"
torch.set_num_threads(1)
if backend == "c3":
    import lakh.c3.torch.backend
spec = Model(layers=2, width=64, heads=4, kv_heads=2, ffn=96, vocab=280, context=128)
limit = datetime.timedelta(seconds=200)
dist.init_process_group(backend, init_method="file://" + store, rank=rank, world_size=2, timeout=limit)

def weights(seed, spec=spec):
    model = CodeModel(spec)
    init_weights(model, seed)
    return {name: t.detach() * (8 if t.dim() > 1 else 1) for name, t in model.state_dict().items()}

def fresh(seed):
    return Engine("m", spec, weights(seed), Tokenizer.load(tokenizer), device="cpu", precision="f32")

try:
    if rank == 0:
        other = Model(layers=3, width=64, heads=4, kv_heads=2, ffn=96, vocab=280, context=128)
        for version, seed in ((7, 2), (8, 3)):
            used = other if wrong else spec
            state = weights(seed, used)
            send(state.__getitem__, used, version=version, src=0, dtype=torch.float32, bucket_bytes=40_000)
        print(json.dumps({"sent": 2}))
    else:
        engine = fresh(1)
        stop, long = threading.Event(), SamplingParams(max_tokens=60)
        def work():
            while not stop.is_set():
                engine.generate([[20, 21, 22]], long)
        thread = threading.Thread(target=work); thread.start()
        received, answers = [], []
        try:
            receiver = WeightReceiver(engine, src=0)
            for seed in (2, 3):
                received.append(receiver.receive().version)
                prompt = [30 + i % 40 for i in range(50)]
                ours = engine.generate([prompt], SamplingParams(max_tokens=10))
                answers.append(ours == fresh(seed).generate([prompt], SamplingParams(max_tokens=10)))
        finally:
            stop.set(); thread.join(30)
        print(json.dumps({"versions": received, "same": answers, "engine": engine.weights_version}))
except LakhError as error:
    print(json.dumps({"error": type(error).__name__, "found": error.found}))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = tokenizers.Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL_TOKENS))
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def play(tmp_path: Path, tokenizer_json: Path, backend: str, how: str) -> list[dict[str, object]]:
    """What both ranks printed."""
    store = tmp_path / "store"
    command = [sys.executable, "-c", SCRIPT]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(store), backend, str(tokenizer_json), how],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        return [json.loads(rank.communicate(timeout=240)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("backend", ["gloo", "c3"])
def test_weights_arrive_while_the_engine_runs(tmp_path: Path, tokenizer_json: Path, backend: str) -> None:
    trainer, server = play(tmp_path, tokenizer_json, backend, "right")
    assert trainer == {"sent": 2}
    assert server == {"versions": [7, 8], "same": [True, True], "engine": 2}


def test_a_model_of_another_shape_is_rejected_on_both_sides(tmp_path: Path, tokenizer_json: Path) -> None:
    said = play(tmp_path, tokenizer_json, "gloo", "wrong")
    assert [one["error"] for one in said] == ["UserError", "UserError"]


def test_buckets_hold_every_tensor_once_and_stay_small() -> None:
    made = buckets(SPEC, 4, 40_000)
    names = [name for bucket in made for name, _ in bucket]
    assert sorted(names) == sorted(CodeModel(SPEC).state_dict())
    sizes = [sum(shape.numel() * 4 for _, shape in bucket) for bucket in made]
    assert all(size <= 40_000 or len(bucket) == 1 for size, bucket in zip(sizes, made, strict=True))
    assert len(made) > 3


def save(run_dir: Path, step: int, seed: int, tokenizer_json: Path, spec: Model = SPEC) -> None:
    run = Run(name="mine", model=spec, data=Data(sequence=32))
    model = CodeModel(spec)
    init_weights(model, seed)
    folder = run_dir / "checkpoints" / checkpoint.folder_name(step)
    checkpoint.save(
        str(folder),
        {f"model.{name}": t.detach() * (8 if t.dim() > 1 else 1) for name, t in model.state_dict().items()},
        step=step,
        sequence_index=step * 32,
        run_sha256=config.fingerprint(run),
        data_sha256="none",
        attachments={"run.toml": config.to_toml(run).encode(), "tokenizer.json": tokenizer_json.read_bytes()},
    )


def test_a_followed_run_is_served_from_its_newest_complete_checkpoint(tmp_path: Path, tokenizer_json: Path) -> None:
    run_dir, heard = tmp_path / "run", []
    save(run_dir, 1, 1, tokenizer_json)
    engine = Engine.load(str(run_dir), precision="f32")
    follower = CheckpointFollower(engine, str(run_dir), on_swap=lambda folder, seconds: heard.append(folder))
    sampling, prompt = SamplingParams(max_tokens=10), [30 + i % 40 for i in range(50)]
    before = engine.generate([prompt], sampling)
    assert not follower.poll()
    half = run_dir / "checkpoints" / checkpoint.folder_name(2)
    half.mkdir()
    (half / "part").write_text("not yet")  # its manifest is missing
    assert not follower.poll()
    save(run_dir, 3, 2, tokenizer_json)
    assert follower.poll()
    after = engine.generate([prompt], sampling)
    assert after == Engine.load(str(run_dir), precision="f32").generate([prompt], sampling) != before
    assert (engine.weights_version, len(heard)) == (1, 1)
    expected, every_id = Engine.load(str(run_dir), precision="f32").network, range(engine.spec.vocab)
    assert torch.equal(engine.network.embedding(every_id), expected.embedding(every_id))
    save(run_dir, 4, 2, tokenizer_json, Model(layers=1, width=64, heads=4, kv_heads=2, ffn=96, vocab=280, context=128))
    with pytest.raises(UserError, match="another shape"):
        follower.poll()
    assert engine.generate([prompt], sampling) == after


def test_one_checkpoint_cannot_be_followed(tmp_path: Path, tokenizer_json: Path) -> None:
    save(tmp_path / "run", 1, 1, tokenizer_json)
    engine = Engine.load(str(tmp_path / "run"))
    with pytest.raises(UserError, match="does not change"):
        CheckpointFollower(engine, checkpoint.find(tmp_path / "run"))
