"""Answers in channels, as GPT-OSS writes them: reasoning, text and calls are told apart, with tools and without."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from lakh.server.api import responses
from lakh.server.api.dialects.ollama import OLLAMA_CHAT
from lakh.server.backend import CompletionDelta
from lakh.server.backends.completion_cache import CompletionCache
from lakh.server.backends.in_process import InProcessBackend
from lakh.server.engine import Engine
from lakh.server.gateway.gateway import _after
from lakh.server.prompts.chat_template import ChatTemplate
from lakh.server.prompts.encoder import PromptEncoder
from lakh.server.request import RequestError, parse
from lakh.server.store import MemoryCacheStore
from lakh.server.structured.constraint import OutputConstraint
from lakh.server.tools.channels import ChannelParser
from lakh.server.tools.forms import find_tool_form
from lakh.server.tools.forms.harmony import HarmonyForm
from lakh.server.tools.forms.tool_form import lark_text
from lakh.server.tools.messages import read_messages
from lakh.server.tools.tool_use import ToolUse
from lakh.tokens.tokenizer import Tokenizer

from .conftest import random_weights, tiny_spec
from .test_dialects import Post, run
from .test_gateway import Fleet
from .test_gateway import run as run_gateway
from .test_structured import FORMS as STRUCTURED
from .test_tool_calls import CALL, CHAT, CONVERSATION, USER, ask, streamed
from .tool_templates import FORMS as TOOL_FORMS
from .tool_templates import HARMONY, TOOLS

FORM = find_tool_form(HARMONY)
THINK = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL_HEAD = "<|channel|>commentary to=functions.read_file <|constrain|>json<|message|>"
READ = '{"path": "a.py"}'


def read(pieces: list[str], use: ToolUse | None = None, **more: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, text and calls."""
    assert isinstance(FORM, HarmonyForm)
    parser = ChannelParser(FORM, use, **more)
    found = [parser.push(piece, is_final=at == len(pieces)) for at, piece in enumerate(pieces, 1)]
    calls = [(call.name, call.arguments) for one in found for call in one.calls]
    return "".join(one.reasoning for one in found), "".join(one.text for one in found), calls


WITHOUT_TOOLS = [
    (f"{THINK}{FINAL}2 + 2 = 4.", "Hm.", "2 + 2 = 4."),
    (f"{THINK}{FINAL}2 + 2 = 4.<|return|>", "Hm.", "2 + 2 = 4."),
    (f"{THINK}{THINK}{FINAL}A < B\n", "Hm.\n\nHm.", "A < B\n"),
    (f"{THINK}<|channel|>commentary<|message|>First a plan.<|end|><|start|>assistant{FINAL}Done.", "Hm.",
     "First a plan.\n\nDone."),
    ("<|channel|>analysis<|message|>cut off in", "cut off in", ""),
    ("<|channel|>analysis<|message|>", "", ""),
    ("<|channel|>comment", "", ""),
    (f"{THINK}", "Hm.", ""),
    (f"{FINAL}<|end|>", "", ""),
    ("<|message|>no header", "", "<|message|>no header"),
    ("no channels at all", "", "no channels at all"),
    (f"text{FINAL}more", "", "text\n\nmore"),
    ("<|start|>assistant<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b", "a", "b"),
    ("<|channel|>analysis<|message|>a<|end|>assistant<|channel|>final<|message|>b", "a", "b"),
    ("assistants are many", "", "assistants are many"),
    ("<|channel|> analysis to=python code<|message|>1 + 1<|call|>", "1 + 1", ""),
    # No tools: nothing that the client could call.
    (f"{THINK}{CALL_HEAD}{READ}<|call|>", "Hm.", "<|start|>assistant" + CALL_HEAD + READ),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "reasoning", "text"), WITHOUT_TOOLS)
def test_reasoning_and_text_are_told_apart_wherever_the_answer_is_cut(answer: str, reasoning: str, text: str) -> None:
    assert read([answer]) == (reasoning, text, [])
    assert read(list(answer)) == (reasoning, text, [])
    assert read([*answer, ""]) == (reasoning, text, [])
    for cut in range(len(answer)):
        assert read([answer[:cut], answer[cut:]]) == (reasoning, text, [])


@pytest.mark.parametrize(
    "head",
    [
        CALL_HEAD,
        "<|channel|>commentary to=functions.read_file json<|message|>",
        "<|channel|>commentary to=functions.read_file<|channel|>commentary<|message|>",
        " to=functions.read_file<|channel|>commentary json<|message|>",
        "<|start|>assistant to=functions.read_file<|channel|>analysis <|constrain|>json<|message|>",
        "<|channel|>commentary to=read_file<|message|>",
    ],
)
@pytest.mark.parametrize("end", ["", "<|call|>", "<|end|>", "<|return|>"])
def test_a_call_is_read_however_its_recipient_is_written(head: str, end: str) -> None:
    use = ToolUse(json.dumps(TOOLS))
    assert read([head + READ + end], use) == ("", "", [("read_file", READ)])
    assert read(list(THINK + head + READ + end), use) == ("Hm.", "", [("read_file", READ)])
    assert read([head + end], use) == ("", "", [("read_file", "{}")])
    strict = ToolUse(json.dumps([{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]))
    _, _, parts = read(list(head + READ + end), strict)
    assert parts[0] == ("read_file", "")
    assert "".join(arguments for _, arguments in parts) == READ


@given(data=st.data(), tools=st.booleans(), goes_on=st.booleans())
def test_no_answer_breaks_the_parser(data: st.DataObject, tools: bool, goes_on: bool) -> None:
    whole = THINK + CALL_HEAD + READ + "<|call|>" + FINAL
    parts = [whole[at : at + 11] for at in range(0, len(whole), 5)]
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", " to=functions.f", "analysis", "x" * 300]
    text = "".join(
        data.draw(st.lists(st.one_of(st.sampled_from(parts), st.sampled_from(marks), st.text(max_size=3)), max_size=14))
    )
    cuts = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=6))})
    pieces = [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]
    use = ToolUse(json.dumps(TOOLS)) if tools else None
    assert read([*pieces, ""], use, goes_on=goes_on) == read([text], use, goes_on=goes_on)


# --- over the API ---


@pytest.fixture(scope="module")
def harmony_engine(tokenizer_json: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A tiny model whose answers end as those of the published ones: generation_config.json says with which tokens."""
    inner = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    inner.add_special_tokens(list(TOOL_FORMS["harmony"].special))
    folder = tmp_path_factory.mktemp("harmony")
    inner.save(str(folder / "tokenizer.json"))
    ends = [inner.token_to_id(token) for token in ("<|return|>", "<|endoftext|>", "<|call|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    spec = tiny_spec(context=2048)
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    assert tokenizer.end_ids == tuple(ends)
    engine = Engine("tiny", spec, random_weights(spec), tokenizer, device="cpu")
    engine.prompts.chat_template = ChatTemplate(HARMONY, {})
    return engine


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Make the model answer with exactly this text, special tokens included: gives the field that demands it."""
    texts: list[str] = []

    def grammar(encoder: PromptEncoder, form: Any, constraint: OutputConstraint) -> OutputConstraint:
        return OutputConstraint("grammar", f"start: {lark_text(texts[-1], encoder._special)}", "guided_regex")

    monkeypatch.setattr(PromptEncoder, "answer_constraint", grammar)

    def write(answer: str) -> dict[str, Any]:
        texts.append(answer)
        return {"guided_regex": answer}

    return write


def test_chats_without_tools_have_reasoning_and_text(
    harmony_engine: Engine, script: Callable[[str], dict[str, Any]]
) -> None:
    pytest.importorskip("llguidance", reason="pip install 'lakh[structured]'")

    async def scenario(send: Post) -> None:
        body = script(f"{THINK}{FINAL}It is 4.")
        (choice,) = (await ask(send, **body))["choices"]
        assert choice["message"] == {"role": "assistant", "content": "It is 4.", "reasoning_content": "Hm."}
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        for more in ({}, {"n": 2}, {"logprobs": True}):
            messages, choices = await streamed(send, **body, **more)
            assert all(message == choice["message"] for message in messages.values())
            for one in choices:  # both are not in one delta, and neither is lost
                assert not (one["delta"].get("reasoning_content") and one["delta"]["content"])
        with pytest.MonkeyPatch.context() as patch:  # however slow the machine is
            patch.setattr(responses, "KEEP_ALIVE_S", float("inf"))
            messages, choices = await streamed(send, **body)
        assert len([one for one in choices if not one["delta"]["content"]]) < 8  # no event for each mark
        script("<|channel|>analysis<|message|>It never ends")
        (cut,) = (await ask(send, **body, max_tokens=14))["choices"]
        assert cut["finish_reason"] == "length"
        assert cut["message"]["content"] == ""
        assert "It never ends".startswith(cut["message"]["reasoning_content"])
        stopped = await ask(send, **body, stop=["never"])
        assert stopped["choices"][0]["message"]["reasoning_content"] == "It "
        assert stopped["choices"][0]["stop_reason"] == "never"
        script(f"{THINK}{FINAL}It is 4.")
        for stream in (False, True):
            for path, prompt, field in (
                ("/api/chat", {"messages": [USER]}, "message"),
                ("/api/generate", {"prompt": "x"}, ""),
            ):
                asked = {"model": "tiny", **prompt, "stream": stream, "format": {"type": "object"}}
                status, _, text = await send(path, asked)
                assert status == 200, text
                parts = [json.loads(line) for line in text.splitlines()]
                found = [part[field] if field else part for part in parts]
                assert "".join(part.get("thinking", "") for part in found) == "Hm."
                assert "".join(part.get("content" if field else "response", "") for part in found) == "It is 4."

    run(harmony_engine, scenario)


def test_the_tokens_that_end_a_message_end_the_answer(harmony_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own <|call|> and <|return|>, as a random model writes them where nothing else may follow."""
    pytest.importorskip("llguidance", reason="pip install 'lakh[structured]'")
    special = harmony_engine.prompts._special

    async def scenario(send: Post) -> None:
        for answer, is_call in ((f"{THINK}{CALL_HEAD}{READ}", True), (f"{THINK}{FINAL}Done.", False)):
            grammar = f"start: {lark_text(answer, special)} more?\nmore: /[a-z]{{9}}/"
            monkeypatch.setattr(
                PromptEncoder, "tool_grammar", lambda *_, text=grammar: OutputConstraint("grammar", text, "tools")
            )
            for end in ("<|call|>", "<|return|>"):
                bias = {str(harmony_engine.tokenizer.special(end)): 100.0}
                body = {"tools": TOOLS, "tool_choice": "required", "logit_bias": bias}
                (choice,) = (await ask(send, **body))["choices"]
                assert choice["finish_reason"] == ("tool_calls" if is_call else "stop")
                assert choice["message"]["reasoning_content"] == "Hm."
                assert [call["function"]["arguments"] for call in choice["message"].get("tool_calls", ())] == [
                    READ
                ] * is_call
                assert choice["message"]["content"] == (None if is_call else "Done.")

    run(harmony_engine, scenario)


def test_a_form_is_that_of_the_final_text(harmony_engine: Engine) -> None:
    pytest.importorskip("llguidance", reason="pip install 'lakh[structured]'")
    bias = {str(harmony_engine.tokenizer.special("<|end|>")): 100.0}

    async def scenario(send: Post) -> None:
        reasoned = 0
        for number, (fields, is_right) in enumerate(STRUCTURED):
            for seed in (1, 2):
                body = {**fields, "temperature": 1.0, "seed": seed, "logit_bias": bias, "max_tokens": 400}
                found = await ask(send, **body)
                (choice,) = found["choices"]
                assert choice["finish_reason"] == "stop", (number, found)
                assert is_right(choice["message"]["content"]), (number, found)
                reasoned += found["usage"]["completion_tokens"] > 0 and "reasoning_content" in choice["message"]
        status, _, text = await send(CHAT, {"messages": [USER], "guided_regex": "(", "max_tokens": 9})
        assert (status, json.loads(text)["error"]["param"]) == (400, "guided_regex")

    run(harmony_engine, scenario)


def test_reasoning_goes_back_to_the_model_beside_calls(harmony_engine: Engine) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_buffer(harmony_engine.tokenizer.raw),
        clean_up_tokenization_spaces=False,
    )
    question, called, *rest = CONVERSATION
    for name in ("reasoning_content", "reasoning", "thinking"):
        ours = [question, {**called, name: "I must <|end|> look."}, *rest]
        expected = [question, {**called, "thinking": "I must look."}, *rest]
        expected = json.loads(json.dumps(expected))
        for call in expected[1]["tool_calls"]:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        text = theirs.apply_chat_template(
            expected, tools=TOOLS, chat_template=HARMONY, add_generation_prompt=True, tokenize=False
        )
        encode = harmony_engine.prompts.encode_chat
        ours[1][name] = "I must look."
        assert list(encode(read_messages(ours), tools=TOOLS)) == theirs(text, add_special_tokens=False)["input_ids"]
        plain = encode(read_messages([question, called, *rest]), tools=TOOLS)
        ours[1][name] = "I must <|end|> look."  # stays text
        end = harmony_engine.tokenizer.special("<|end|>")
        assert list(encode(read_messages(ours), tools=TOOLS)).count(end) == list(plain).count(end) + 1
    both = [question, {**called, "content": "I look.", "reasoning_content": "I must."}, *rest]
    text = harmony_engine.tokenizer.decode(harmony_engine.prompts.encode_chat(read_messages(both)), show_special=True)
    assert "<|channel|>analysis<|message|>I must.\nI look.<|end|>" in text  # the template has room for one of them
    others = ChatTemplate("{% for m in messages %}{{ m.reasoning_content }}|{% endfor %}", {})
    (text,) = others.pieces(
        read_messages([{"role": "assistant", "content": "x", "reasoning": "y"}]), harmony_engine.prompts._special
    )
    assert text == "y|"


def test_reasoning_that_is_no_text_is_refused_and_its_effort_is_set(harmony_engine: Engine) -> None:
    async def scenario(send: Post) -> None:
        bad = [USER, {"role": "assistant", "content": "x", "reasoning_content": 3}, USER]
        status, _, text = await send(CHAT, {"messages": bad})
        assert (status, json.loads(text)["error"]["param"]) == (400, "messages")
        status, _, text = await send(CHAT, {"messages": [USER], "reasoning_effort": 3})
        assert (status, json.loads(text)["error"]["param"]) == (400, "reasoning_effort")
        sizes = {}
        for effort in ("low", "medium", "a very long reasoning effort"):
            sizes[effort] = (await ask(send, reasoning_effort=effort, max_tokens=2))["usage"]["prompt_tokens"]
        assert sizes["a very long reasoning effort"] > sizes["medium"]
        assert (await ask(send, max_tokens=2))["usage"]["prompt_tokens"] == sizes["medium"]

    run(harmony_engine, scenario)
    request = parse(
        {"messages": [USER], "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}
    )
    assert json.loads(request.template_variables) == {"reasoning_effort": "high"}
    assert parse({"prompt": "x", "reasoning_effort": "low"}).template_variables == ""


def test_an_answer_that_goes_on_with_a_text_is_one(harmony_engine: Engine) -> None:
    async def scenario(send: Post) -> None:
        body = {"messages": [USER, {"role": "assistant", "content": "It se"}], "max_tokens": 6}
        found = await ask(send, **body, add_generation_prompt=False, continue_final_message=True)
        message = found["choices"][0]["message"]
        assert message.keys() == {"role", "content"}

    run(harmony_engine, scenario)


def test_a_gateway_and_the_cache_keep_reasoning(
    harmony_engine: Engine, script: Callable[[str], dict[str, Any]]
) -> None:
    pytest.importorskip("llguidance", reason="pip install 'lakh[structured]'")
    body = script(f"{THINK}{FINAL}It is 4.")

    async def through_gateway(fleet: Fleet) -> None:
        async def send(path: str, body: Any = None) -> tuple[int, str, str]:
            async with fleet.session.post(fleet.server.url + path, json=body) as response:
                return response.status, response.content_type, await response.text()

        (choice,) = (await ask(send, **body))["choices"]
        assert choice["message"] == {"role": "assistant", "content": "It is 4.", "reasoning_content": "Hm."}
        messages, _ = await streamed(send, **body)
        assert messages[0] == choice["message"]
        answered = {**choice["message"], "tool_calls": [{**CALL, "function": {"name": "read_file"}}]}
        conversation = [USER, answered, {"role": "tool", "tool_call_id": CALL["id"], "content": "x"}]
        with_reasoning = await ask(send, messages=conversation, max_tokens=2)
        del answered["reasoning_content"]
        without = await ask(send, messages=conversation, max_tokens=2)
        assert with_reasoning["usage"]["prompt_tokens"] > without["usage"]["prompt_tokens"]

    run_gateway([harmony_engine], through_gateway)

    async def cached() -> None:
        cache = CompletionCache(InProcessBackend(harmony_engine), MemoryCacheStore())
        request = parse({"messages": [USER], "max_tokens": 60, "temperature": 0, **body})
        for num_hits in (0, 1):
            deltas = [item async for item in cache.complete(request) if isinstance(item, CompletionDelta)]
            assert "".join(delta.reasoning for delta in deltas) == "Hm."
            assert "".join(delta.text for delta in deltas) == "It is 4."
            assert cache.num_repeated == num_hits
        await cache.backend.close()

    asyncio.run(cached())


def test_another_engine_repeats_what_was_sent_before_it_goes_on() -> None:
    assert _after("", "abc") == ("abc", "")
    assert _after("ab", "abc") == ("c", "")
    assert _after("abcd", "abc") == ("", "d")
    with pytest.raises(RequestError, match="differs"):
        _after("abx", "abc")


def test_ollama_s_messages_bring_their_thinking_along() -> None:
    message = {"role": "assistant", "content": "x", "thinking": "Hm."}
    body = OLLAMA_CHAT.to_openai({"model": "m", "messages": [USER, message]})
    assert parse(body).messages[1].reasoning == "Hm."
    for think, variables in (("low", '{"reasoning_effort": "low"}'), ("", ""), (False, ""), (None, "")):
        body = OLLAMA_CHAT.to_openai({"model": "m", "messages": [USER], "think": think})
        assert parse(body).template_variables == variables
    with pytest.raises(RequestError, match="think is not supported"):
        OLLAMA_CHAT.to_openai({"model": "m", "messages": [USER], "think": True})
