"""Files of earlier versions still load, and ten training steps still give the same losses."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from lakh import checkpoint, events
from lakh.corpus import read_documents, read_report
from lakh.goodput import goodput
from lakh.spec import load_run
from lakh.tokens.loading.stream import TokenSet, TokenSetLoader
from lakh.trainer.loop import train

HERE = Path(__file__).parent


def test_a_token_set_of_format_1_loads_and_keeps_its_order() -> None:
    tokens = TokenSet.open(HERE / "tokens-1", "train")
    assert tokens.verify() == 2
    assert tokens.fingerprint == "7d1feaeacf24c8f3d44ca9dc942c8bc85d35903519c08a07da1e2f044005a7c7"
    rows = TokenSetLoader(tokens, sequence=16, seed=7).read([100, 101]).tokens
    assert rows.tolist() == [
        [304, 17, 214, 214, 316, 297, 78, 319, 87, 78, 40, 78, 31, 23, 289, 27, 236],
        [296, 78, 289, 78, 32, 31, 78, 31, 23, 286, 27, 297, 44, 33, 40, 305, 274],
    ]


def test_a_checkpoint_of_format_1_loads() -> None:
    run, weights = checkpoint.read_model(HERE / "checkpoint-1")
    assert run.name == "golden"
    assert sum(tensor.numel() for tensor in weights.values()) == run.model.parameters
    total = sum(float(tensor.double().abs().sum()) for tensor in weights.values())
    assert total == pytest.approx(429.38898623985006, rel=1e-9)  # reading is exact; the sum's order is not
    assert torch.isfinite(weights["embed.weight"]).all()


def test_ten_losses_are_unchanged(tmp_path: Path) -> None:
    run = load_run(HERE / "checkpoint-1", [f"data.tokens={HERE / 'tokens-1'}"])
    train(run, tmp_path / "run")
    found = [e.loss for e in events.read(tmp_path / "run", rank=0) if isinstance(e, events.StepDone)]
    # Another CPU sums in another order: float32 rounding, amplified over ten steps, stays far below 1e-3.
    assert found == pytest.approx(json.loads((HERE / "losses.json").read_text()), abs=1e-3)


def test_a_corpus_of_format_2_loads() -> None:
    report = read_report(str(HERE / "corpus-2"))
    texts = [text for batch in read_documents(str(HERE / "corpus-2"), ["text"]) for text in batch["text"].to_pylist()]
    assert (report.kept, len(texts)) == (6, 6)
    assert report.output_sha256 == json.loads((HERE / "corpus-2" / "manifest.json").read_text())["output_sha256"]


def test_a_run_folder_of_version_0_1_loads_and_resumes(tmp_path: Path) -> None:
    folder = tmp_path / "run-1"
    shutil.copytree(HERE / "run-1", folder)
    kinds = Counter(type(event).__name__ for event in events.read(folder, rank=0))
    assert kinds["StepDone"] == 10
    assert "UnknownEvent" not in kinds, "every kind that version 0.1 wrote has a class"
    assert [type(event).__name__ for event in events.read(folder, rank=1)][-1] != "UnknownEvent"
    sets = [f"data.tokens={HERE / 'tokens-1'}", "train.steps=12", "train.backend=auto", "mesh.dp_replicate=1"]
    run = load_run(folder, sets)
    assert train(run, folder).step == 12


def test_events_of_version_0_1_are_read_under_their_current_names() -> None:
    found = events.read(HERE / "events-1")
    kinds = {event.kind for event in found}
    assert kinds == set(events.Event.kinds) - {"other"}, "one event of every kind"
    assert {"auto_choice", "fault_injected", "hook_metrics", "network_traffic"} <= kinds
    classes = goodput(found)["classes_s"]
    assert classes["lost"] == pytest.approx(2.0)  # a skipped step and a rewound one
    assert sum(classes.values()) == pytest.approx(goodput(found)["total_s"])
