"""When a pass is recorded as a CUDA graph, and the reason. Results of recorded passes are tested on a GPU."""

from dataclasses import replace

import pytest

from lakh.errors import UserError
from lakh.spec import Data, Model, Run, Training
from lakh.trainer.tuning.cuda_graphs import decide_cuda_graphs

SMALL = Run(
    name="small",
    model=Model(layers=6, width=320, heads=5, kv_heads=5, ffn=896, vocab=16384, context=1024),
    data=Data(sequence=1024, batch=8, micro_batch=4),
)

DEEP = replace(SMALL, model=replace(SMALL.model, layers=60, width=640))


@pytest.mark.parametrize(
    ("run", "device", "world", "records", "text"),
    [
        (SMALL, "cuda", 1, True, "before Python has launched"),
        (SMALL, "cpu", 1, False, "not available on cpu"),
        (SMALL, "cuda", 2, False, "several ranks"),
        (replace(SMALL, data=replace(SMALL.data, document_mask=True)), "cuda", 1, False, "change the shapes"),
        (replace(SMALL, data=replace(SMALL.data, batch=512, micro_batch=512)), "cuda", 1, False, "keep the GPU busy"),
        (DEEP, "cuda", 1, True, "0.10 TFLOP per layer end before Python"),
        (replace(SMALL, train=Training(graphs="off")), "cuda", 1, False, "disabled"),
        (replace(SMALL, train=Training(graphs="on")), "cuda", 1, True, "requested"),
    ],
)
def test_short_work_on_one_gpu_is_recorded(run: Run, device: str, world: int, records: bool, text: str) -> None:
    chosen, reason = decide_cuda_graphs(run.train, run.data, run.model, device=device, world=world)
    assert chosen is records
    assert text in reason


def test_requested_graphs_that_are_impossible_are_an_error() -> None:
    with pytest.raises(UserError, match=r'train\.graphs = on: not available on cpu; set train\.graphs = "auto"'):
        decide_cuda_graphs(Training(graphs="on"), SMALL.data, SMALL.model, device="cpu", world=1)
