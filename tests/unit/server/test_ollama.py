"""Ollama's POST /api/generate: templates, system messages, contexts and raw prompts, also with Ollama's own client."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from lakh.server.engine import Engine, SamplingParams
from lakh.server.prompts.chat_template import ChatMessage, ChatTemplate

from .test_chat import TEMPLATE
from .test_dialects import Post, run
from .test_fuzz import serving
from .test_gateway import Fleet
from .test_gateway import run as run_gateway

GREEDY = {"temperature": 0, "num_predict": 6}
ASK = {"model": "tiny", "prompt": "def add(", "options": GREEDY, "stream": False}
PATH = "/api/generate"
SIX = SamplingParams(max_tokens=6)


@pytest.fixture
def chat_engine(make_engine: Callable[..., Engine]) -> Engine:
    engine = make_engine(context=192)
    engine.prompts.chat_template = ChatTemplate(TEMPLATE, {})
    return engine


def test_a_prompt_is_a_message_to_a_model_with_a_template(chat_engine: Engine) -> None:
    user, system = ChatMessage("user", "def add("), ChatMessage("system", "Be brief.")
    asked = chat_engine.prompts.encode_chat([user])
    with_system = chat_engine.prompts.encode_chat([system, user])
    answers = [chat_engine.generate([ids], SIX)[0] for ids in (asked, with_system)]
    plain = chat_engine.generate(["def add("], SIX)[0]
    assert len({answers[0].text, answers[1].text, plain.text}) == 3

    async def scenario(send: Post) -> None:
        async def answer(**fields: Any) -> Any:
            status, _, text = await send(PATH, {**ASK, **fields})
            assert status == 200, text
            return json.loads(text)

        first = await answer()
        assert first["response"] == answers[0].text
        assert first["context"] == [*asked, *answers[0].tokens]
        assert first["prompt_eval_count"] == len(asked)
        assert (await answer(system="Be brief."))["response"] == answers[1].text
        # Ollama's client in Go sends every field.
        empty = {"suffix": "", "system": "", "template": "", "context": [], "images": [], "raw": False}
        assert (await answer(**empty))["response"] == answers[0].text
        raw = await answer(raw=True)
        assert raw["response"] == plain.text
        assert "context" not in raw
        end_of_file = await answer(suffix="")  # of an editor
        assert end_of_file["response"] == plain.text
        _, _, text = await send(PATH, {**ASK, "stream": True})
        lines = [json.loads(line) for line in text.splitlines()]
        assert "".join(line["response"] for line in lines) == answers[0].text
        assert lines[-1]["context"] == first["context"]
        assert not any("context" in line for line in lines[:-1])
        # Without a limit: as much as the context holds, as in a chat.
        unlimited = await answer(options={"temperature": 0})
        assert unlimited["eval_count"] == chat_engine.spec.context - len(asked) or unlimited["done_reason"] == "stop"

    run(chat_engine, scenario)


def test_a_context_goes_on_with_a_conversation(chat_engine: Engine) -> None:
    async def scenario(send: Post) -> None:
        _, _, text = await send(PATH, ASK)
        context = json.loads(text)["context"]
        asked = chat_engine.prompts.encode_chat([ChatMessage("user", "again")])
        expected = chat_engine.generate([[*context, *asked]], SIX)[0]
        _, _, text = await send(PATH, {**ASK, "prompt": "again", "context": context})
        assert json.loads(text)["response"] == expected.text
        assert json.loads(text)["context"] == [*context, *asked, *expected.tokens]
        for _ in range(12):  # it never outgrows the model: the oldest part is left out
            status, _, text = await send(PATH, {**ASK, "prompt": "again", "context": context})
            assert status == 200
            context = json.loads(text)["context"]
        assert len(context) <= chat_engine.spec.context

    run(chat_engine, scenario)


def test_without_a_template_a_prompt_is_a_text(engine: Engine) -> None:
    plain = engine.generate(["def add("], SIX)[0]

    async def scenario(send: Post) -> None:
        for fields in ({}, {"suffix": ""}, {"system": "", "suffix": ""}, {"raw": True}):
            status, _, text = await send(PATH, {**ASK, **fields})
            assert (status, json.loads(text)["response"]) == (200, plain.text)
        status, _, text = await send(PATH, {**ASK, "system": "Be brief."})
        assert status == 400
        assert "no chat template" in json.loads(text)["error"]
        _, _, text = await send(PATH, ASK)
        context = json.loads(text)["context"]
        more = engine.tokenizer.encode_continuation("x = ")
        expected = engine.generate([[*context, *more]], SIX)[0]
        _, _, text = await send(PATH, {**ASK, "prompt": "x = ", "context": context})
        assert json.loads(text)["response"] == expected.text
        status, _, _ = await send(PATH, {**ASK, "prompt": "x" * 5000})  # cut to its end, as at the end of a file
        assert status == 200

    run(engine, scenario)


BAD = [
    ({"template": "{{ .Prompt }}"}, "template"),
    ({"template": "{{ .Prompt }}", "raw": True}, "template"),
    ({"raw": True, "system": "x"}, "raw"),
    ({"raw": True, "context": [1]}, "raw"),
    ({"suffix": "x", "system": "x"}, "suffix"),
    ({"raw": "yes"}, "raw"),
    ({"raw": 1}, "raw"),
    ({"system": 5}, "system"),
    ({"system": ["x"]}, "system"),
    ({"context": "x"}, "context"),
    ({"context": [1.5]}, "context"),
    ({"context": [True]}, "context"),
    ({"context": [-1]}, "context"),
    ({"context": [320]}, "context"),
    ({"context": {"a": 1}}, "context"),
    ({"prompt": ["x"]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [1, 2]}, "prompt"),
    ({"suffix": 5}, "suffix"),
    ({"suffix": ["x"]}, "suffix"),
    ({"prompt": "x\ud800"}, "surrogate"),
    ({"images": ["aGk="]}, "images"),
    ({"think": True}, "think"),
    ({"prompt": "x" * 5000}, "context"),
]


def test_wrong_fields_are_named(chat_engine: Engine) -> None:
    async def scenario(send: Post) -> None:
        for fields, found in BAD:
            for stream in (False, True):
                status, _, text = await send(PATH, {**ASK, **fields, "stream": stream})
                assert status == 400, (fields, text)
                assert found in json.loads(text)["error"], fields
        assert (await send(PATH, ASK))[0] == 200

    run(chat_engine, scenario)


def test_a_gateway_passes_messages_on(chat_engine: Engine) -> None:
    expected: list[Any] = []
    bodies = [ASK, {**ASK, "system": "Be brief."}, {**ASK, "context": [20, 21]}]

    async def direct(send: Post) -> None:
        for body in bodies:
            expected.append(json.loads((await send(PATH, body))[2]))

    run(chat_engine, direct)

    async def scenario(fleet: Fleet) -> None:
        for body, answer in zip(bodies, expected, strict=True):
            async with fleet.session.post(fleet.server.url + PATH, json=body) as response:
                found = await response.json()
            assert (found["response"], found["context"]) == (answer["response"], answer["context"])

    run_gateway([chat_engine], scenario)


def test_ollama_s_python_client_generates(chat_engine: Engine) -> None:
    ollama = pytest.importorskip("ollama", reason="pip install ollama")
    asked = chat_engine.prompts.encode_chat([ChatMessage("user", "def add(")])
    expected = chat_engine.generate([asked], SIX)[0]
    with serving(chat_engine) as (url, _):
        client = ollama.Client(host=url)
        ask = {"model": "tiny", "prompt": "def add(", "options": GREEDY}
        first = client.generate(**ask)
        assert first.response == expected.text
        assert list(first.context) == [*asked, *expected.tokens]
        assert "".join(part.response for part in client.generate(**ask, stream=True)) == expected.text
        again = client.generate(**{**ask, "prompt": "again"}, context=first.context, system="Be brief.")
        assert len(again.context) > len(first.context)
        assert client.generate(**ask, raw=True).context is None
        with pytest.raises(ollama.ResponseError, match="template"):
            client.generate(**ask, template="{{ .Prompt }}")
