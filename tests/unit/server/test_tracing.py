"""A block becomes a graph of native nodes, or runs in torch: it never becomes another computation."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lakh.server.model.cpu import native
from lakh.server.model.cpu.graph import Kind
from lakh.server.model.cpu.tracing import BlockTracer, Untraceable
from lakh.server.model.inference import InferenceModel, SequenceChunk
from lakh.server.model.kv_cache import PagedCache
from lakh.spec.model import Model
from lakh.workloads.code.model import CodeModel, init_weights

pytestmark = pytest.mark.skipif(native.open_library() is None, reason="the native engine library is not built")
CPU = torch.device("cpu")
WIDTH = 64


def tracer() -> BlockTracer:
    return BlockTracer(WIDTH, 16, 32)


@pytest.mark.parametrize(
    ("compute", "why"),
    [
        (torch.relu, "relu"),
        (lambda x: x.add_(1), "changes a tensor"),
        (lambda x: x.__setitem__(0, 1.0), "changes a tensor"),
        (lambda x: x.sum().item(), "over tokens"),
        (lambda x: x[0, 0].item(), "depends on numbers"),
        (lambda x: bool(x[0, 0]), "depends on numbers"),
        (lambda x: x + x[:1], "over tokens"),
        (lambda x: F.rms_norm(x.view(WIDTH, -1), (3,), torch.ones(3), 1e-5), "over tokens"),
        (lambda x: x.sum(dim=0, keepdim=True), "over tokens"),
        (lambda x: torch.cat((x, x)), "over tokens"),
        (lambda x: x.T.contiguous(), "over tokens"),
        (lambda x: x.softmax(dim=0), "dim 0"),
        (lambda x: x + 1, "number"),
        (lambda x: x.to(torch.bfloat16), "to"),
        (lambda x: x.to(torch.int64), "to"),
        (lambda x: x @ x.T, "two traced tensors"),
        (lambda x: F.rms_norm(x, (WIDTH,)), "weight"),
        (lambda x: x * x.topk(4).values.sum(dim=-1, keepdim=True), "does not give"),
        (lambda x: x + torch.ones(WIDTH, dtype=torch.float64), "float64"),
    ],
)  # fmt: skip
def test_operations_without_a_node_are_refused_by_name(compute: Callable[[Tensor], Any], why: str) -> None:
    tracing = tracer()
    with pytest.raises(Untraceable, match=why), torch.inference_mode(), tracing:
        compute(tracing.hidden)


def test_views_need_no_node_and_what_nobody_reads_is_left_out() -> None:
    tracing = tracer()
    with torch.inference_mode(), tracing:
        x = tracing.hidden
        left, right = x.unflatten(-1, (4, 16)).chunk(2, dim=1)
        right * right  # not used
        last = torch.cat((left, right), dim=1).flatten(-2) + x
    graph = tracing.finish(last)
    assert [Kind(node.kind) for node in graph.nodes] == [Kind.COPY, Kind.COPY, Kind.ADD]
    assert list(graph.sizes) == [WIDTH, WIDTH, WIDTH]


def test_a_chain_of_operations_uses_a_few_buffers() -> None:
    tracing = tracer()
    with torch.inference_mode(), tracing:
        x = tracing.hidden
        for _ in range(50):
            x = x * 2.0 + x
    assert len(tracing.finish(x).sizes) <= 4


def make(block: Any = None) -> InferenceModel:
    spec = Model(layers=2, width=WIDTH, heads=4, kv_heads=2, ffn=96, vocab=300, context=96)
    model = CodeModel(spec).requires_grad_(False)
    init_weights(model, 1)
    network = InferenceModel(spec, model.state_dict(), spec.vocab, CPU, "f32")
    if block is not None:
        network.architecture = dataclasses.replace(network.architecture, block=block)
        network.finish_loading()
    return network


def logits(network: InferenceModel) -> Tensor:
    cache = PagedCache(network.spec, 8, device=CPU, dtype=torch.float32)
    return network.forward([SequenceChunk([5, 7, 11, 13], 0, [3], 4)], cache)


def test_a_block_with_an_operation_that_the_library_lacks_runs_in_torch_and_the_log_names_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = make()

    def block(spec: Model, weights: Any, ops: Any, x: Tensor, delta: Any, rope: Any, context: Any) -> Any:
        x, delta = plain.architecture.block(spec, weights, ops, x, delta, rope, context)
        return x, delta.relu() - (-delta).relu()  # the same numbers

    with caplog.at_level(logging.WARNING):
        odd = make(block)
    assert odd._decoder is None
    assert "relu" in caplog.text
    torch.testing.assert_close(logits(odd), logits(plain), rtol=1e-4, atol=1e-5)


def test_a_block_of_other_operations_is_one_native_call() -> None:
    """An architecture that this repository does not have: scaled residuals and a norm after the feed-forward."""
    plain = make()

    def block(spec: Model, weights: Any, ops: Any, x: Tensor, delta: Any, rope: Any, context: Any) -> Any:
        x, delta = plain.architecture.block(spec, weights, ops, x, delta, rope, context)
        half = F.layer_norm(delta, (WIDTH,), weights.vector("ffn_norm"), torch.full((WIDTH,), 0.1), 1e-5) / 2
        return x * 0.7, torch.cat(tuple(half.chunk(2, dim=-1)[::-1]), dim=-1) * F.gelu(x, approximate="tanh")

    network = make(block)
    assert network._decoder is not None
    found = logits(network)
    network._decoder = None
    torch.testing.assert_close(found, logits(network), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, logits(plain))
