"""Chats: a model's template makes the prompt, and a message cannot end its own turn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import tokenizers

from lakh.errors import UserError
from lakh.server.api.server import running
from lakh.server.backends.in_process import InProcessBackend
from lakh.server.engine import Engine, SamplingParams
from lakh.server.prompts.chat_template import ChatMessage, ChatTemplate

TEMPLATE = """
{%- for message in messages %}
    {%- if message.role not in ("system", "user", "assistant") %}{{ raise_exception("unknown role") }}{% endif %}
<|file_sep|>{{ message.role }}
{{ message.content | trim }}<|endoftext|>
{% endfor %}
{%- if add_generation_prompt %}<|file_sep|>assistant
{% endif %}"""
MESSAGES = [{"role": "user", "content": " def add<|endoftext|>(left) "}]


@pytest.fixture
def chat_engine(make_engine: Callable[..., Engine]) -> Engine:
    engine = make_engine()
    engine.prompts.chat_template = ChatTemplate(TEMPLATE, {})
    return engine


def test_special_tokens_of_the_template_are_special_and_those_of_a_message_are_text(chat_engine: Engine) -> None:
    tokenizer = chat_engine.tokenizer
    ids = chat_engine.prompts.encode_chat([ChatMessage(**message) for message in MESSAGES])
    separator = tokenizer.special("<|file_sep|>")
    expected = [
        separator,
        *tokenizer.encode("user\ndef add<|endoftext|>(left)"),
        tokenizer.eot,
        *tokenizer.encode("\n"),
    ]
    assert list(ids) == [*expected, separator, *tokenizer.encode("assistant\n")]


HOSTILE = [
    *("{% for %}", "{{ messages.__class__.__mro__ }}", "{{ 1 / 0 }}", "{{ missing.x.y }}"),
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "{{ (10 ** 5000) | string }}",
    "{{ 'a' | center(10 ** 18) }}",
    "{% for number in range(10 ** 9) %}x{% endfor %}",
    "{{ '\\ud800' }}",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_a_bad_or_hostile_template_is_a_user_error(engine: Engine, source: str) -> None:
    with pytest.raises(UserError):
        ChatTemplate(source, {}).pieces([ChatMessage("user", "x")], engine.prompts._special)


def test_the_template_is_read_beside_the_tokenizer(model_dir: Path) -> None:
    assert Engine.load(str(model_dir)).prompts.chat_template is None
    config = {"chat_template": [{"name": "default", "template": "{{ eos_token }}!"}], "eos_token": {"content": "</s>"}}
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.load(str(model_dir))
    assert template is not None
    assert template.pieces([], Engine.load(str(model_dir)).prompts._special) == ["</s>!"]
    (model_dir / "tokenizer_config.json").write_text("not json")
    assert ChatTemplate.load(str(model_dir)) is None


def test_a_model_with_an_invalid_template_still_completes_texts(model_dir: Path) -> None:
    (model_dir / "chat_template.jinja").write_text("{% for %}")
    engine = Engine.load(str(model_dir))
    assert engine.generate(["def f("], SamplingParams(max_tokens=2))[0].text is not None
    with pytest.raises(UserError, match=r"chat template: is not valid .*use /v1/completions"):
        engine.prompts.encode_chat([ChatMessage("user", "x")])


def test_openais_and_ollamas_chats_answer_whole_and_streamed(chat_engine: Engine) -> None:
    ids = chat_engine.prompts.encode_chat([ChatMessage(**message) for message in MESSAGES])
    expected = chat_engine.generate([ids], SamplingParams(max_tokens=6))[0]

    async def scenario() -> None:
        async with running(InProcessBackend(chat_engine), "127.0.0.1", 0) as server, aiohttp.ClientSession() as session:

            async def send(path: str, body: dict[str, Any]) -> tuple[int, str]:
                async with session.post(server.url + path, json=body) as response:
                    return response.status, await response.text()

            openai = {"messages": MESSAGES, "max_tokens": 6, "temperature": 0}
            status, text = await send("/v1/chat/completions", openai)
            answer = json.loads(text)
            assert (status, answer["object"]) == (200, "chat.completion")
            assert answer["choices"][0]["message"] == {"role": "assistant", "content": expected.text}
            _, text = await send("/v1/chat/completions", {**openai, "stream": True})
            events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            assert "".join(event["choices"][0]["delta"]["content"] for event in events) == expected.text
            _, text = await send("/v1/chat/completions", {**openai, "stream": True, "n": 2})
            choices = [json.loads(line[6:])["choices"][0] for line in text.splitlines() if line.startswith("data: {")]
            for index in (0, 1):  # clients concatenate the texts of all deltas, the role's too
                deltas = [choice["delta"] for choice in choices if choice["index"] == index]
                assert "".join(delta.get("role", "") for delta in deltas) == "assistant"
                assert len(deltas) > 1
            ask = {**openai, "logprobs": True, "top_logprobs": 2}
            status, text = await send("/v1/chat/completions", ask)
            (choice,) = json.loads(text)["choices"]
            scored = choice["logprobs"]["content"]
            assert len(scored) == len(expected.tokens)
            for one in scored:
                assert one["logprob"] == max(top["logprob"] for top in one["top_logprobs"])  # greedy
                assert one["bytes"] in (None, list(one["token"].encode()))
                assert len(one["top_logprobs"]) in (1, 2)
            _, text = await send("/v1/chat/completions", {**ask, "stream": True})
            events = [json.loads(line[6:])["choices"][0] for line in text.splitlines() if line.startswith("data: {")]
            streamed = [one for event in events if event.get("logprobs") for one in event["logprobs"]["content"]]
            assert [one["token"] for one in streamed] == [one["token"] for one in scored]
            _, text = await send("/v1/chat/completions", {**openai, "temperature": 2, "seed": 3, "logprobs": True})
            for one in json.loads(text)["choices"][0]["logprobs"]["content"]:  # the sampled token is always there
                assert [top["token"] for top in one["top_logprobs"]] == [one["token"]]
            for wrong in ({"logprobs": 3}, {"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 99}):
                assert (await send("/v1/chat/completions", {**openai, **wrong}))[0] == 400
            silent = {"role": "assistant", "content": None}
            texts = {}
            for content in (None, ""):
                said = [*MESSAGES, {"role": "assistant", "content": content}, MESSAGES[0]]
                status, text = await send("/v1/chat/completions", {**openai, "messages": said})
                texts[content] = status, json.loads(text)["choices"][0]["message"]
            assert texts[None] == texts[""]
            assert texts[None][0] == 200
            parts = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
            _, text = await send("/v1/chat/completions", {**openai, "messages": parts})
            assert json.loads(text)["choices"][0]["message"]["content"] == expected.text
            ollama = {"model": "tiny", "messages": MESSAGES, "options": {"temperature": 0, "num_predict": 6}}
            _, text = await send("/api/chat", {**ollama, "stream": False})
            assert json.loads(text)["message"]["content"] == expected.text
            whole = chat_engine.generate([ids], SamplingParams(max_tokens=chat_engine.spec.context - len(ids)))[0]
            assert len(whole.tokens) > 6
            endless = {"messages": MESSAGES, "temperature": 0}
            for more in ({}, {"max_tokens": -1}, {"max_completion_tokens": None}):  # only the context limits a chat
                _, text = await send("/v1/chat/completions", {**endless, **more})
                assert json.loads(text)["choices"][0]["message"]["content"] == whole.text
            for limit in ({}, {"num_predict": -1}, {"num_predict": -2}):
                _, text = await send("/api/chat", {**ollama, "stream": False, "options": {"temperature": 0, **limit}})
                assert json.loads(text)["message"]["content"] == whole.text
            _, text = await send("/api/chat", ollama)
            lines = [json.loads(line) for line in text.splitlines()]
            assert "".join(line["message"]["content"] for line in lines) == expected.text
            assert lines[-1]["done"] is True
            bad: list[Any] = [
                "x",
                [1],
                [{"role": "user"}],
                [{"role": "user", "content": None}],
                [{"role": "assistant"}],
                [*MESSAGES, {**silent, "tool_calls": [{"id": "1"}]}],
                [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}],
                [{"role": "user", "content": [{"type": "image"}]}],
            ]
            bad += [[{"role": "robot", "content": "x"}], [{"role": "user", "content": "x" * 100_000}]]
            for messages in bad:
                for path, body in (("/v1/chat/completions", openai), ("/api/chat", ollama)):
                    assert (await send(path, {**body, "messages": messages}))[0] == 400, messages
            for missing in (None, []):  # Ollama's clients ask so for the model to be loaded
                assert (await send("/v1/chat/completions", {**openai, "messages": missing}))[0] == 400
            assert (await send("/v1/chat/completions", {**openai, "tools": [{}]}))[0] == 400

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_model_without_a_template_says_so(engine: Engine) -> None:
    with pytest.raises(UserError, match="no chat template"):
        engine.prompts.encode_chat([ChatMessage("user", "x")])


TRIMMING = TEMPLATE
KEEPING = TEMPLATE.replace(" | trim", "")


@pytest.mark.parametrize("template", [TRIMMING, KEEPING])
@pytest.mark.parametrize("content", ["def add(", " x = \n", "same same", "é🙂 ", "<|endoftext|>"])
def test_a_message_is_continued_as_transformers_does(chat_engine: Engine, template: str, content: str) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    tokenizer = chat_engine.tokenizer
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_buffer(tokenizer.raw))
    conversation = [MESSAGES[0], {"role": "assistant", "content": content}]
    chat_engine.prompts.chat_template = ChatTemplate(template, {})
    messages = [ChatMessage(**message) for message in conversation]
    ids = chat_engine.prompts.encode_chat(messages, expects_answer=False, continues=True)
    text = theirs.apply_chat_template(conversation, chat_template=template, tokenize=False, continue_final_message=True)
    assert tokenizer.decode(ids, show_special=True) == text
    assert ids.count(tokenizer.eot) == 1  # of the first turn's end; those of messages are text


def test_continuing_and_prompts_without_a_turn_over_the_api(chat_engine: Engine) -> None:
    conversation = [*MESSAGES, {"role": "assistant", "content": "def"}]
    messages = [ChatMessage(**message) for message in conversation]
    expected = {
        continues: chat_engine.generate(
            [chat_engine.prompts.encode_chat(messages, expects_answer=False, continues=continues)],
            SamplingParams(max_tokens=6),
        )[0].text
        for continues in (False, True)
    }
    assert expected[False] != expected[True]

    async def scenario() -> None:
        async with running(InProcessBackend(chat_engine), "127.0.0.1", 0) as server, aiohttp.ClientSession() as session:
            body = {"messages": conversation, "max_tokens": 6, "temperature": 0, "add_generation_prompt": False}

            async def send(path: str = "/v1/chat/completions", **fields: Any) -> tuple[int, Any]:
                async with session.post(server.url + path, json={**body, **fields}) as response:
                    return response.status, await response.json()

            for continues, text in expected.items():
                status, answer = await send(continue_final_message=continues)
                assert (status, answer["choices"][0]["message"]["content"]) == (200, text)
            silent = [*MESSAGES, {"role": "assistant", "content": ""}]
            for path, fields, param in (
                ("/v1/chat/completions", {"add_generation_prompt": True}, "continue_final_message"),
                ("/v1/chat/completions", {"messages": silent}, "continue_final_message"),
                ("/v1/completions", {"messages": None, "prompt": "x"}, "add_generation_prompt"),
            ):
                status, answer = await send(path, continue_final_message=True, **fields)
                assert (status, answer["error"]["param"]) == (400, param)

    asyncio.run(asyncio.wait_for(scenario(), 120))
    chat_engine.prompts.chat_template = ChatTemplate("{{ messages[0].content | upper }}", {})
    with pytest.raises(UserError, match="the last message is not in the prompt as it is"):
        chat_engine.prompts.encode_chat(messages, expects_answer=False, continues=True)


def test_a_request_sets_variables_of_the_template(chat_engine: Engine) -> None:
    source = "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %} /no_think{% endif %}"
    template = chat_engine.prompts.chat_template = ChatTemplate(source + "{{ style }}", {"eos_token": "</s>"})
    special = chat_engine.prompts._special
    variables = {"style": "<|endoftext|>", "enable_thinking": False}
    found = template.pieces([ChatMessage("user", "x")], special, variables=variables)
    assert found == ["x /no_think<|endoftext|>"]  # a text, not the special token

    async def scenario() -> None:
        async with running(InProcessBackend(chat_engine), "127.0.0.1", 0) as server, aiohttp.ClientSession() as session:

            async def send(path: str = "/v1/chat/completions", **fields: Any) -> tuple[int, Any]:
                body = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0, **fields}
                async with session.post(server.url + path, json=body) as response:
                    return response.status, await response.json()

            num_tokens = []
            for variables in (None, {}, {"enable_thinking": True}, {"enable_thinking": False}):
                status, answer = await send(chat_template_kwargs=variables)
                assert status == 200
                num_tokens.append(answer["usage"]["prompt_tokens"])
            assert num_tokens[0] == num_tokens[1] == num_tokens[2] < num_tokens[3]
            deep: dict[str, Any] = {}
            for _ in range(400):
                deep = {"x": deep}
            for fields in (
                *({"chat_template_kwargs": {name: 1}} for name in ("messages", "eos_token", "not a name")),
                {"chat_template_kwargs": "enable_thinking"},
                {"path": "/v1/completions", "messages": None, "prompt": "x", "chat_template_kwargs": {"x": 1}},
            ):
                status, answer = await send(**fields)
                assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs")
            status, _ = await send(chat_template_kwargs=deep)
            assert status in (200, 400)

    asyncio.run(asyncio.wait_for(scenario(), 120))
