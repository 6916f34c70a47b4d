"""Tools in chats over the API: prompts are those of transformers, and a random model that must call a tool does so."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from lakh.errors import UserError
from lakh.server.api import dialects, responses
from lakh.server.api.dialects.ollama import OLLAMA_CHAT
from lakh.server.engine import Engine, SamplingParams
from lakh.server.prompts.chat_template import ChatMessage, ChatTemplate
from lakh.server.prompts.encoder import PromptEncoder
from lakh.server.structured.constraint import OutputConstraint
from lakh.server.tools.channels import ChannelParser
from lakh.server.tools.forms.tool_form import lark_text
from lakh.server.tools.messages import read_messages
from lakh.server.tools.parser import ToolCallParser
from lakh.server.tools.tool_use import ToolUse, read_tool_use
from lakh.tokens.tokenizer import Tokenizer

from .conftest import random_weights, tiny_spec
from .test_dialects import Post, run
from .test_fuzz import serving
from .test_gateway import Fleet
from .test_gateway import run as run_gateway
from .tool_templates import FORMS, TOOLS

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Read it."}
CALL = {"id": "abc123XYZ", "type": "function"}
CONVERSATION = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{**CALL, "function": {"name": "read_file", "arguments": '{"path": "a.py", "line": 3}'}}],
    },
    {"role": "tool", "tool_call_id": "abc123XYZ", "content": "x = 'ä'\n"},
    {"role": "assistant", "content": "It sets x."},
    {"role": "user", "content": "Again."},
]
# A random model ends every value of these, and soon.
SHORT_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "enum": ["a.py", "ä.py"]},
                    "line": {"type": "integer", "minimum": 0, "maximum": 99},
                    "is_whole": {"type": "boolean"},
                },
                "required": ["path", "is_whole"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("read_file", "show-file")
]

MakeToolEngine = Callable[[str], Engine]


@pytest.fixture(scope="module")
def tool_engine(tokenizer_json: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeToolEngine:
    """A tiny model with the template and the special tokens of a form."""
    made: dict[str, Engine] = {}

    def make(kind: str) -> Engine:
        if kind not in made:
            inner = tokenizers.Tokenizer.from_file(str(tokenizer_json))
            inner.add_special_tokens(list(FORMS[kind].special))
            path = tmp_path_factory.mktemp(kind) / "tokenizer.json"
            inner.save(str(path))
            spec = tiny_spec(context=4096)
            made[kind] = Engine("tiny", spec, random_weights(spec), Tokenizer.load(path), device="cpu")
            made[kind].prompts.chat_template = ChatTemplate(FORMS[kind].template, {})
        return made[kind]

    return make


each = pytest.mark.parametrize("kind", FORMS)


@each
@pytest.mark.parametrize("tools", [TOOLS, None])
def test_prompts_are_those_of_transformers(tool_engine: MakeToolEngine, kind: str, tools: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    engine = tool_engine(kind)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_buffer(engine.tokenizer.raw), clean_up_tokenization_spaces=False
    )
    for conversation in ([USER], CONVERSATION):
        as_objects = json.loads(json.dumps(conversation))  # transformers passes on what it gets: objects
        for message in as_objects:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        text = theirs.apply_chat_template(
            as_objects, tools=tools, chat_template=FORMS[kind].template, add_generation_prompt=True, tokenize=False
        )
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        ids = engine.prompts.encode_chat(read_messages(conversation), tools=tools or ())
        assert list(ids) == list(expected)


@each
def test_special_tokens_in_tools_calls_and_results_stay_text(tool_engine: MakeToolEngine, kind: str) -> None:
    engine = tool_engine(kind)
    special = [*FORMS[kind].special, "<|endoftext|>", "<|repo_name|>"]
    bad = "".join(special)
    num_special = engine.tokenizer.vocab_size - 300 + 7

    def counts(marker: str) -> list[int]:
        """How often each special token is in the prompt."""
        schema = {"type": "object", "properties": {f"p{marker}": {"type": "string", "description": marker}}}
        tool = {"name": f"f{marker}", "description": marker, "parameters": schema}
        call = {"name": f"f{marker}", "arguments": json.dumps({f"p{marker}": marker, "q": [marker]})}
        conversation = [
            {"role": "user", "content": f"x{marker}", "name": f"n{marker}"},
            {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": call}]},
            {"role": "tool", "tool_call_id": "abc123XYZ", "content": f"x{marker}"},
            {"role": "user", "content": "x"},
        ]
        tools = [{"type": "function", "function": tool}]
        ids = engine.prompts.encode_chat(read_messages(conversation), tools=tools)
        return [ids.count(number) for number in (*range(7), *range(300, 300 + num_special - 7))]

    assert counts(bad) == counts("y")


def test_models_without_a_place_for_tools_say_so(engine: Engine, tool_engine: MakeToolEngine) -> None:
    tool_engine("hermes")
    prompts = PromptEncoder(engine.tokenizer, engine.spec)
    with pytest.raises(UserError, match="no chat template"):
        prompts.tool_form()
    prompts.chat_template = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}", {})
    with pytest.raises(UserError, match=r"tools: the model's chat template has no place for tools; describe"):
        prompts.encode_chat([ChatMessage("user", "x")], tools=TOOLS)
    with pytest.raises(UserError, match=r"messages: the model's chat template has no place for tools"):
        prompts.encode_chat(read_messages(CONVERSATION))
    prompts.chat_template = ChatTemplate("{{ tools }}{{ messages }}", {})
    with pytest.raises(UserError, match=r"tools: .* a form that is not known; serve a model of one of these: Hermes"):
        prompts.tool_form()


def test_templates_that_need_every_field_get_them(engine: Engine) -> None:
    source = """{% for tool in tools %}{{ tool.function.name + tool.function.description }}
{% for key in tool.function.parameters.properties %}{{ key }}{% endfor %}{% endfor %}
{% for message in messages %}{{ "<" + message.content + ">" }}{% endfor %}{{ tools | tojson(ensure_ascii=True) }}"""
    template = ChatTemplate(source, {})
    bare = [{"type": "function", "function": {"name": "ä"}}]
    (text,) = template.pieces(read_messages(CONVERSATION[:2]), engine.prompts._special, tools=bare)
    assert isinstance(text, str)
    assert text.startswith("ä\n")
    assert "<Read it.><>" in text
    assert '"\\u00e4"' in text


def test_a_message_without_text_is_none_only_where_the_template_asks(engine: Engine) -> None:
    for source, expected in (
        ("{% for m in messages if m.tool_calls %}{{ m.content }}|{% endfor %}", "|"),
        ("{% for m in messages if m.tool_calls %}{{ m['content'] is none }}|{% endfor %}", "True|"),
    ):
        template = ChatTemplate(source + "{{ tools }}", {})
        (text,) = template.pieces(read_messages(CONVERSATION), engine.prompts._special)
        assert text == expected + "None"


def test_a_template_that_shows_calls_but_no_tools_takes_a_history_of_them(engine: Engine) -> None:
    source = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    template = ChatTemplate(source + "{% endfor %}", {})
    assert template.pieces(read_messages(CONVERSATION[:2]), engine.prompts._special) == ["Read it.read_file"]
    with pytest.raises(UserError, match="no place for tools"):
        template.pieces(read_messages(CONVERSATION[:2]), engine.prompts._special, tools=TOOLS)


def test_a_template_for_tools_of_its_own_is_used_with_tools(tmp_path: Path, engine: Engine) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.load(str(tmp_path))
    assert template is not None
    assert template.pieces([], engine.prompts._special) == ["plain"]
    assert template.pieces([], engine.prompts._special, tools=TOOLS) == ["2 tools"]


# --- over HTTP ---


async def ask(send: Post, path: str = CHAT, **fields: Any) -> Any:
    status, _, text = await send(path, {"messages": [USER], "max_tokens": 600, "temperature": 0, **fields})
    assert status == 200, text
    return json.loads(text)


async def streamed(send: Post, **fields: Any) -> tuple[dict[int, dict[str, Any]], list[Any]]:
    """The message of each choice as a client puts it together, and the choices of all events."""
    body = {"messages": [USER], "max_tokens": 600, "temperature": 0, **fields, "stream": True}
    status, _, text = await send(CHAT, body)
    assert status == 200, text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    messages: dict[int, dict[str, Any]] = {}
    for choice in choices:
        message = messages.setdefault(choice["index"], {"role": "", "content": None})
        delta = choice["delta"]
        message["role"] += delta.get("role") or ""
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append(call)
            else:  # more arguments of the last one
                assert call["index"] == len(calls) - 1
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return messages, choices


def bias(engine: Engine, kind: str) -> dict[str, float]:
    """Without it a random model would not come to an end."""
    return {str(engine.tokenizer.special(token)): 100.0 for token in FORMS[kind].bias}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{"type": call["type"], "function": call["function"]} for call in message.get("tool_calls", ())]
    return {**message, "content": message["content"] or None, "tool_calls": calls}


def is_short_call(call: dict[str, Any]) -> bool:
    arguments = json.loads(call["function"]["arguments"])
    return (
        call["function"]["name"] in ("read_file", "show-file")
        and arguments["path"] in ("a.py", "ä.py")
        and type(arguments["is_whole"]) is bool
        and 0 <= arguments.get("line", 0) <= 99
        and len(arguments) <= 3
    )


@each
def test_an_answer_that_must_be_a_call_is_one(tool_engine: MakeToolEngine, kind: str) -> None:
    pytest.importorskip("llguidance", reason="pip install 'lakh[structured]'")

    end = bias(tool_engine(kind), kind)

    async def scenario(send: Post) -> None:
        for fields in ({"parallel_tool_calls": False}, {"temperature": 1.5, "seed": 3, "n": 2, "max_tokens": 160}):
            body = {"tools": SHORT_TOOLS, "tool_choice": "required", "logit_bias": end, **fields}
            whole = await ask(send, **body)
            messages, choices = await streamed(send, **body)
            for choice in whole["choices"]:
                calls = choice["message"].get("tool_calls", [])
                assert choice["finish_reason"] in ("tool_calls", "length")
                assert choice["finish_reason"] == "tool_calls" or "n" in fields  # which may go on with further calls
                assert choice["finish_reason"] == "length" or choice["message"]["content"] is None
                assert len(calls) == 1 or "n" in fields
                assert all(call["id"] and call["type"] == "function" for call in calls)
                is_cut = choice["finish_reason"] == "length"
                assert all(map(is_short_call, calls[:-1] if is_cut else calls))
                assert without_ids(messages[choice["index"]]) == without_ids(choice["message"])
                reasons = [one["finish_reason"] for one in choices if one["index"] == choice["index"]]
                assert reasons == [None] * (len(reasons) - 1) + [choice["finish_reason"]]
        named = {"type": "function", "function": {"name": "show-file"}}
        (choice,) = (await ask(send, tools=SHORT_TOOLS, tool_choice=named, logit_bias=end))["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "show-file"
        # What was called and what came of it goes back into the next prompt.
        result = {"role": "tool", "tool_call_id": call["id"], "content": "x = 1"}
        conversation = [USER, choice["message"], result, {"role": "user", "content": "Go on."}]
        again = await ask(send, messages=conversation, tools=SHORT_TOOLS, max_tokens=4)
        assert again["usage"]["prompt_tokens"] > 0

    run(tool_engine(kind), scenario)


@each
def test_strict_arguments_follow_their_schema_where_the_model_decides(tool_engine: MakeToolEngine, kind: str) -> None:
    pytest.importorskip("llguidance", reason="pip install 'lakh[structured]'")
    engine = tool_engine(kind)
    prompts, tokenizer = engine.prompts, engine.tokenizer
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in SHORT_TOOLS]
    forced, free = (read_tool_use({"tools": strict, "tool_choice": choice}) for choice in ("required", "auto"))
    assert forced is not None
    assert free is not None
    sampling = SamplingParams(
        max_tokens=300,
        structured_outputs=prompts.tool_grammar(replace(forced, is_parallel=False)),
        logit_bias=tuple((int(number), value) for number, value in bias(engine, kind).items()),
    )
    (done,) = engine.generate(["x"], sampling)
    assert done.finish_reason == "stop"
    call = tokenizer.decode(done.tokens, show_special=True).removesuffix("<|endoftext|>")
    wrong = call.replace("a.py", "b.py").replace("ä.py", "b.py")
    assert wrong != call

    def accepts(text: str, use: ToolUse) -> bool:
        matcher = engine._grammars.matcher(prompts.tool_grammar(use))
        for token in tokenizer.encode_pieces(prompts._special.split(text)):
            allowed = matcher.allowed()
            if allowed is None or not allowed[token]:
                return False
            matcher.append(token)
        allowed = matcher.allowed()
        return matcher.is_complete or (allowed is not None and bool(allowed[tokenizer.eot]))

    before_call = FORMS[kind].before_call.format("I look.\n")
    for text, is_text, is_call in (
        (FORMS[kind].text_form.format("I look.\n\n"), True, False),
        (FORMS[kind].text_form.format("<|a|> [x] {}"), True, False),
        (call, True, True),
        (wrong, False, False),
        (before_call + call, True, kind == "harmony"),  # which may say something before a call that is demanded
        (before_call + wrong, kind == "llama3", False),  # there a call begins an answer: all of this is text
    ):
        assert accepts(text, free) == is_text, text
        assert accepts(text, forced) == is_call, text


@pytest.mark.parametrize("kind", ["hermes", "llama3", "mistral_args", "harmony"])
def test_arguments_that_a_grammar_makes_sure_of_arrive_in_parts(tool_engine: MakeToolEngine, kind: str) -> None:
    pytest.importorskip("llguidance", reason="pip install 'lakh[structured]'")
    end = bias(tool_engine(kind), kind)
    body = {"tools": SHORT_TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "logit_bias": end}

    async def scenario(send: Post) -> None:
        (whole,) = (await ask(send, **body))["choices"]
        messages, choices = await streamed(send, **body)
        assert without_ids(messages[0]) == without_ids(whole["message"])
        parts = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        assert len(parts) > 3
        assert parts[0]["function"]["name"] in ("read_file", "show-file")
        assert all(part.keys() == {"index", "function"} for part in parts[1:])
        num_tokens = (await ask(send, **body))["usage"]["completion_tokens"]
        for cut in (num_tokens - 3, num_tokens // 2):  # an answer that is cut off has a part of a call, as in OpenAI's
            (short,) = (await ask(send, **{**body, "max_tokens": cut}))["choices"]
            messages, _ = await streamed(send, **{**body, "max_tokens": cut})
            assert short["finish_reason"] == "length"
            assert without_ids(messages[0]) == without_ids(short["message"])
            full = whole["message"]["tool_calls"][0]["function"]["arguments"]
            for call in short["message"].get("tool_calls", ()):
                assert full.startswith(call["function"]["arguments"])
            ollama = [{**tool, "function": {**tool["function"], "strict": True}} for tool in SHORT_TOOLS]
            for stream in (False, True):
                options = {"num_predict": cut, "temperature": 0}
                asked = {"model": "tiny", "messages": [USER], "tools": ollama, "options": options, "stream": stream}
                assert (await send("/api/chat", asked))[0] == 200

    run(tool_engine(kind), scenario)


def test_strict_tools_over_the_api(tool_engine: MakeToolEngine) -> None:
    pytest.importorskip("llguidance", reason="pip install 'lakh[structured]'")
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in SHORT_TOOLS]

    async def scenario(send: Post) -> None:
        (choice,) = (await ask(send, tools=strict, max_tokens=40))["choices"]
        (plain,) = (await ask(send, tools=SHORT_TOOLS, max_tokens=40))["choices"]
        assert choice["message"]["content"] or choice["message"]["tool_calls"]
        assert plain["message"]["content"]
        status, _, text = await send(CHAT, {"messages": [USER], "tools": strict, "min_tokens": 3})
        assert (status, json.loads(text)["error"]["param"]) == (400, "min_tokens")

    run(tool_engine("hermes"), scenario)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make the model answer with exactly this text, special tokens included, as if it had decided so itself."""
    for kind in (ToolCallParser, ChannelParser):
        monkeypatch.setattr(kind, "__init__", _without_grammar(kind.__init__))

    def write(answer: str) -> None:
        def grammar(prompts: PromptEncoder, use: Any) -> OutputConstraint:
            return OutputConstraint("grammar", f"start: {lark_text(answer, prompts._special)}", "tools")

        monkeypatch.setattr(PromptEncoder, "tool_grammar", grammar)

    return write


@each
def test_text_and_calls_of_an_answer_are_told_apart(
    tool_engine: MakeToolEngine, script: Callable[[str], None], kind: str
) -> None:
    pytest.importorskip("llguidance", reason="pip install 'lakh[structured]'")
    form = FORMS[kind]

    async def scenario(send: Post) -> None:
        body = {"tools": TOOLS, "tool_choice": "required"}
        script(form.two_calls)
        (choice,) = (await ask(send, **body))["choices"]
        names = [call["function"]["name"] for call in choice["message"]["tool_calls"]]
        assert names == (["read_file"] if kind == "llama3" else ["read_file", "set_mode"])
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"path": "a/ä.py", "line": 3}
        assert choice["message"]["content"] == (None if kind == "llama3" else "I look.")
        assert choice["finish_reason"] == "tool_calls"
        with pytest.MonkeyPatch.context() as patch:  # however slow the machine is
            patch.setattr(responses, "KEEP_ALIVE_S", float("inf"))
            messages, choices = await streamed(send, **body)
        assert without_ids(messages[0]) == without_ids(choice["message"])
        assert sum(bool(one["delta"].get("tool_calls")) for one in choices) >= 1
        assert not [
            one for one in choices[1:-1] if not one["delta"].get("content") and not one["delta"].get("tool_calls")
        ]
        with pytest.MonkeyPatch.context() as patch:  # so slowly that gateways and proxies would not wait
            patch.setattr(responses, "KEEP_ALIVE_S", 0.0)
            messages, all_choices = await streamed(send, **body)
        assert without_ids(messages[0]) == without_ids(choice["message"])
        assert len(all_choices) > len(choices)
        scored = await ask(send, **body, logprobs=True)
        tokens = [one["token"] for one in scored["choices"][0]["logprobs"]["content"]]
        assert len(tokens) == scored["usage"]["completion_tokens"]
        whole = await ask(send, **body)
        for stop_rule in (None, "dedent"):
            one = await ask(send, **body, parallel_tool_calls=False, stop_rule=stop_rule)
            (first,) = one["choices"]
            assert without_ids(first["message"])["tool_calls"] == without_ids(choice["message"])["tool_calls"][:1]
            assert (first["message"]["content"], first["finish_reason"]) == (choice["message"]["content"], "tool_calls")
            messages, _ = await streamed(send, **body, parallel_tool_calls=False, stop_rule=stop_rule)
            assert without_ids(messages[0]) == without_ids(first["message"])
            if kind != "llama3":  # no token is generated for what follows
                assert one["usage"]["completion_tokens"] < 0.75 * whole["usage"]["completion_tokens"]
        for broken in form.broken[:1]:
            script(broken)
            (choice,) = (await ask(send, **body))["choices"]
            assert choice["message"] == {"role": "assistant", "content": broken}
            assert choice["finish_reason"] == "stop"
            messages, _ = await streamed(send, **body)
            assert messages[0]["content"] == broken
        script(form.two_calls)
        (cut,) = (await ask(send, **body, max_tokens=12))["choices"]
        assert (cut["finish_reason"], "tool_calls" in cut["message"]) == ("length", False)

    run(tool_engine(kind), scenario)


def _without_grammar(begin: Callable[..., None]) -> Callable[..., None]:
    def changed(parser: Any, form: Any, use: Any, **more: Any) -> None:
        begin(parser, form, use, **more)
        parser._has_grammar = False

    return changed


def test_tools_that_must_not_or_cannot_be_called_change_nothing(tool_engine: MakeToolEngine) -> None:
    async def scenario(send: Post) -> None:
        plain = await ask(send, max_tokens=8)
        for fields in ({"tools": []}, {"tools": TOOLS, "tool_choice": "none"}, {"tool_choice": "auto"}):
            assert (await ask(send, max_tokens=8, **fields))["choices"] == plain["choices"]
        shown = await ask(send, max_tokens=8, tools=TOOLS)
        assert shown["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 100

    run(tool_engine("hermes"), scenario)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{}]}, "tools"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "guided_regex": "a"}, "tools"),
    ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "tools"),
    ({"tools": TOOLS, "tool_choice": "required", "min_tokens": 2}, "min_tokens"),
    ({"functions": [{"name": "x"}]}, "functions"),
    ({"function_call": {"name": "x"}}, "function_call"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{**CALL, "function": {"name": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{"}}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "3"}}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages"),
    ({"messages": [{"role": "assistant", "content": 3, "tool_calls": [{"function": {"name": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 3}]}, "messages"),
    ({"messages": [{"role": "tool", "content": None}]}, "messages"),
    ({"messages": [{"role": "assistant", "content": "", "function_call": {"name": "x"}}]}, "messages"),
]
BAD_SCHEMA = {"type": "function", "function": {"name": "x", "parameters": {"type": "nothing"}}}


def test_wrong_requests_are_400s_that_name_the_field(tool_engine: MakeToolEngine) -> None:
    async def scenario(send: Post) -> None:
        for fields, param in [*BAD, ({"tools": [BAD_SCHEMA], "tool_choice": "required"}, "tools")]:
            for stream in (False, True):
                status, _, text = await send(CHAT, {"messages": [USER], **fields, "stream": stream})
                assert status == 400, (fields, text)
                assert json.loads(text)["error"]["param"] == param, (fields, text)
        status, _, text = await send("/v1/completions", {"prompt": "x", "tools": TOOLS})
        assert (status, json.loads(text)["error"]["param"]) == (400, "tools")
        status, _, text = await send("/api/generate", {"model": "tiny", "prompt": "x", "tools": TOOLS})
        assert status == 400

    run(tool_engine("hermes"), scenario)


def test_a_model_without_tools_refuses_them(engine: Engine, make_engine: Callable[..., Engine]) -> None:
    other = make_engine()
    other.prompts.chat_template = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}", {})

    async def scenario(send: Post) -> None:
        status, _, text = await send(CHAT, {"messages": [USER], "tools": TOOLS})
        assert status == 400
        assert json.loads(text)["error"]["param"] == "tools"
        _, _, text = await send("/api/show", {"model": "tiny"})
        assert "tools" not in json.loads(text)["capabilities"]

    run(other, scenario)


def test_clients_see_that_a_model_calls_tools(tool_engine: MakeToolEngine) -> None:
    async def scenario(send: Post) -> None:
        _, _, text = await send("/api/show", {"model": "tiny"})
        assert "tools" in json.loads(text)["capabilities"]
        _, _, text = await send("/v1/models")
        assert json.loads(text)["data"][0]["tools"] is True

    run(tool_engine("llama3"), scenario)


def test_a_gateway_passes_tools_and_calls_on(tool_engine: MakeToolEngine, script: Callable[[str], None]) -> None:
    engine = tool_engine("mistral")
    script(FORMS["mistral"].two_calls)

    async def scenario(fleet: Fleet) -> None:
        async def send(path: str, body: Any = None) -> tuple[int, str, str]:
            async with fleet.session.post(fleet.server.url + path, json=body) as response:
                return response.status, response.content_type, await response.text()

        body = {"messages": CONVERSATION, "tools": TOOLS, "tool_choice": "required"}
        (choice,) = (await ask(send, **body))["choices"]
        assert choice["message"]["content"] == "I look."
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["read_file", "set_mode"]
        assert choice["finish_reason"] == "tool_calls"
        messages, _ = await streamed(send, **body)
        assert without_ids(messages[0]) == without_ids(choice["message"])
        named = {"type": "function", "function": {"name": "set_mode"}}
        found = await ask(send, **{**body, "tool_choice": named, "parallel_tool_calls": False})
        assert len(found["choices"][0]["message"]["tool_calls"]) == 1
        status, _, text = await send(CHAT, {**body, "tools": [BAD_SCHEMA], "messages": [USER], "max_tokens": 5000})
        assert status == 400, text
        (card,) = fleet.gateway.models()
        assert card.has_tools

    run_gateway([engine], scenario)


# --- clients ---


def test_openai_s_client_calls_a_tool_and_sends_its_result(tool_engine: MakeToolEngine) -> None:
    openai = pytest.importorskip("openai", reason="pip install openai")
    with serving(tool_engine("hermes")) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        body = {
            "model": "tiny",
            "tools": SHORT_TOOLS,
            "max_tokens": 600,
            "temperature": 0,
            "parallel_tool_calls": False,
        }
        messages: list[Any] = [USER]
        done = client.chat.completions.create(**body, messages=messages, tool_choice="required")
        (call,) = done.choices[0].message.tool_calls
        assert done.choices[0].finish_reason == "tool_calls"
        assert is_short_call(call.model_dump())
        parts = client.chat.completions.create(**body, messages=messages, tool_choice="required", stream=True)
        calls = [one for part in parts for one in part.choices[0].delta.tool_calls or ()]
        assert "".join(one.function.arguments for one in calls) == call.function.arguments
        messages += [done.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "x = 1"}]
        again = client.chat.completions.create(**{**body, "max_tokens": 5}, messages=messages)
        assert again.usage.prompt_tokens > done.usage.prompt_tokens


def test_ollama_s_client_calls_a_tool_and_sends_its_result(
    tool_engine: MakeToolEngine, script: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ollama = pytest.importorskip("ollama", reason="pip install ollama")
    engine = tool_engine("mistral")
    read = PromptEncoder.encode_chat
    prompts: list[Any] = []

    def watched(encoder: PromptEncoder, messages: Any, **options: Any) -> Any:
        prompts.append(messages)
        return read(encoder, messages, **options)

    monkeypatch.setattr(PromptEncoder, "encode_chat", watched)
    # Ollama's API has no tool_choice: the model decides. This one is made to decide for a call.
    chat = replace(OLLAMA_CHAT, to_openai=lambda body: OLLAMA_CHAT.to_openai(body) | {"tool_choice": "required"})
    monkeypatch.setattr(dialects, "DIALECTS", (chat,))
    script(FORMS["mistral"].two_calls)
    with serving(engine) as (url, _):
        client = ollama.Client(host=url)

        def read_file(path: str) -> str:
            """Reads a file.

            Args:
                path: which one
            """
            return path

        options = {"temperature": 0, "num_predict": 600}
        done = client.chat("tiny", messages=[USER], tools=[read_file], options=options)
        assert done.message.content == "I look."
        assert [call.function.name for call in done.message.tool_calls] == ["read_file", "set_mode"]
        assert done.message.tool_calls[0].function.arguments == {"path": "a/ä.py", "line": 3}
        parts = list(client.chat("tiny", messages=[USER], tools=[read_file], options=options, stream=True))
        assert "".join(part.message.content or "" for part in parts) == "I look."
        assert [call.function.name for part in parts for call in part.message.tool_calls or ()] == [
            "read_file",
            "set_mode",
        ]
        results = [
            {"role": "tool", "content": text, "tool_name": name} for text, name in (("x", "read_file"), ("y", "b"))
        ]
        history = [USER, done.message, *results]
        client.chat("tiny", messages=history, tools=[read_file], options={"temperature": 0, "num_predict": 3})
        called, first, second = prompts[-1][1:]
        assert [call.arguments for call in called.tool_calls] == [
            '{"path": "a/ä.py", "line": 3}',
            '{"mode": "fast", "force": true}',
        ]
        assert [first.tool_call_id, second.tool_call_id] == [call.id for call in called.tool_calls]
        assert (first.name, second.name) == ("read_file", "b")


def test_a_forced_call_needs_llguidance(tool_engine: MakeToolEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tool_engine("deepseek")
    fresh = Engine("tiny", engine.spec, random_weights(engine.spec), engine.tokenizer, device="cpu")
    fresh.prompts.chat_template = engine.prompts.chat_template
    monkeypatch.setitem(sys.modules, "llguidance", None)

    async def scenario(send: Post) -> None:
        status, _, text = await send(CHAT, {"messages": [USER], "tools": SHORT_TOOLS, "tool_choice": "required"})
        assert status == 400
        assert "lakh[structured]" in json.loads(text)["error"]["message"]
        assert (await ask(send, tools=SHORT_TOOLS, max_tokens=3))["choices"]

    run(fresh, scenario)
