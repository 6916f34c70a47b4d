"""`lakh tune`: better held-out scores, a run that serves and exports, adapters that only fit their base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from click.testing import CliRunner
from tests.unit.finetuning.test_examples import make_tokenizer

from lakh.cli.main import cli
from lakh.errors import CorruptCheckpoint, Interrupted, PeerTimeout, UserError
from lakh.finetuning.data import prepare
from lakh.finetuning.dpo import tune_on_pairs
from lakh.finetuning.folder import LOCK_FILE
from lakh.finetuning.tune import tune
from lakh.server.engine import Engine
from lakh.server.model import weights
from lakh.spec.model import Model
from lakh.tokens.dataset.token_set import TokenSet
from lakh.trainer.run_folder import lock_run_folder
from lakh.workloads.code.formats import hf
from lakh.workloads.code.model import CodeModel, init_weights

SPEC = Model(layers=2, width=32, heads=2, kv_heads=1, ffn=48, vocab=258, context=128)
SETS = ["data.sequence=64", "data.batch=4", "optim.lr=0.02", "train.threads=1"]


def write_base(folder: Path, seed: int = 1) -> str:
    model = CodeModel(SPEC)
    init_weights(model, seed)
    (folder / "source").mkdir(parents=True)
    make_tokenizer(folder / "source")
    hf.save(folder / "base", SPEC, model.state_dict(), folder / "source" / "tokenizer.json")
    return str(folder / "base")


def write_rows(path: Path, count: int = 40) -> str:
    rows = [{"prompt": f"question {number}\n", "completion": f"the answer is {number % 7}"} for number in range(count)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_examples_become_whole_documents_with_marked_questions(tmp_path: Path) -> None:
    model = weights.read(write_base(tmp_path))
    long = json.dumps({"prompt": "a" * 70, "completion": "b"})
    rows = Path(write_rows(tmp_path / "rows.jsonl"))
    rows.write_text(f"{rows.read_text()}\n{long}\n")
    data = prepare(model, [str(rows)], str(tmp_path / "out"), 64, print)
    assert (data.kind, data.too_long) == ("examples", 1)
    train = TokenSet.open(data.tokens, "train")
    assert train.marks_context
    assert train.num_documents + TokenSet.open(data.tokens, "heldout").num_documents == 40
    assert len(data.heldout) == 4  # a tenth
    for document in data.heldout:
        assert document.is_scored is not None
        assert document.num_bytes == sum(document.is_scored) == len("the answer is 1")
    first = np.asarray(train.tokens[0][: train.starts[0][1]])
    assert first[-1] == make_tokenizer(tmp_path / "source").eot  # the end is learned


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("rows.jsonl", "code"), "is code beside JSONL files"),
        (("missing",), "no such file or folder"),
        (("one.jsonl",), "1 examples of at most 64 tokens were found"),
    ],
)
def test_unusable_data_is_refused(names: tuple[str, ...], found: str, tmp_path: Path) -> None:
    model = weights.read(write_base(tmp_path))
    write_rows(tmp_path / "rows.jsonl")
    write_rows(tmp_path / "one.jsonl", count=1)
    (tmp_path / "code").mkdir()
    with pytest.raises(UserError, match=found):
        prepare(model, [str(tmp_path / name) for name in names], str(tmp_path / "out"), 64, print)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(
    ("setting", "nproc", "found"),
    [
        ('adapter.targets=["qkv"]', 1, "'qkv' is no matrix"),
        ("mesh.pp=2", 2, "pp is 2"),
        ("data.batch=4", 3, "4 sequences cannot be split"),
    ],
)
def test_settings_are_refused_before_anything_is_measured(
    setting: str, nproc: int, found: str, pairs: bool, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": "a\n", "completion": "b", "chosen": "b", "rejected": "c"}
    rows.write_text("\n".join(json.dumps({**row, "prompt": f"question {number}\n"}) for number in range(40)))
    said: list[str] = []
    run, base, out = tune_on_pairs if pairs else tune, write_base(tmp_path), str(tmp_path / "out")
    with pytest.raises(UserError, match=found):
        run(base, [str(rows)], out, sets=[*SETS, setting], nproc=nproc, say=said.append)
    assert [text.partition(" ")[0] for text in said] == ["reading"]


@pytest.mark.parametrize("pairs", [False, True])
def test_a_second_command_in_the_folder_leaves_the_data_of_the_first(
    pairs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakh.trainer.run_folder.LOCK_TIMEOUT_S", 0.1)
    base, rows = write_base(tmp_path), write_rows(tmp_path / "rows.jsonl")
    with lock_run_folder(tmp_path / "out", file=LOCK_FILE), pytest.raises(PeerTimeout, match="is using it"):
        (tune_on_pairs if pairs else tune)(base, [rows], str(tmp_path / "out"), sets=SETS)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [LOCK_FILE]


def test_a_stopped_run_is_continued_by_the_same_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        raise Interrupted("step 3", "stopped by SIGTERM", "continue with: lakh resume runs/x")

    monkeypatch.setattr("lakh.finetuning.tune.train_here", stop)
    rows = write_rows(tmp_path / "rows.jsonl")
    with pytest.raises(Interrupted, match="step 3: stopped by SIGTERM; continue with the same command"):
        tune(write_base(tmp_path), [rows], str(tmp_path / "out"), steps=5, sets=SETS)


@pytest.mark.parametrize(
    "words", [("tune", "--data", "rows.jsonl"), ("tune", "--method", "dpo", "--pairs", "rows.jsonl"), ("export",)]
)
def test_a_base_whose_weights_are_not_finite_is_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    base = Path(write_base(tmp_path))
    tensors = safetensors.torch.load_file(base / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    safetensors.torch.save_file(tensors, base / "model.safetensors")
    write_rows(tmp_path / "rows.jsonl")
    files = [str(tmp_path / word) if word.endswith(".jsonl") else word for word in words[1:]]
    result = CliRunner().invoke(cli, [words[0], str(base), *files, "--out", str(tmp_path / "out")])
    assert isinstance(result.exception, CorruptCheckpoint)
    assert "blocks.1.ffn.up.weight has numbers that are NaN" in str(result.exception)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_adapters_of_answers_are_trained_served_and_bound_to_their_base(tmp_path: Path) -> None:
    base, out, rows = write_base(tmp_path), str(tmp_path / "tuned"), write_rows(tmp_path / "rows.jsonl")
    arguments = ["tune", base, "--data", rows, "--out", out, "--rank", "4", "--steps", "40", "--json"]
    result = CliRunner().invoke(cli, [*arguments, *(word for item in SETS for word in ("--set", item))])
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert report["steps"] == 40
    assert report["tok_per_s"] > 0
    assert report["after"]["bits_per_byte"] < 0.95 * report["before"]["bits_per_byte"]
    assert report["adapter_bytes"] == Path(report["adapter"], "adapter_model.safetensors").stat().st_size
    assert json.loads((tmp_path / "tuned" / "report.json").read_text()) == report

    merged, before = weights.read(out), weights.read(base)
    assert merged.weights.keys() == before.weights.keys()
    changed = {name for name in merged.weights if not torch.equal(merged.weights[name], before.weights[name])}
    assert changed == {name for name in merged.weights if name.startswith("blocks.") and "norm" not in name}
    from_peft = weights.read(report["adapter"])
    assert all(torch.equal(from_peft.weights[name], merged.weights[name]) for name in merged.weights)

    exported = tmp_path / "exported"
    result = CliRunner().invoke(cli, ["export", out, "--format", "adapter", "--out", str(exported)])
    assert result.exit_code == 0, result.output
    assert (exported / "adapter_model.safetensors").stat().st_size == report["adapter_bytes"]

    # Served by name beside the base, from the run and from the folder of adapters.
    engine = Engine.load(base)
    for name, folder in (("run", out), ("folder", report["adapter"])):
        engine.load_adapter(name, folder)
    assert engine.adapters["run"].digest == engine.adapters["folder"].digest

    # The same call continues a run, here a finished one; with other adapters it is refused.
    again = tune(base, [rows], out, rank=4, sets=SETS)
    assert again["after"] == report["after"]
    with pytest.raises(UserError, match="other adapters"):
        tune(base, [rows], out, rank=8, sets=SETS)
    with pytest.raises(UserError, match=r"train\.steps = 40, and this command has 41"):
        tune(base, [rows], out, rank=4, steps=41, sets=SETS)
    with pytest.raises(UserError, match=r"optim\.lr"):
        tune(base, [rows], out, rank=4, sets=[*SETS, "optim.lr=0.5"])

    other_rows = write_rows(tmp_path / "other.jsonl")
    tokens = (tmp_path / "tuned" / "tokens" / "manifest.json").stat().st_mtime_ns
    with pytest.raises(UserError, match=r"holds a run on .*rows.jsonl"):
        tune(base, [other_rows], out, rank=4, sets=SETS)
    assert (tmp_path / "tuned" / "tokens" / "manifest.json").stat().st_mtime_ns == tokens  # the run keeps its data

    # Another model at the place of the base.
    other = CodeModel(SPEC)
    init_weights(other, seed=2)
    hf.save(base, SPEC, other.state_dict(), Path(base) / "tokenizer.json")
    for path in (out, report["adapter"]):
        with pytest.raises(UserError, match="not those that the adapter was trained on"):
            weights.read(path)
        with pytest.raises(UserError, match="not those that the adapter was trained on"):
            engine.load_adapter("other", path)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_weight_is_trained_on_own_code_with_rank_0(tmp_path: Path) -> None:
    base, code = write_base(tmp_path), tmp_path / "project"
    code.mkdir()
    for number in range(12):
        lines = [f"def function_{number}_{line}(value):\n    return value + {line * number}\n" for line in range(8)]
        (code / f"module_{number}.py").write_text("\n\n".join(lines))
    report = tune(base, [str(code)], str(tmp_path / "tuned"), rank=0, steps=15, sets=[*SETS, "optim.lr=0.005"])
    assert (report["data"], report["adapter"], report["adapter_bytes"]) == ("code", None, 0)
    assert report["after"]["bits_per_byte"] < 0.9 * report["before"]["bits_per_byte"]
    assert (tmp_path / "tuned" / "corpus" / "manifest.json").exists()
