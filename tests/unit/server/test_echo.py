"""`echo`, `prompt_logprobs` and `max_tokens: 0` over HTTP: OpenAI's and vLLM's forms, limits, quotas, gateways."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lakh.server.api.api_keys import ApiKeys
from lakh.server.api.quota import Quota
from lakh.server.backend import CompletionDelta
from lakh.server.backends import request_sequences
from lakh.server.backends.logprob_forms import EchoedPrompt, TokenTexts, openai_logprobs
from lakh.server.backends.response_queue import merge_deltas
from lakh.server.engine import Engine, SamplingParams
from lakh.server.request import RequestError, parse
from lakh.server.sampling.tokens import Logprobs
from lakh.server.store import MemoryCacheStore

from .test_adapters import write_adapter
from .test_gateway import Fleet
from .test_gateway import run as run_gateway
from .test_http import Client, run

PROMPT = "def add(left, right):\n    # Größe, 日本 🙂\n"
ASK = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "echo": True, "logprobs": 2}
SCORE = {**ASK, "max_tokens": 0}
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def ids(engine: Engine) -> list[int]:
    return list(engine.prompts.encode_prompt(PROMPT))


@pytest.fixture(scope="module")
def expected(engine: Engine, ids: list[int]) -> list[Logprobs | None]:
    done = engine.generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=5))[0]
    assert done.prompt_logprobs is not None
    return list(done.prompt_logprobs)


def scores(items: list[Logprobs | None]) -> list[float | None]:
    return [None if item is None else item.logprob for item in items]


def test_echo_repeats_the_prompt_with_its_log_probabilities(
    engine: Engine, ids: list[int], expected: list[Logprobs | None]
) -> None:
    async def scenario(client: Client) -> None:
        _, plain = await client.post({**ASK, "echo": False})
        status, answer = await client.post(ASK)
        assert status == 200
        choice, logprobs = answer["choices"][0], answer["choices"][0]["logprobs"]
        new = plain["choices"][0]
        assert choice["text"] == PROMPT + new["text"]
        assert choice["finish_reason"] == new["finish_reason"]
        assert "prompt_logprobs" not in choice
        size = len(ids)
        assert logprobs["token_logprobs"][:size] == scores(expected)
        assert logprobs["token_logprobs"][size:] == new["logprobs"]["token_logprobs"]
        assert logprobs["tokens"][size:] == new["logprobs"]["tokens"]
        assert logprobs["top_logprobs"][0] is None
        assert all(1 <= len(top) <= 3 for top in logprobs["top_logprobs"][1:])
        for own, top, token in zip(
            *(logprobs[name][1:] for name in ("token_logprobs", "top_logprobs", "tokens")), strict=True
        ):
            assert top[token] == own or ("\ufffd" in token and top[token] > own)  # parts of characters look alike
        assert len({len(values) for values in logprobs.values()}) == 1
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert "\ufffd" in token or choice["text"][offset : offset + len(token)] == token
        assert logprobs["text_offset"][size] == len(PROMPT)
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
        assert answer["usage"]["prompt_tokens"] == size
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        _, text_only = await client.post({**ASK, "logprobs": None})
        assert (text_only["choices"][0]["text"], text_only["choices"][0]["logprobs"]) == (choice["text"], None)

    run(engine, scenario)


def test_max_tokens_0_only_scores(engine: Engine, ids: list[int], expected: list[Logprobs | None]) -> None:
    async def scenario(client: Client) -> None:
        before = engine.counters.generated_tokens
        for prompt in (PROMPT, ids):
            status, answer = await client.post({**SCORE, "prompt": prompt})
            choice = answer["choices"][0]
            assert (status, choice["text"], choice["finish_reason"]) == (200, PROMPT, "length")
            assert choice["logprobs"]["token_logprobs"] == scores(expected)
            assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (len(ids), 0)
        status, answer = await client.post({"prompt": PROMPT, "echo": True, "max_tokens": 0})
        assert (status, answer["choices"][0]["text"], answer["choices"][0]["logprobs"]) == (200, PROMPT, None)
        status, answer = await client.post({"prompt": PROMPT, "prompt_logprobs": 0, "max_tokens": 0})
        assert (status, answer["choices"][0]["text"], len(answer["choices"][0]["prompt_logprobs"])) == (
            200,
            "",
            len(ids),
        )
        whole = torch.randint(0, 300, (engine.spec.context,)).tolist()  # nothing has to be left for a completion
        status, answer = await client.post({**SCORE, "prompt": whole})
        assert (status, len(answer["choices"][0]["logprobs"]["tokens"])) == (200, engine.spec.context)
        assert engine.counters.generated_tokens == before
        status, answer = await client.post({**SCORE, "prompt": ""})
        assert (status, answer["choices"][0]["text"]) == (200, "")
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None]

    run(engine, scenario)


def test_lists_of_prompts_and_copies_get_their_own(engine: Engine, ids: list[int]) -> None:
    """In one request, and beside others that run meanwhile."""

    async def scenario(client: Client) -> None:
        texts = [PROMPT, "x", "class Größe:\n    pass\n", PROMPT]
        alone = [(await client.post({**SCORE, "prompt": text}))[1]["choices"][0] for text in texts]
        busy = [asyncio.create_task(client.post({"prompt": "def f(", "max_tokens": 50, "seed": n})) for n in range(5)]
        _, together = await client.post({**SCORE, "prompt": texts})
        assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3]
        assert [choice["logprobs"] for choice in together["choices"]] == [choice["logprobs"] for choice in alone]
        await asyncio.gather(*busy)
        _, of_ids = await client.post({**SCORE, "prompt": [ids, ids[:7]]})
        assert of_ids["choices"][0]["logprobs"] == alone[0]["logprobs"]
        assert of_ids["choices"][1]["logprobs"]["tokens"] == alone[0]["logprobs"]["tokens"][:7]
        computed = engine.counters.computed_tokens
        new = [*ids, *ids][32::-1]
        _, copies = await client.post({**ASK, "prompt": new, "n": 3, "temperature": 1, "seed": 4})
        # The copies share the log-probabilities and two blocks: they compute the last token and their own.
        assert engine.counters.computed_tokens - computed <= len(new) + 2 + 3 * 6
        size = len(new)
        assert len({tuple(one["logprobs"]["token_logprobs"][:size]) for one in copies["choices"]}) == 1
        assert len({one["text"] for one in copies["choices"]}) == 3

    run(engine, scenario)


def test_a_stream_has_the_prompt_in_its_first_event(engine: Engine) -> None:
    async def scenario(client: Client) -> None:
        body = {**ASK, "n": 2, "seed": 1, "temperature": 1, "prompt_logprobs": 1}
        _, whole = await client.post(body)
        events = await client.events({**body, "stream": True})
        assert events.pop() == "[DONE]"
        choices = [event["choices"][0] for event in events]
        for index, expected in enumerate(whole["choices"]):
            own = [choice for choice in choices if choice["index"] == index]
            assert "".join(choice["text"] for choice in own) == expected["text"]
            assert own[0]["text"].startswith(PROMPT)
            assert own[0]["prompt_logprobs"] == expected["prompt_logprobs"]
            assert not any("prompt_logprobs" in choice for choice in own[1:])
            for name, values in expected["logprobs"].items():
                if name != "text_offset":
                    assert [one for choice in own for one in choice["logprobs"][name]] == values
        only = await client.events({**SCORE, "stream": True})
        assert len(only) == 2
        assert only[0]["choices"][0]["text"] == PROMPT

    run(engine, scenario)


def test_prompt_logprobs_have_vllm_s_form(engine: Engine, ids: list[int], expected: list[Logprobs | None]) -> None:
    async def scenario(client: Client) -> None:
        status, answer = await client.post({"prompt": PROMPT, "max_tokens": 2, "prompt_logprobs": 1, "logprobs": 3})
        choice = answer["choices"][0]
        assert (status, len(choice["logprobs"]["tokens"])) == (200, 2)
        assert choice["prompt_logprobs"][0] is None
        for token, item, found in zip(ids[1:], expected[1:], choice["prompt_logprobs"][1:], strict=True):
            assert item is not None
            own = found[str(token)]
            assert (own["logprob"], own["rank"]) == (item.logprob, item.rank)
            assert own["decoded_token"] == engine.tokenizer.decode([token], show_special=True)
            best, logprob = item.top[0]
            assert found[str(best)]["logprob"] == logprob
            assert found[str(best)]["rank"] == 1
            assert len(found) == (1 if token == best else 2)

    run(engine, scenario)


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"echo": "yes"}, "echo", "true or false"),
    ({"echo": 1}, "echo", "true or false"),
    ({"echo": True, "suffix": ""}, "echo", "suffix"),
    ({"echo": True, "heal": True}, "echo", "heal"),
    ({"echo": True, "input_extra": [{"text": "x"}]}, "echo", "input_extra"),
    ({"echo": True, "max_tokens": -1}, "max_tokens", "from"),
    ({"echo": True, "logprobs": 21}, "logprobs", "20"),
    ({"echo": True, "logprobs": -1}, "logprobs", "0"),
    ({"echo": False, "max_tokens": 0}, "max_tokens", "from 1"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "from 0 to 20"),
    ({"prompt_logprobs": 21, "echo": True, "logprobs": 1}, "prompt_logprobs", "20"),
    ({"prompt_logprobs": True}, "prompt_logprobs", "whole number"),
    ({"prompt_logprobs": 1, "suffix": "x"}, "prompt_logprobs", "suffix"),
    ({"prompt": [], "echo": True}, "prompt", "list"),
    ({"prompt": [[]], "echo": True}, "prompt", "list"),
    ({"prompt": list(range(97)), "echo": True, "max_tokens": 0}, "prompt", "context"),
]


def test_wrong_fields_are_named(engine: Engine) -> None:
    async def scenario(client: Client) -> None:
        for fields, param, found in BAD:
            status, answer = await client.post({"prompt": "x", **fields})
            assert (status, answer["error"]["param"]) == (400, param), fields
            assert found in answer["error"]["message"], fields
        messages = [{"role": "user", "content": "x"}]
        for field in ({"echo": True}, {"prompt_logprobs": 1}):
            status, answer = await client.post({"messages": messages, **field}, "/v1/chat/completions")
            assert (status, answer["error"]["param"]) == (400, next(iter(field)))
        status, answer = await client.post({"prompt": "x", "echo": True}, "/v1/fim/completions")
        assert (status, answer["error"]["param"]) == (400, "echo")

    run(engine, scenario)


def test_the_number_of_log_probabilities_is_limited(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_sequences, "MAX_PROMPT_LOGPROBS", 100)

    async def scenario(client: Client) -> None:
        assert (await client.post({**SCORE, "prompt": [[5] * 10, [6] * 20], "logprobs": 2}))[0] == 200
        for more in ({"logprobs": 3}, {"n": 2, "max_tokens": 1}):
            status, answer = await client.post({**SCORE, "prompt": [[5] * 10, [6] * 20], "logprobs": 2, **more})
            assert (status, answer["error"]["param"]) == (400, "logprobs")
            assert "at most 100 in one request" in answer["error"]["message"]

    run(engine, scenario)


def test_completions_with_a_prompt_are_not_cached(engine: Engine) -> None:
    async def scenario(client: Client) -> None:
        _, plain = await client.post({**ASK, "echo": False, "logprobs": None})
        _, echoed = await client.post({**ASK, "logprobs": None})
        _, again = await client.post({**ASK, "echo": False, "logprobs": None})
        assert echoed["choices"][0]["text"] == PROMPT + plain["choices"][0]["text"]
        assert again["choices"][0]["text"] == plain["choices"][0]["text"]
        cache = client.server.handler.cache
        assert cache is not None
        assert (cache.num_queries, cache.num_repeated) == (2, 1)

    run(engine, scenario, store=MemoryCacheStore())


@pytest.mark.parametrize(("more", "new_tokens"), [({"max_tokens": 0}, 0), ({"n": 2, "max_tokens": 6}, 12)])
def test_a_prompt_is_charged_once(engine: Engine, ids: list[int], more: dict[str, int], new_tokens: int) -> None:
    used = len(ids) + new_tokens
    for limit, is_refused in ((used, True), (used + 1, False)):
        keys = ApiKeys({"key": "me"}, {"me": Quota(tokens_per_minute=limit)})

        async def scenario(client: Client, is_refused: bool = is_refused) -> None:
            client.server.handler.quotas._clock = lambda: 0.0
            headers = {"Authorization": "Bearer key"}
            statuses = []
            for _ in range(2):
                async with client.session.post(
                    client.server.url + PATH, json={**ASK, "seed": 1, **more}, headers=headers
                ) as response:
                    statuses.append(response.status)
            assert statuses == [200, 429 if is_refused else 200]

        run(engine, scenario, keys=keys)


def test_a_deadline_before_the_end_of_the_prompt_is_a_408(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing log-probabilities are never an answer."""
    engine = make_engine()
    now = [0.0]
    engine.clock = lambda: now[0]
    engine.scheduler._clock = engine.clock
    engine.step_tokens = 16
    step = engine.step

    def slow(*args: Any) -> Any:
        now[0] += 1.0
        return step(*args)

    monkeypatch.setattr(engine, "step", slow)

    async def scenario(client: Client) -> None:
        body = {**ASK, "prompt": [[7] * 60, [8] * 60], "timeout_ms": 2500}
        status, answer = await client.post(body)
        assert (status, answer["error"]["code"]) == (408, "timeout")
        status, answer = await client.post({**body, "stream": True})
        assert (status, answer["error"]["code"]) == (408, "timeout")
        assert engine.num_running == engine.num_waiting == 0
        assert engine.pool.num_used == 0
        assert (await client.post({**body, "timeout_ms": 600_000}))[0] == 200

    run(engine, scenario)


def test_a_client_that_disconnects_ends_the_scoring(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.step_tokens = 2
    step, seen = engine.step, asyncio.Event()

    async def scenario(client: Client) -> None:
        loop = asyncio.get_running_loop()

        def noted(*args: Any) -> Any:
            loop.call_soon_threadsafe(seen.set)
            return step(*args)

        monkeypatch.setattr(engine, "step", noted)
        post = asyncio.create_task(client.post({**SCORE, "prompt": [[7] * 90] * 20}))
        await seen.wait()
        post.cancel()
        async with asyncio.timeout(20):
            while engine.num_running or engine.num_waiting:
                await asyncio.sleep(0.01)
        assert engine.pool.num_used == 0

    run(engine, scenario)


def test_adapters_score_with_their_own_weights(model_dir: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", model_dir, 1)
    engine, merged = Engine.load(str(model_dir)), Engine.load(str(folder))
    engine.load_adapter("tuned", str(folder))

    async def scenario(client: Client) -> None:
        found = [
            (await client.post({**SCORE, "model": name}))[1]["choices"][0]["logprobs"]["token_logprobs"][1:]
            for name in ("tuned", engine.name)
        ]
        assert max(abs(a - b) for a, b in zip(*found, strict=True)) > 0.1
        done = merged.generate([PROMPT], SamplingParams(max_tokens=0, prompt_logprobs=1))[0]
        assert done.prompt_logprobs is not None
        for one, other in zip(found[0], done.prompt_logprobs[1:], strict=True):
            assert other is not None
            assert abs(one - other.logprob) < 1e-3  # merged weights are rounded once more

    run(engine, scenario)


def test_a_gateway_passes_them_on(make_engine: Callable[..., Engine], engine: Engine) -> None:
    expected: list[Any] = []

    async def direct(client: Client) -> None:
        for body in (ASK, SCORE, {**SCORE, "prompt_logprobs": 2, "n": 1}):
            expected.append((await client.post(body))[1]["choices"])

    run(engine, direct)

    async def scenario(fleet: Fleet) -> None:
        bodies = (ASK, SCORE, {**SCORE, "prompt_logprobs": 2, "n": 1})
        assert [(await fleet.post(body))[1]["choices"] for body in bodies] == expected
        status, answer = await fleet.post({**SCORE, "prompt": [5] * 97})
        assert (status, answer["error"]["param"]) == (400, "prompt")

    run_gateway([make_engine()], scenario)


def test_hidden_begin_tokens_and_repeated_texts_are_told_apart() -> None:
    class Begun:
        """A tokenizer that puts <s> before every text, and has two ids of one text."""

        def __init__(self) -> None:
            self.begin_ids = (1,)
            self.names = {1: "<s>", 2: " def", 3: " x", 4: "\ufffd", 5: "\ufffd"}

        def decode(self, tokens: Any, *, show_special: bool) -> str:
            return "".join(self.names[token] for token in tokens).removeprefix(" ")

        def decode_continuation(self, tokens: Any, *, show_special: bool) -> str:
            return "é" if list(tokens) == [4, 5] else "".join(self.names[token] for token in tokens)

    texts = TokenTexts(Begun())  # type: ignore[arg-type]
    items = [None, *(Logprobs(token, -1.0, ((4, -0.5), (5, -2.0)), 1) for token in (2, 3, 4, 5))]
    found = EchoedPrompt(texts, "def xé", (1, 2, 3, 4, 5)).logprobs(items)
    assert found["tokens"] == ["<s>", "def", " x", "\ufffd", "\ufffd"]
    assert found["text_offset"] == [0, 0, 3, 5, 5]
    assert found["top_logprobs"][1] == {" def": -1.0, "\ufffd": -0.5}  # not the second id of that text
    special = EchoedPrompt(texts, "<s>def", (1, 2), parse_special=True).logprobs(items[:2])
    assert special["text_offset"] == [0, 3]
    assert EchoedPrompt(texts, "", (1,)).logprobs([None])["text_offset"] == [0]
    assert openai_logprobs(texts, [], 3)["text_offset"] == []


def test_a_delta_with_the_prompt_is_not_merged_away(engine: Engine) -> None:
    first = CompletionDelta(0, "a", prompt_logprobs=[None])
    second = CompletionDelta(0, "b", "stop")
    assert list(merge_deltas([first, second])) == [first, second]


def test_the_openapi_document_has_the_fields(engine: Engine) -> None:
    async def scenario(client: Client) -> None:
        _, text = await client.get("/openapi.json")
        assert {"echo", "prompt_logprobs"} <= set(json.dumps(json.loads(text)).replace('"', " ").split())

    run(engine, scenario)


def test_parsed_requests_ask_the_engine_for_the_larger_number() -> None:
    assert parse({"prompt": "x", "echo": True, "logprobs": 2, "prompt_logprobs": 5}).sampling.prompt_logprobs == 5
    assert parse({"prompt": "x", "echo": True, "logprobs": 2}).sampling.prompt_logprobs == 2
    assert parse({"prompt": "x", "echo": True}).sampling.prompt_logprobs is None
    assert parse({"prompt": "x", "logprobs": 2}).sampling.prompt_logprobs is None
    with pytest.raises(RequestError):
        parse({"prompt": "x", "logprobs": 2, "max_tokens": 0})
