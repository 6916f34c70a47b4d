"""The benchmark's rows carry what a reader needs to compare: lakh beside its peer, on the same work."""

import dataclasses

import pytest
import torch
from bench.train import steps
from bench.train.steps import BenchShape, TrainRow, bench_train

from lakh.spec import Model

pytest.importorskip("transformers", reason="pip install transformers")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the shapes are those of a GPU")

TINY = BenchShape(Model(layers=1, width=16, heads=2, kv_heads=1, ffn=24, vocab=32, context=16), 16, 2)


@pytest.fixture(autouse=True)
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(steps.SHAPES, "tiny", TINY)


@pytest.mark.slow
def test_lakh_and_its_peer_are_measured_in_turn_on_the_same_work() -> None:
    theirs, ours = bench_train(["tiny"], repeats=3)
    assert (theirs.system, ours.system) == ("transformers", "lakh")
    assert theirs.params == ours.params == TINY.model.parameters
    assert theirs.ratio == 1
    assert ours.ratio == pytest.approx(ours.tok_per_s / theirs.tok_per_s)
    for row in (theirs, ours):
        assert row.tok_per_s == pytest.approx(2 * 16 / row.step_s)
        assert (row.cpu_s or 0) > 0
        assert not row.failed


def test_rows_have_the_fields_that_are_promised() -> None:
    promised = "system shape params seq micro_batch tok_per_s mfu mfu_palm peak_bytes features"
    assert set(promised.split()) <= {field.name for field in dataclasses.fields(TrainRow)}


def test_systems_begin_with_losses_of_equal_size() -> None:
    """Random weights and tokens: each loses about the log of the vocabulary, so that they do the same work."""
    for system in (steps.PEERS["transformers"], steps.LAKH):
        plain = dataclasses.replace(system, precision="f32", compile="none", attention="torch")
        loss = float(steps.stepper(TINY, plain, torch.device("cpu"))().loss)
        assert loss == pytest.approx(torch.log(torch.tensor(32.0)).item(), rel=0.05)


def test_what_would_take_a_cpu_hours_is_refused_at_once(lakh, last_line) -> None:
    code, out, _ = lakh("bench", "train", "--shapes", "demo,1.2b-4k", "--json")
    assert code == 2
    assert last_line(out)["error"]["where"] == "--shapes 1.2b-4k"
    assert "TFLOP, and there is no GPU here" in last_line(out)["error"]["found"]


def test_lakh_may_be_measured_alone(lakh, last_line) -> None:
    code, out, _ = lakh("bench", "train", "--shapes", "tiny", "--peers", "none", "--repeats", "3", "--json")
    assert code == 0
    (row,) = last_line(out)["rows"]
    assert (row["system"], row["ratio"]) == ("lakh", None)
