"""The chosen micro-batch is the largest that fits, unless a smaller one is as fast."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lakh.errors import InfeasiblePlan, UserError
from lakh.spec import Data, Model, Run
from lakh.trainer.tuning.micro_batch import MicroBatchTrial, choose, find_micro_batch, try_one

SIZES = [1, 2, 4, 8, 16, 32, 64]
RUN = Run(
    name="small",
    model=Model(layers=1, width=16, heads=2, kv_heads=1, ffn=16, vocab=32, context=16),
    data=Data(sequence=16, batch=4, micro_batch=2),
)

pytestmark = pytest.mark.slow


@given(fixed=st.integers(0, 50), each=st.integers(1, 9), limit=st.integers(10, 400))
def test_the_largest_that_fits_is_found_in_few_trials(fixed: int, each: int, limit: int) -> None:
    asked: list[int] = []

    def attempt(size: int) -> MicroBatchTrial:
        asked.append(size)
        return MicroBatchTrial(size, fixed + each * size, tok_per_s=100.0 * size)

    fitting = [size for size in SIZES if fixed + each * size <= limit]
    if not fitting:
        with pytest.raises(InfeasiblePlan, match="a micro-batch of 1 does not fit"):
            choose(SIZES, attempt, limit)
        return
    chosen = choose(SIZES, attempt, limit)
    assert chosen.micro_batch == fitting[-1]
    assert len(asked) == len(set(asked)) <= 4
    assert [tried.micro_batch for tried in chosen.tried] == sorted(asked)


def test_a_prediction_that_is_too_large_ends_at_the_largest_that_fits() -> None:
    chosen = choose(SIZES, lambda size: MicroBatchTrial(size, size**2 if size <= 16 else None, 100.0 * size), 200)
    assert chosen.micro_batch == 8  # 16 and more do not fit into 200


def test_a_prediction_that_is_too_small_is_corrected_up_to_the_largest() -> None:
    """A piece of logits grows with small micro-batches and then no more."""
    chosen = choose(SIZES, lambda size: MicroBatchTrial(size, 10 * min(size, 4) + size, 100.0 * size), 110)
    assert chosen.micro_batch == 64
    assert [tried.micro_batch for tried in chosen.tried] == [1, 2, 8, 16, 32, 64]


def test_a_trial_out_of_memory_does_not_fit_and_other_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(message: str) -> Callable[..., float]:
        def measure(*_: object) -> float:
            raise RuntimeError(message)

        return measure

    for message in ("CUDA error: out of memory", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"):
        monkeypatch.setattr("lakh.trainer.tuning.micro_batch._measure", fails(message))
        assert try_one(RUN, 2, torch.device("cpu")) == MicroBatchTrial(2, None)
    monkeypatch.setattr("lakh.trainer.tuning.micro_batch._measure", fails("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        try_one(RUN, 2, torch.device("cpu"))


def test_a_larger_size_that_is_no_faster_is_not_chosen() -> None:
    chosen = choose(SIZES, lambda size: MicroBatchTrial(size, size, 1000.0 + size / 100), 50)
    assert chosen.micro_batch == 16
    assert chosen.reason == "32 fits too, and changes tokens/s by +0.0 % only"


def test_the_size_with_the_fullest_waves_is_tried_too() -> None:
    sizes, speed = list(range(1, 31)), {17: 1040.0, 19: 1000.0, 20: 1000.0}
    chosen = choose(
        sizes, lambda size: MicroBatchTrial(size, size, speed.get(size, 900.0)), 20, lambda size: float(size == 17)
    )
    assert chosen.micro_batch == 17
    assert chosen.reason == "20 fits too, and changes tokens/s by -3.8 %"
    assert [tried.micro_batch for tried in chosen.tried] == [1, 2, 17, 19, 20]


def test_a_trial_takes_real_steps_of_the_model() -> None:
    tried = try_one(dataclasses.replace(RUN), 4, torch.device("cpu"))
    assert tried.micro_batch == 4
    assert tried.tok_per_s > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_search_is_refused() -> None:
    with pytest.raises(UserError, match="no GPU"):
        find_micro_batch(RUN)
