"""The benchmark's rows carry what a reader needs to compare: lakh beside its peer, on the same work."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from bench.train import loss_gap, shapes, steps
from bench.train.byte_training import train_on_bytes
from bench.train.emulated_fp8 import EMULATED, _nearest, emulated_linear
from bench.train.gradient_error import gradient_errors
from bench.train.shapes import BenchShape
from bench.train.steps import TrainRow, bench_train

from lakh.errors import UserError
from lakh.spec import Adapter, Model
from lakh.spec.model import Experts

pytest.importorskip("transformers", reason="pip install transformers")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the shapes are those of a GPU")

TINY = BenchShape(Model(layers=1, width=16, heads=2, kv_heads=1, ffn=24, vocab=32, context=16), 16, 2)


@pytest.fixture(autouse=True)
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)


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
    for system in (shapes.PEERS["transformers"], shapes.LAKH):
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


@pytest.mark.parametrize("name", ["lora", "moe"])
@pytest.mark.slow
def test_adapters_and_experts_are_measured_beside_full_training_and_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = dataclasses.replace(TINY, adapter=Adapter(rank=2))
    if name == "moe":
        experts = Experts(count=4, top_k=2, ffn=24)
        shape = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, experts=experts, tied=False))
    monkeypatch.setitem(shapes.SHAPES, "tiny", shape)
    rows = bench_train(["tiny"], repeats=3)
    assert [row.alternates_with for row in rows] == [row.system for row in reversed(rows)]
    if name == "lora":  # transformers alone has no adapters
        assert [row.system for row in rows] == ["lakh", shapes.FULL]
        assert rows[0].full_ratio == pytest.approx(rows[0].tok_per_s / rows[1].tok_per_s)
        assert rows[1].full_ratio == 1
    else:
        assert [row.system for row in rows] == ["transformers", "lakh"]
        assert rows[0].params == rows[1].params == shape.model.parameters
    assert not any(row.failed for row in rows)


def test_the_mixture_of_the_gpu_has_about_one_of_four_billion_active_parameters() -> None:
    model = shapes.SHAPES["moe-4b"].model
    assert model.active_weights == pytest.approx(1.1e9, rel=0.02)
    assert model.parameters == pytest.approx(4.0e9, rel=0.02)


def test_systems_on_a_gpu_are_those_that_a_shape_allows() -> None:
    peers = list(shapes.PEERS.values())
    lora = shapes.systems_of(shapes.SHAPES["lora-1.2b"], peers, ablations=False, fp8=False)
    moe = shapes.systems_of(shapes.SHAPES["moe-4b"], peers, ablations=True, fp8=False)
    assert [system.name for system in lora[:2]] == ["peft", "lakh"]
    assert shapes.FULL in [system.name for system in lora]
    assert [system.name for system in moe[:3]] == ["transformers", "torchtitan", "lakh"]
    assert not any(system.recompute == "selective" or system.full for system in moe)


def test_lakh_is_compared_with_full_training_or_with_the_first_peer() -> None:
    peers = list(shapes.PEERS.values())
    for name, peer in (("lora-1.2b", shapes.FULL), ("1.2b-4k", "transformers")):
        systems = shapes.systems_of(shapes.SHAPES[name], peers, ablations=False, fp8=True)
        assert [system.name for system in shapes.compared_systems(systems)] == [peer, "lakh"]
    alone = shapes.systems_of(shapes.SHAPES["1.2b-4k"], [], ablations=True, fp8=False)
    assert [system.name for system in shapes.compared_systems(alone)] == ["lakh"]


class SimulatedGPU:
    """Steps take the milliseconds of their system, the first ones twice as long; a system takes gigabytes."""

    MS, GB, LIMIT_GB = {"lakh": 100.0, shapes.FULL: 135.0}, {"lakh": 10, shapes.FULL: 30}, 80

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **gigabytes: int) -> None:
        self.now_ms, self.ran, self.held_gb, self.peak_gb = 0.0, [], 0, 0
        self.gigabytes = self.GB | gigabytes
        monkeypatch.setattr(steps, "stepper", self.stepper)
        monkeypatch.setattr(steps, "_clean_gpu", self.cleaned)
        for name, value in {
            "Event": lambda enable_timing: SimulatedEvent(self),
            "memory_allocated": lambda: self.held_gb << 30,
            "max_memory_allocated": lambda: self.peak_gb << 30,
            "reset_peak_memory_stats": lambda: setattr(self, "peak_gb", self.held_gb),
            "synchronize": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextlib.contextmanager
    def cleaned(self) -> Iterator[None]:
        self.held_gb = self.peak_gb = 0
        yield

    def stepper(self, shape: BenchShape, system: shapes.BenchSystem, device: torch.device) -> Callable[[], None]:
        name, calls = system.name, itertools.count()
        self.held_gb += self.gigabytes.get(name, 5)
        if self.held_gb > self.LIMIT_GB:
            raise torch.OutOfMemoryError

        def step() -> None:
            self.peak_gb = max(self.peak_gb, self.held_gb + 1)
            self.now_ms += self.MS.get(name, 120.0) * (2 if next(calls) < 4 else 1)
            self.ran.append(name)

        return step


class SimulatedEvent:
    def __init__(self, gpu: SimulatedGPU) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.at_ms = self.gpu.now_ms

    def elapsed_time(self, later: "SimulatedEvent") -> float:
        return later.at_ms - self.at_ms


def measured_lora(found: list[TrainRow]) -> list[TrainRow]:
    shape = dataclasses.replace(TINY, adapter=Adapter(rank=2))
    systems = shapes.systems_of(shape, [], ablations=False, fp8=False)
    rows = steps._with_ratios(steps._measure_on_gpu("tiny", shape, systems, 3, lambda text: None, found.append))
    assert [row.system for row in rows] == [system.name for system in systems]
    assert sorted(row.system for row in found) == sorted(row.system for row in rows)
    return rows


def test_steps_that_a_ratio_compares_alternate_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimulatedGPU(monkeypatch)
    lakh, plain, full, budget = measured_lora([])
    warm_up = [shapes.FULL] * 4 + ["lakh"] * 4
    assert gpu.ran[:14] == [*warm_up, *[shapes.FULL, "lakh"] * 3]
    assert (lakh.alternates_with, full.alternates_with) == (shapes.FULL, "lakh")
    assert (plain.alternates_with, budget.alternates_with) == ("", "")
    assert lakh.full_ratio == pytest.approx(1.35)
    assert lakh.step_s == pytest.approx(0.1)
    assert [row.peak_bytes for row in (lakh, full, budget)] == [11 << 30, 31 << 30, 6 << 30]


@pytest.mark.parametrize(("gigabytes", "failed"), [(60, ""), (90, "out of memory")])
def test_systems_that_do_not_fit_together_are_measured_one_after_the_other(
    gigabytes: int, failed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    SimulatedGPU(monkeypatch, lakh=gigabytes)
    found: list[TrainRow] = []
    lakh, _, full, _ = measured_lora(found)
    assert found[0] == dataclasses.replace(full, full_ratio=None, full_memory=None)
    assert (lakh.alternates_with, full.alternates_with, lakh.failed, full.failed) == ("", "", failed, "")
    assert full.step_s == pytest.approx(0.135)
    assert lakh.full_ratio == (None if failed else pytest.approx(1.35))


def test_8_bit_products_are_measured_with_each_recipe() -> None:
    systems = shapes.systems_of(shapes.SHAPES["1.2b-4k"], [], ablations=False, fp8=True)
    assert [system.recipe for system in systems if system.precision == "fp8"] == list(shapes.FP8_RECIPES)
    ends = shapes.BenchSystem("fp8", precision="fp8", recipe="rowwise", bf16_ends=2)
    assert "fp8, rowwise, first and last 2 in bf16" in ends.features
    settings = steps._training(ends)
    assert (settings.fp8, settings.fp8_recipe) == (True, "rowwise")
    assert (settings.num_layers_at_start_in_bf16, settings.num_layers_at_end_in_bf16) == (2, 2)


def test_the_loss_gap_runs_each_recipe_and_number_of_bf16_blocks() -> None:
    systems = list(loss_gap._systems(["mixed", "fp8-mixed"], ["tensorwise", "rowwise"], ["0", "2"], "none", True))
    assert [(system.precision, system.attention) for system in systems[:2]] == [("mixed", "auto"), ("mixed", "torch")]
    assert [(system.recipe, system.bf16_ends) for system in systems[2:]] == [
        ("tensorwise", 0),
        ("tensorwise", 2),
        ("rowwise", 0),
        ("rowwise", 2),
    ]
    assert {system.compile for system in systems} == {"none"}


def test_a_recipe_is_run_by_the_precisions_that_have_it() -> None:
    precisions = ["mixed", "fp8-mixed", "emulated-fp8-mixed"]
    systems = list(loss_gap._systems(precisions, ["rowwise", "rowwise-e5m2"], ["0"], "block", False))
    assert [(system.precision, system.recipe, system.compile) for system in systems[1:]] == [
        ("fp8-mixed", "rowwise", "block"),
        ("emulated-fp8-mixed", "rowwise", "none"),
        ("emulated-fp8-mixed", "rowwise-e5m2", "none"),
    ]
    with pytest.raises(UserError, match="--recipes rowwise-e5m2: no 8-bit precision of --precisions has it"):
        list(loss_gap._systems(precisions[:2], ["rowwise-e5m2"], ["0"], "block", False))


def test_training_on_bytes_has_a_warm_up_and_a_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    rates, plain = [], steps.update

    def update(*args: Any, lr: float, **settings: Any) -> Any:
        rates.append(lr)
        return plain(*args, lr=lr, **settings)

    monkeypatch.setattr(steps, "update", update)
    plain_system = shapes.BenchSystem("f32", precision="f32")
    settings = {"lr": 1e-3, "embedding_std": 0.02, "evaluated_as": plain_system}
    losses, _, held_out, _ = train_on_bytes(TINY, plain_system, 20, **settings)
    assert held_out < losses[0]
    assert len(losses) == len(rates) == 20
    assert rates[0] == pytest.approx(5e-4)  # two steps of warm-up
    assert max(rates) == rates[2] == 1e-3
    assert rates[-1] == pytest.approx(1e-4)
    again, _, held_out_again, _ = train_on_bytes(TINY, plain_system, 20, **settings)
    assert (again, held_out_again) == (losses, held_out)
    assert train_on_bytes(TINY, plain_system, 10, seed=1, **settings).losses[0] != losses[0]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_emulated_rounding_is_that_of_a_conversion(dtype: torch.dtype) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 2, 4096)  # subnormals, too
    x = torch.cat([x.clamp(-448, 448), torch.tensor([0.0, 448.0, 1.0625, 1.1875, 2**-10, -1.9375])])  # and ties
    assert torch.equal(_nearest(x, dtype, random=False), x.to(dtype).float())
    mean = torch.stack([_nearest(x, dtype, random=True) for _ in range(200)]).mean(0)
    torch.testing.assert_close(mean, x, rtol=0.05, atol=1e-3)  # 200 draws of a step of at most a quarter


def test_the_gradient_error_of_a_recipe_is_that_of_its_operands() -> None:
    plain = shapes.BenchSystem("f32", precision="f32", compile="none")
    shape = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, vocab=256, tied=False))
    model = train_on_bytes(shape, plain, 10, lr=1e-3, embedding_std=1.0, evaluated_as=plain).model
    e5m2, e4m3, bf16 = gradient_errors(model, shape, ["only-dx-grad-e5m2", "only-dx-grad-e4m3", "bf16"], 4)
    assert e5m2.error[0] > 2 * e4m3.error[0] > 0  # one bit of mantissa is four times the variance
    assert e4m3.error[0] > bf16.error[0]
    assert len(e5m2.error) == len(e5m2.slower) == 3
    assert next(gradient_errors(model, shape, ["bf16"], 4, "bf16")).error == (0, 0, 0)


def test_gradients_alone_are_rounded_in_the_backward_pass() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(*size, generator=generator) for size in ((64, 32), (48, 32), (64, 48)))
    inputs = [x.requires_grad_(), weight.requires_grad_()]
    exact = x @ weight.mT
    exact_dx, exact_dw = torch.autograd.grad(exact, inputs, grad)
    for name, recipe in EMULATED.items():
        if not name.startswith("only-"):
            continue
        y = emulated_linear(name)(*inputs)
        dx, dw = torch.autograd.grad(y, inputs, grad)
        changed = [(a - b).norm() / b.norm() > 0.005 for a, b in ((y, exact), (dx, exact_dx), (dw, exact_dw))]
        parts = (recipe.x, recipe.weight), (recipe.dx_grad, recipe.dx_weight), (recipe.dw_grad, recipe.dw_x)
        assert changed == [any(part) for part in parts]


@pytest.mark.parametrize("recipe", shapes.FP8_RECIPES)
def test_emulated_8_bit_products_are_near_the_plain_ones(recipe: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(*size, generator=generator) for size in ((2, 64, 256), (384, 256), (2, 64, 384)))
    x *= torch.logspace(-2, 2, 64)[:, None]  # tokens of different sizes
    inputs = [x.requires_grad_(), weight.requires_grad_()]
    exact, rounded = inputs[0] @ inputs[1].mT, emulated_linear(recipe)(*inputs)
    pairs = [(rounded, exact), *zip(*(torch.autograd.grad(y, inputs, grad) for y in (rounded, exact)), strict=True)]
    for found, plain in pairs:
        assert 0.005 < (found - plain).norm() / plain.norm() < 0.12
    error = (rounded - exact).norm(dim=2) / exact.norm(dim=2)
    assert (error.max() < 0.05) == (recipe != "tensorwise")  # one scale for all loses the smallest tokens' bits


@pytest.mark.slow
def test_the_loss_gap_of_emulated_8_bit_products_is_small(lakh, last_line) -> None:
    options = ("--shape", "tiny", "--steps", "20", "--micro-batch", "2", "--sequence", "16", "--compile", "none")
    code, out, _ = lakh("bench", "loss-gap", *options, "--precisions", "f32,emulated-fp8", "--json")
    assert code == 0
    plain, rounded = last_line(out)["rows"]
    assert (plain["recipe"], rounded["recipe"]) == ("", "tensorwise")
    assert 0 < abs(rounded["gap"]) < 0.05
    assert 0 < abs(rounded["held_out_gap"]) < 0.05


@pytest.mark.slow
def test_the_loss_gap_of_a_precision_is_relative_to_the_first(lakh, last_line) -> None:
    options = ("--shape", "tiny", "--steps", "20", "--micro-batch", "2", "--precisions", "f32,f32", "--compile", "none")
    code, out, _ = lakh("bench", "loss-gap", *options, "--json")
    assert code == 0
    first, second = last_line(out)["rows"]
    assert first["gap"] == second["gap"] == 0  # equal runs have equal losses
    assert first["held_out_gap"] == second["held_out_gap"] == 0
    assert second["last_loss"] < second["first_loss"]
