"""One model in two processes: the same answers, and a lost process is an error, not a hang."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
import torch
import torch.distributed as dist
from tokenizers import decoders, models, pre_tokenizers

from lakh.errors import PeerLost, UserError
from lakh.server.api.request_handler import to_request_error
from lakh.server.backend import CompletionDelta
from lakh.server.backends.engine_process import EngineProcessBackend
from lakh.server.engine import Engine, SamplingParams
from lakh.server.model import tensor_parallel
from lakh.server.model import weights as model_weights
from lakh.server.request import RequestError, parse
from lakh.spec.model import Model
from lakh.tokens.tokenizer import SPECIAL_TOKENS, Tokenizer
from lakh.workloads.code.formats import hf
from lakh.workloads.code.model import CodeModel, init_weights

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(torch.cuda.is_available(), reason="two GPUs are needed where there is one"),
]
OLMO2 = {"family": "olmo2", "qk_norm": True}
BIASES = {"attention_bias": True, "mlp_bias": True}
GPT_BIGCODE = {"family": "gpt_bigcode", "gated": False, "kv_heads": 4}
PROMPTS = [[20 + i % 50 for i in range(40)], [30, 31], [40 + i % 7 for i in range(25)]]
SAMPLINGS = [
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=12, temperature=1.0, seed=3),
    SamplingParams(max_tokens=12),
]


@pytest.fixture(scope="module")
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Optionally with other settings, such as norms of queries and keys."""
    folder = tmp_path_factory.mktemp("shared-model")
    words = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = tokenizers.Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL_TOKENS))
    made.save(str(folder / "tokenizer.json"))
    sizes = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 96, "vocab": 280, "context": 128}
    spec = Model(**{**sizes, **getattr(request, "param", {})})
    model = CodeModel(spec)
    init_weights(model, 1)
    weights = {
        name: 8 * t.detach() if t.dim() > 1 else t.detach() + torch.linspace(-0.5, 0.5, len(t))  # biases were 0
        for name, t in model.state_dict().items()
    }
    hf.save(folder / "model", spec, weights, folder / "tokenizer.json")
    return folder / "model"


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("model_dir", "backend"),
    [(BIASES, "gloo"), ({"qk_norm": True}, "c3"), (OLMO2, "c3"), (GPT_BIGCODE, "gloo")],
    indirect=["model_dir"],
)
@pytest.mark.usefixtures("one_thread")
def test_two_processes_give_the_answers_of_one_and_a_lost_one_is_an_error(model_dir: Path, backend: str) -> None:
    expected = Engine.load(str(model_dir), precision="f32").generate(PROMPTS, SAMPLINGS)
    loaded = model_weights.read(model_dir)
    team = tensor_parallel.start(str(model_dir), size=2, precision="f32", backend=backend)
    try:
        engine = Engine(
            "m", loaded.spec, loaded.weights, Tokenizer.load(loaded.tokenizer_json), precision="f32", team=team
        )
        assert engine.network.weight_bytes < Engine.load(str(model_dir)).network.weight_bytes
        assert engine.cache.keys_LKCD.shape[1] == loaded.spec.kv_heads // 2
        for _ in range(2):  # the second time from cached prefixes: a copied block is copied in both processes
            assert engine.generate(PROMPTS, SAMPLINGS) == expected
        with pytest.raises(UserError, match="tensor-parallel"):
            engine.stage()
        os.kill(team._children[0].pid, signal.SIGKILL)
        team._children[0].exit_reason(10)
        with pytest.raises(PeerLost, match="killed by SIGKILL"):
            engine.generate([[60, 61, 62]], SamplingParams(max_tokens=4))
    finally:
        team.close()
    assert not dist.is_initialized()


@pytest.mark.slow
def test_a_server_that_lost_a_tensor_parallel_process_says_so_and_restarts(model_dir: Path) -> None:
    load = {"path": str(model_dir), "threads": 1, "tensor": 2}
    backend = EngineProcessBackend(load, max_waiting=4)
    request = parse({"prompt": "abc", "max_tokens": 4, "temperature": 0})

    async def text() -> str:
        return "".join([item.text async for item in backend.complete(request) if isinstance(item, CompletionDelta)])

    async def scenario() -> None:
        async with asyncio.timeout(200):
            await backend.start()
            before, first = await text(), backend.pid
            (peer,) = (int(pid) for pid in Path(f"/proc/{first}/task/{first}/children").read_text().split())
            os.kill(peer, signal.SIGKILL)
            with pytest.raises((PeerLost, RequestError)) as caught:
                await text()
            assert to_request_error(caught.value).status == 503
            while backend.health().problem is None:
                await asyncio.sleep(0.05)
            while backend.health().problem is not None:
                await asyncio.sleep(0.05)
            assert backend.pid != first
            assert await text() == before
            await backend.close()

    asyncio.run(scenario())


def test_a_degree_that_does_not_divide_the_heads_is_rejected(model_dir: Path) -> None:
    with pytest.raises(UserError, match=r"does not divide the model.s heads"):
        Engine.load(str(model_dir), tensor=3)
    assert not dist.is_initialized()
