"""The HTTP API over real sockets: OpenAI's form in and out, short errors, and no work for disconnected clients."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from lakh.errors import UserError
from lakh.server.api import server as api_server
from lakh.server.api.server import HttpServer, running
from lakh.server.backends.engine_thread import EngineThread
from lakh.server.backends.in_process import MAX_WAITING, InProcessBackend
from lakh.server.engine import Engine, SamplingParams
from lakh.workloads.code.model import CodeModel

TIMEOUT_S = 20.0
LONG = {"prompt": "def add(", "max_tokens": 60, "temperature": 0}


# Metrics of vLLM's dashboards that apply here; without LoRA, swapping to the CPU and sleeping.
VLLM_NAMES = [
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total"),
    *("request_success_total", "request_prompt_tokens", "request_generation_tokens", "request_params_n"),
    *("request_params_max_tokens", "iteration_tokens_total", "time_to_first_token_seconds"),
    *("inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds"),
    *("request_time_per_output_token_seconds", "spec_decode_num_drafts_total"),
    *("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
]


class GatedEngine(Engine):
    """Runs one step per permit and counts them, so tests control the progress of a generation."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gate, self.steps = threading.Semaphore(0), 0
        forward = self.runner.forward

        def gated(segments: Any) -> Any:
            assert self.gate.acquire(timeout=TIMEOUT_S), "the test gave no permit"
            self.steps += 1
            return forward(segments)

        self.runner.forward = gated  # type: ignore[method-assign]


@pytest.fixture
def gated(engine: Engine, reference: CodeModel) -> GatedEngine:
    return GatedEngine("tiny", engine.spec, reference.state_dict(), engine.tokenizer, device="cpu")


def thread_of(server: HttpServer) -> EngineThread:
    backend = server.handler.backend
    assert isinstance(backend, InProcessBackend)
    return backend.thread


class Client:
    def __init__(self, server: HttpServer, session: aiohttp.ClientSession) -> None:
        self.server, self.session = server, session

    @property
    def thread(self) -> EngineThread:
        return thread_of(self.server)

    async def post(self, body: Any, path: str = "/v1/completions") -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.server.url + path, data=data) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.server.url + path) as response:
            return response.status, await response.text()

    async def events(self, body: dict[str, Any]) -> list[Any]:
        """The data of every server-sent event, parsed by hand."""
        async with self.session.post(f"{self.server.url}/v1/completions", json=body) as response:
            assert response.status == 200
            assert response.headers["Content-Type"].startswith("text/event-stream")
            text = (await response.read()).decode()
        assert text.endswith("\n\n")
        blocks = text.removesuffix("\n\n").split("\n\n")
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
        datas = [block.removeprefix("data: ") for block in blocks]
        return [data if data == "[DONE]" else json.loads(data) for data in datas]


@asynccontextmanager
async def serving(engine: Engine, max_waiting: int = MAX_WAITING, **options: Any) -> AsyncIterator[Client]:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    backend = InProcessBackend(engine, max_waiting=max_waiting)
    async with running(backend, "127.0.0.1", 0, **options) as server, aiohttp.ClientSession(timeout=timeout) as session:
        yield Client(server, session)


def run(engine: Engine, scenario: Callable[[Client], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(2 * TIMEOUT_S), serving(engine, **options) as client:
            await scenario(client)

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.01)


# --- completions ---


def test_a_completion_equals_the_engines(engine: Engine) -> None:
    expected = engine.generate(["def add("], SamplingParams(max_tokens=60))[0]

    async def scenario(client: Client) -> None:
        status, body = await client.post({**LONG, "model": "tiny", "user": "me", "unheard_of": {"x": 1}})
        assert status == 200
        assert (body["object"], body["model"]) == ("text_completion", "tiny")
        assert body["choices"] == [
            {
                "index": 0,
                "text": expected.text,
                "logprobs": None,
                "finish_reason": expected.finish_reason,
                "stop_reason": None,
            }
        ]
        counts = (expected.prompt_tokens, len(expected.tokens))
        assert body["usage"] == {
            "prompt_tokens": counts[0],
            "completion_tokens": counts[1],
            "total_tokens": sum(counts),
            "prompt_tokens_details": body["usage"]["prompt_tokens_details"],
            "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
        }

    run(engine, scenario)


def test_a_stream_has_the_same_text_and_ends_with_done(engine: Engine) -> None:
    async def scenario(client: Client) -> None:
        _, whole = await client.post(LONG)
        events = await client.events({**LONG, "stream": True, "stream_options": {"include_usage": True}})
        assert events.pop() == "[DONE]"
        last = events.pop()
        assert last["choices"] == []
        assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
        assert all("usage" not in event for event in events)
        assert len(events) > 3
        assert len({event["id"] for event in events}) == 1
        choices = [event["choices"][0] for event in events]
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons == [None] * (len(reasons) - 1) + [whole["choices"][0]["finish_reason"]]

    run(engine, scenario)


def test_choices_of_several_prompts_and_n_are_in_order_also_when_streamed(engine: Engine) -> None:
    sampling = {"temperature": 1, "seed": 7, "max_tokens": 8, "stop": "\n", "top_p": 0.9, "top_k": 40}

    async def scenario(client: Client) -> None:
        _, body = await client.post({"prompt": ["def ", "class "], "n": 2, **sampling})
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        texts = [choice["text"] for choice in body["choices"]]
        assert len(set(texts)) == 4
        _, one = await client.post({"prompt": "class ", **sampling})
        assert one["choices"][0]["text"] == texts[2]
        events = await client.events({"prompt": ["def ", "class "], "n": 2, "stream": True, **sampling})
        streamed = [""] * 4
        for event in events[:-1]:
            streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert streamed == texts
        ids = [engine.tokenizer.encode(text) for text in ("def ", "class ")]
        _, by_ids = await client.post({"prompt": ids, "n": 2, **sampling})
        assert [choice["text"] for choice in by_ids["choices"]] == texts

    run(engine, scenario)


def test_a_suffix_requests_the_middle_and_may_be_long(engine: Engine) -> None:
    prompt = engine.prompts.infill("def add(", "\n    return", 10)
    expected = engine.generate([prompt], SamplingParams(max_tokens=10))[0]

    async def scenario(client: Client) -> None:
        body = {"prompt": "def add(", "suffix": "\n    return", "max_tokens": 10, "temperature": 0}
        _, answer = await client.post(body)
        assert answer["choices"][0]["text"] == expected.text
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        status, answer = await client.post({**body, "prompt": "x = 1\n" * 500, "suffix": "y" * 3000})
        assert status == 200
        assert answer["usage"]["total_tokens"] <= engine.spec.context

    run(engine, scenario)


def test_a_prompt_that_ends_inside_a_word_is_healed_on_request(engine: Engine) -> None:
    prompt = "def add(left, right):\n    re"
    healed = engine.prompts.heal(engine.prompts.encode(prompt))
    assert healed.repeated is not None
    row = engine.make_sequence(healed.ids, SamplingParams(max_tokens=6), repeated=healed.repeated)
    engine.submit(row)
    while row.finish_reason is None:
        engine.step()
    expected = row.completion().text

    async def scenario(client: Client) -> None:
        for heal in (True, False):
            _, answer = await client.post({"prompt": prompt, "max_tokens": 6, "temperature": 0, "heal": heal})
            plain = engine.generate([prompt], SamplingParams(max_tokens=6))[0].text
            assert answer["choices"][0]["text"] == (expected if heal else plain)

    run(engine, scenario)


def test_infill_responses_have_the_text_that_llama_vim_searches_for(engine: Engine) -> None:
    body = {
        "input_prefix": "def add(",
        "input_suffix": "\n",
        "prompt": "",
        "n_predict": 4,
        "n_indent": 0,
        "samplers": [],
    }

    async def scenario(client: Client) -> None:
        async with client.session.post(f"{client.server.url}/infill", json=body) as response:
            text = await response.text()
        # The plug-in silently drops a response without this pattern in its raw text.
        assert re.match(r"\s*{", text)
        assert re.search(r'"content"\s*:"', text)
        assert "\n" not in text  # it reads one line

    run(engine, scenario)


def test_models_health_ready_and_metrics_pages(engine: Engine) -> None:
    async def scenario(client: Client) -> None:
        _, models = await client.get("/v1/models")
        assert [model["id"] for model in json.loads(models)["data"]] == ["tiny"]
        assert json.loads((await client.get("/health"))[1])["status"] == "ok"
        _, body = await client.post(LONG)
        await client.post({"prompt": 1})
        _, text = await client.get("/metrics")
        lines = text.splitlines()
        assert 'lakh:requests_total{code="200"} 1.0' in lines
        assert 'lakh:requests_total{code="400"} 1.0' in lines
        assert f"lakh:generation_tokens_total {body['usage']['completion_tokens']:.1f}" in lines
        assert f"lakh:prompt_tokens_total {body['usage']['prompt_tokens']:.1f}" in lines
        assert "lakh:num_requests_running 0.0" in lines
        assert "lakh:e2e_request_latency_seconds_count 1.0" in lines
        latency_s = next(float(line.split()[1]) for line in lines if "latency_seconds_sum" in line)
        assert latency_s > 0
        names = {line.split()[2] for line in lines if line.startswith("# TYPE")}
        assert {f"lakh:{name}" for name in [*VLLM_NAMES, "steps_without_cuda_graph_total"]} <= names
        samples = [line.split("{")[0].split(" ")[0] for line in lines if not line.startswith("#")]
        assert {re.sub("_(sum|count|bucket)$", "", name) for name in samples} <= names

    run(engine, scenario)


# --- invalid requests ---

BAD: list[tuple[Any, str | None]] = [
    (b"", None),
    (b"{", None),
    (b"\xff\xfe", None),
    (b"[" * 100_000, None),
    (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", None),
    ([], None),
    ("text", None),
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [320]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    (b'{"prompt": "\\ud800"}', "prompt"),
    ({"prompt": "x" * 2000}, "prompt"),
    ({"prompt": "x", "model": 3}, "model"),
    ({"prompt": "x", "max_tokens": "8"}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "x", "max_tokens": True}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 96}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 10**30}, "max_tokens"),
    ({"prompt": "x", "temperature": -0.1}, "temperature"),
    ({"prompt": "x", "temperature": "hot"}, "temperature"),
    ({"prompt": "x", "temperature": 10**400}, "temperature"),
    (b'{"prompt": "x", "temperature": NaN}', "temperature"),
    (b'{"prompt": "x", "temperature": Infinity}', "temperature"),
    ({"prompt": "x", "top_p": 0}, "top_p"),
    ({"prompt": "x", "top_p": 1.01}, "top_p"),
    ({"prompt": "x", "top_k": -2}, "top_k"),
    ({"prompt": "x", "seed": -1}, "seed"),
    ({"prompt": "x", "seed": 2**63}, "seed"),
    ({"prompt": "x", "n": 0}, "n"),
    ({"prompt": "x", "n": 65}, "n"),
    ({"prompt": ["x"] * 33, "n": 2}, "n"),
    ({"prompt": "x", "n": 10**20}, "n"),
    ({"prompt": "x", "stop": 1}, "stop"),
    ({"prompt": "x", "stop": [""]}, "stop"),
    ({"prompt": "x", "stop": ["a", None]}, "stop"),
    ({"prompt": "x", "stop": ["a"] * 17}, "stop"),
    ({"prompt": "x", "stream": "yes"}, "stream"),
    ({"prompt": "x", "stream": True, "stream_options": [1]}, "stream_options"),
    ({"prompt": "x", "suffix": 1}, "suffix"),
    ({"prompt": [8, 9], "suffix": "y"}, "suffix"),
    (b'{"prompt": "x", "suffix": "\\udc00"}', "suffix"),
    ({"prompt": "x", "echo": "yes"}, "echo"),
    ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ({"prompt": "x", "logprobs": True}, "logprobs"),
    ({"prompt": "x", "stop_rule": "page"}, "stop_rule"),
    ({"prompt": "x", "order": "mps"}, "order"),
    ({"prompt": "x", "timeout_ms": 0}, "timeout_ms"),
    (b'{"prompt": "x", "timeout_ms": NaN}', "timeout_ms"),
    ({"prompt": "x", "supersede": 4}, "supersede"),
    ({"prompt": "x", "best_of": 4}, "best_of"),
    ({"prompt": "x", "best_of": True}, "best_of"),
    ({"prompt": "x", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"prompt": "x", "skip_special_tokens": False}, "skip_special_tokens"),
    ({"prompt": "x", "include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
    ({"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt": "x", "top_n_sigma": 1}, "top_n_sigma"),
    ({"prompt": "x", "presence_penalty": 2.5}, "presence_penalty"),
    ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "x", "min_p": 1.5}, "min_p"),
    ({"prompt": "x", "min_tokens": 17}, "min_tokens"),
    ({"prompt": "x", "response_format": {"type": "xml"}}, "response_format"),
    ({"prompt": "x", "guided_json": {"type": "nothing"}}, "guided_json"),
    ({"prompt": "x", "grammar": "root ::= x"}, "grammar"),
    ({"prompt": "x", "structural_tag": "{}"}, "structural_tag"),
    ({"prompt": "x", "ignore_eos": 1}, "ignore_eos"),
    ({"prompt": "x", "stop_token_ids": 1}, "stop_token_ids"),
    ({"prompt": "x", "stop_token_ids": [1.0]}, "stop_token_ids"),
    ({"prompt": "x", "stop_token_ids": [True]}, "stop_token_ids"),
    ({"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids"),
    ({"prompt": "x", "stop_token_ids": [300]}, "stop_token_ids"),
    ({"prompt": "x", "stop_token_ids": [10**30]}, "stop_token_ids"),
    ({"prompt": "x", "stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ({"prompt": "x", "logit_bias": [[1, 2]]}, "logit_bias"),
    ({"prompt": "x", "logit_bias": "1"}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"01": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"²": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"1": None}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"1": True}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"1": 100.5}}, "logit_bias"),
    (b'{"prompt": "x", "logit_bias": {"1": NaN}}', "logit_bias"),
    ({"prompt": "x", "logit_bias": {"300": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {str(number): 1 for number in range(4097)}}, "logit_bias"),
    ({"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids"),
    ({"prompt": "x", "allowed_token_ids": {"1": 1}}, "allowed_token_ids"),
    ({"prompt": "x", "allowed_token_ids": [20, 300]}, "allowed_token_ids"),
    ({"prompt": "x", "allowed_token_ids": ["20"]}, "allowed_token_ids"),
    ({"prompt": "x", "allowed_token_ids": [1], "logit_bias": {"1": -100}}, "allowed_token_ids"),
    ({"prompt": "x", "bad_words": "word"}, "bad_words"),
    ({"prompt": "x", "bad_words": [1]}, "bad_words"),
    ({"prompt": "x", "bad_words": [" "]}, "bad_words"),
    ({"prompt": "x", "bad_words": ["x"] * 1025}, "bad_words"),
    ({"prompt": "x", "bad_words": ["x" * 257]}, "bad_words"),
    (b'{"prompt": "x", "bad_words": ["\\ud800"]}', "bad_words"),
]


def test_bad_requests_are_400s_that_name_the_field(engine: Engine) -> None:
    async def scenario(client: Client) -> None:
        for body, param in BAD:
            status, answer = await client.post(body)
            assert (status, answer["error"]["param"]) == (400, param), body
            assert answer["error"]["type"] == "invalid_request_error"
            message = answer["error"]["message"]
            assert message
            assert len(message) < 300
            assert "Traceback" not in message
        assert (await client.post(LONG))[0] == 200  # the server still works

    run(engine, scenario)


def test_a_bad_streaming_request_is_a_plain_400(engine: Engine) -> None:
    async def scenario(client: Client) -> None:
        status, answer = await client.post({"prompt": "x" * 2000, "stream": True})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        status, answer = await client.post({"prompt": "x\n" * 1_000_000})  # rejected before it is tokenized
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "at least" in answer["error"]["message"]

    run(engine, scenario)


@pytest.mark.parametrize(
    "extra",
    [
        {"echo": False, "logprobs": None, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0},
        {"seed": None, "stop": None, "n": None, "suffix": "", "temperature": 0, "logit_bias": {}},
        {"top_k": -1, "skip_special_tokens": True, "add_special_tokens": True, "prompt_logprobs": None},
        {"stream": False, "stream_options": None, "stop": [], "stop_token_ids": [], "bad_words": []},
        {"logit_bias": None, "allowed_token_ids": None, "bad_words": None, "include_stop_str_in_output": False},
        {"response_format": {"type": "text"}, "guided_json": None, "grammar": "", "ignore_eos": False, "mirostat": 0},
    ],
)
def test_unsupported_fields_with_neutral_values_are_accepted(engine: Engine, extra: dict[str, Any]) -> None:
    async def scenario(client: Client) -> None:
        assert (await client.post({"prompt": "x", "max_tokens": 2, **extra}))[0] == 200

    run(engine, scenario)


def test_other_errors_have_their_own_status(engine: Engine) -> None:
    async def scenario(client: Client) -> None:
        status, answer = await client.post({**LONG, "model": "gpt-9"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert (await client.post({}, "/v1/embeddings"))[0] == 404
        assert (await client.post({}, "/health"))[0] == 405
        status, body = await client.get("/v1/completions")
        assert status == 405
        assert "error" in json.loads(body)
        status, answer = await client.post(b'{"prompt": "' + b"x" * 3000 + b'"}')
        assert (status, answer["error"]["message"]) == (413, "the body is too large")

    run(engine, scenario, max_body_bytes=2000)


def test_a_bug_is_a_short_500_and_is_logged(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the secret inside")

    monkeypatch.setattr(engine.runner, "forward", broken)

    async def scenario(client: Client) -> None:
        status, answer = await client.post(LONG)
        assert (status, answer["error"]["message"]) == (500, "internal error")
        status, streamed = await client.post({**LONG, "stream": True})  # before the first delta: a plain response
        assert (status, streamed) == (500, answer)
        monkeypatch.undo()
        assert (await client.post(LONG))[0] == 200

    run(engine, scenario)
    assert "the secret inside" in caplog.text


# --- many clients ---


def test_concurrent_requests_each_get_their_own_completion(engine: Engine) -> None:
    prompts = [f"def f{number}(" for number in range(6)]
    expected = [done.text for done in engine.generate(prompts, SamplingParams(max_tokens=12))]

    async def scenario(client: Client) -> None:
        body = {"max_tokens": 12, "temperature": 0}
        answers = await asyncio.gather(*[client.post({"prompt": prompt, **body}) for prompt in prompts])
        assert [answer["choices"][0]["text"] for _, answer in answers] == expected

    run(engine, scenario)


def test_a_full_queue_is_a_429_until_a_client_disconnects(gated: GatedEngine) -> None:
    gated.max_seqs = 1

    async def scenario(client: Client) -> None:
        worker = client.thread
        first = asyncio.create_task(client.post({**LONG, "max_tokens": 2}))
        await until(lambda: worker.num_running == 1)
        second = asyncio.create_task(client.post({**LONG, "max_tokens": 2}))
        await until(lambda: worker.num_waiting == 1)
        status, answer = await client.post(LONG)
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        second.cancel()
        await until(lambda: worker.num_waiting == 0)
        third = asyncio.create_task(client.post({**LONG, "max_tokens": 2}))
        await until(lambda: worker.num_waiting == 1)
        gated.gate.release(4)
        assert (await first)[0] == (await third)[0] == 200
        assert gated.steps == 4  # the disconnected client ran no step

    run(gated, scenario, max_waiting=1)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_cancels_its_generation(gated: GatedEngine, stream: bool) -> None:
    async def scenario(client: Client) -> None:
        async def ask() -> None:
            body = {**LONG, "stream": stream}
            async with client.session.post(f"{client.server.url}/v1/completions", json=body) as response:
                await response.read()

        task = asyncio.create_task(ask())
        gated.gate.release(3)
        await until(lambda: gated.steps == 3)
        task.cancel()
        await until(lambda: client.server.handler.metrics.cancelled._value.get() == 1)
        gated.gate.release(200)
        await until(lambda: client.thread.num_running == 0)
        assert gated.steps <= 4  # of 60: only the running step
        assert (await client.post({**LONG, "max_tokens": 2}))[0] == 200

    run(gated, scenario)


# --- start and shutdown ---


def test_a_port_in_use_is_a_user_error(engine: Engine) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="in use") as caught:
            api_server.serve(InProcessBackend(engine), "127.0.0.1", taken.getsockname()[1])
    assert "--http" in caught.value.todo
    with pytest.raises(UserError, match="not an address of this machine"):
        api_server.serve(InProcessBackend(engine), "no.such.host.invalid", 0)


def test_running_requests_finish_at_shutdown(gated: GatedEngine) -> None:
    async def main() -> None:
        answers: list[asyncio.Task[tuple[int, Any]]] = []
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        async with session, running(InProcessBackend(gated), "127.0.0.1", 0, drain_s=TIMEOUT_S) as server:
            client = Client(server, session)
            answers += [asyncio.create_task(client.post({**LONG, "max_tokens": 3})) for _ in range(2)]
            await until(lambda: thread_of(server).num_running + thread_of(server).num_waiting == 2)
            asyncio.get_running_loop().call_later(0.2, gated.gate.release, 6)
        for answer in answers:
            status, body = await answer
            assert (status, body["usage"]["completion_tokens"]) == (200, 3)

    asyncio.run(asyncio.wait_for(main(), 2 * TIMEOUT_S))


def test_requests_beyond_the_drain_timeout_end_with_abort(gated: GatedEngine) -> None:
    gated.max_seqs = 1  # the second always waits

    async def main() -> None:
        answers: list[asyncio.Task[tuple[int, Any]]] = []
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        async with session, running(InProcessBackend(gated), "127.0.0.1", 0, drain_s=0.1) as server:
            client = Client(server, session)
            for number in (1, 2):
                answers.append(asyncio.create_task(client.post(LONG)))
                await until(lambda: thread_of(server).num_running + thread_of(server).num_waiting == number)  # noqa: B023
            worker = thread_of(server)
            leaving = asyncio.create_task(until(lambda: bool(worker._cancelled)))  # the drain timeout has passed
            leaving.add_done_callback(lambda _: gated.gate.release())
        (status, cut), (refused, _) = [await answer for answer in answers]
        assert (status, cut["choices"][0]["finish_reason"]) == (200, "abort")
        assert refused == 503

    asyncio.run(asyncio.wait_for(main(), 2 * TIMEOUT_S))
