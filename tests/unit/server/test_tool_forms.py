"""Calls of tools in the text of an answer: the same however the text is cut, and broken ones stay text."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from lakh.errors import ConfigError
from lakh.server.prompts.special_tokens import SpecialTokens
from lakh.server.tools.answer import FirstCallEnd, make_parser
from lakh.server.tools.forms import find_tool_form
from lakh.server.tools.json_scanner import JsonScanner
from lakh.server.tools.parser import ToolCallParser
from lakh.server.tools.tool_call import merge_calls
from lakh.server.tools.tool_use import ToolUse, read_tool_use
from lakh.tokens.tokenizer import Tokenizer

from .tool_templates import FORMS, TOOLS

PLAIN = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str().encode())  # without special tokens
READ = ("read_file", {"path": "a/ä.py", "line": 3})
SET = ("set_mode", {"mode": "fast", "force": True})
Parsed = tuple[str, list[tuple[str, Any]]]


def parse(kind: str, pieces: list[str], **more: Any) -> Parsed:
    form = find_tool_form(FORMS[kind].template)
    assert form is not None
    assert form.name == FORMS[kind].name
    parser = make_parser(form, ToolUse(json.dumps(TOOLS), **more))
    text, calls = "", []
    for number, piece in enumerate(pieces, 1):
        new = parser.push(piece, is_final=number == len(pieces))
        text += new.text
        assert not new.reasoning
        calls += new.calls
    ids = [call.id for call in calls]
    assert len(set(ids)) == len(ids)
    assert FORMS[kind].name != "mistral" or all(len(number) == 9 and number.isalnum() for number in ids)
    return text, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("kind", FORMS)
def test_calls_are_found_wherever_the_text_is_cut(kind: str) -> None:
    answer = FORMS[kind].two_calls
    expected = ("", [READ]) if kind == "llama3" else ("I look.", [READ, SET])
    assert parse(kind, [answer]) == expected
    assert parse(kind, list(answer)) == expected
    assert parse(kind, [*answer, ""]) == expected
    for cut in range(1, len(answer)):
        assert parse(kind, [answer[:cut], answer[cut:]]) == expected, cut
    assert parse(kind, [answer], is_parallel=False) == (expected[0], [READ])
    assert parse(kind, list(answer), is_parallel=False) == (expected[0], [READ])


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_an_answer_with_one_call_ends_where_it_ends(kind: str, size: int) -> None:
    answer = FORMS[kind].two_calls
    form = find_tool_form(FORMS[kind].template)
    assert form is not None
    end = FirstCallEnd(make_parser(form, ToolUse(json.dumps(TOOLS), is_parallel=False)))
    read = ""
    for at in range(0, len(answer), size):
        if end.found:
            break
        read += answer[at : at + size]
        assert end.push(answer[at : at + size]) == answer[at : at + size]
    assert end.found
    assert size > 5 or "set_mode" not in read
    assert parse(kind, [read], is_parallel=False) == ("" if kind == "llama3" else "I look.", [READ])
    several = FirstCallEnd(make_parser(form, ToolUse(json.dumps(TOOLS))))
    several.push(answer)
    assert not several.found
    for broken in FORMS[kind].broken:
        other = FirstCallEnd(make_parser(form, ToolUse(json.dumps(TOOLS), is_parallel=False)))
        other.push(broken)
        assert not other.found or kind == "mistral"  # whose list has a call before what is none


@pytest.mark.parametrize("kind", FORMS)
def test_what_is_no_call_stays_text(kind: str) -> None:
    for broken in FORMS[kind].broken:
        assert parse(kind, [broken]) == (broken, []), broken
        assert parse(kind, list(broken)) == (broken, []), broken
        if kind != "llama3":
            assert parse(kind, ["Text  \n" + broken + "\n"]) == ("Text  \n" + broken + "\n", [])


@pytest.mark.parametrize("kind", FORMS)
def test_text_is_sent_at_once_unless_it_may_begin_a_call(kind: str) -> None:
    form = find_tool_form(FORMS[kind].template)
    assert form is not None
    parser = make_parser(form, ToolUse(json.dumps(TOOLS)))
    assert parser.push("Some text.") == ("Some text.", (), "")
    if form.has_channels:
        return
    assert parser.push(" \n") == ("", (), "")  # white space may stand before a call
    assert parser.push("more") == (" \nmore", (), "")


@pytest.mark.parametrize("kind", FORMS)
@given(data=st.data())
def test_no_text_breaks_the_parser(kind: str, data: st.DataObject) -> None:
    parts = [FORMS[kind].two_calls[at : at + 9] for at in range(0, len(FORMS[kind].two_calls), 5)]
    text = "".join(data.draw(st.lists(st.one_of(st.sampled_from(parts), st.text(max_size=3)), max_size=12)))
    cuts = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=6))})
    pieces = [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]
    assert parse(kind, [*pieces, ""]) == parse(kind, [text])
    assert parse(kind, [*pieces, ""], is_parallel=False) == parse(kind, [text], is_parallel=False)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        # Text that ends a call or a parameter, inside of values.
        ("<tool_call>\n<function=read_file>\n<parameter=path>\na</parameter>\nb</function>c\n</parameter>\n</function>",
         [("read_file", {"path": "a</parameter>\nb</function>c"})]),
        ("<function=read_file>\n<parameter=path>\n\n x \n\n</parameter>\n</function>\n</tool_call>",
         [("read_file", {"path": "\n x \n"})]),
        ("<function=set_mode><parameter=force>True</parameter><parameter=mode>slow</parameter></function>",
         [("set_mode", {"force": True, "mode": "slow"})]),
        ("<function=set_mode>\n<parameter=force>\nperhaps\n</parameter>\n</function>",
         [("set_mode", {"force": "perhaps"})]),
        ("<function=read_file>\n<parameter=other>\n12\n</parameter>\n</function>", [("read_file", {"other": "12"})]),
        ("<function=unknown>\n</function>", [("unknown", {})]),
    ],
)  # fmt: skip
def test_values_of_qwen3_coder_have_the_types_of_their_schema(text: str, calls: list[Any]) -> None:
    assert parse("qwen3_coder", [text]) == ("", calls)
    assert parse("qwen3_coder", list(text)) == ("", calls)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("f", {"a": 1})])),
        ('<tool_call>{"name": "f"}', ("", [("f", {})])),
        ('<tool_call>{"name": "f", "parameters": {"x": "</tool_call>"}}\n</tool', ("", [("f", {"x": "</tool_call>"})])),
        ('<tool_call>{"name": "f"} and so on', ("and so on", [("f", {})])),
        ('a <tool_call>{"name": "f"}</tool_call>\n\nb\n', ("a\n\nb", [("f", {})])),
        ('<tool_call> <tool_call>{"name": "f"}</tool_call>', ("<tool_call>", [("f", {})])),
    ],
)
def test_hermes_calls_in_other_texts(text: str, expected: Parsed) -> None:
    assert parse("hermes", [text]) == expected
    assert parse("hermes", list(text)) == expected


@pytest.mark.parametrize("kind", ["qwen3_coder", "glm", "minimax", "dsml"])
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": [1], "required": 3},
        {"properties": {"path": 3, "line": {"type": 3}}, "required": "path"},
        {"properties": {"path": {"anyOf": 3}, "line": {"type": {"a": 1}, "enum": 5}}},
        {"properties": {"line": {"anyOf": [{"anyOf": [3, {"type": ["integer", 4]}]}]}}},
    ],
)
def test_what_is_no_schema_breaks_nothing(kind: str, schema: dict[str, Any]) -> None:
    form = find_tool_form(FORMS[kind].template)
    assert form is not None
    tool = {"type": "function", "function": {"name": "read_file", "parameters": schema}}
    use = read_tool_use({"tools": [tool]})
    assert use is not None
    parser = ToolCallParser(form, use)
    parsed = parser.push(FORMS[kind].two_calls, is_final=True)
    assert [call.name for call in parsed.calls] == ["read_file", "set_mode"]
    assert form.grammar(use.schemas, SpecialTokens(PLAIN), is_parallel=True)


@given(value=st.recursive(st.one_of(st.none(), st.integers(), st.text(max_size=8)), lambda inner: st.one_of(
    st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)), max_leaves=8))  # fmt: skip
def test_the_scanner_finds_the_end_of_json_in_growing_text(value: Any) -> None:
    text = json.dumps([value], ensure_ascii=False)
    scanner = JsonScanner()
    for size in range(len(text)):
        assert scanner.end("x" + text[:size], 1) is None or size == 0
    assert scanner.end("x" + text + "]}", 1) == len(text) + 1


def test_templates_of_other_forms_are_not_taken_for_one_of_them() -> None:
    assert find_tool_form("{{ tools }}{{ messages }}") is None
    assert find_tool_form('<tool_call><invoke name="x">{{ tools }}') is None
    assert find_tool_form('<tool_calls>[{"name": 1, "arguments": 2}]</tool_calls><tool_call>{{ tools }}') is None


def test_seed_oss_has_a_tag_of_its_own() -> None:
    form = find_tool_form("<seed:tool_call><function=NAME><parameter=KEY></parameter></function></seed:tool_call>")
    assert form is not None
    parser = ToolCallParser(form, ToolUse(json.dumps(TOOLS)))
    call = "<seed:tool_call>\n<function=read_file>\n<parameter=path>\nx\n</parameter>\n</function>\n</seed:tool_call>"
    text, (found,), _ = parser.push(f"I look. {call}\n", is_final=True)
    assert (text, found.name, json.loads(found.arguments)) == ("I look.", "read_file", {"path": "x"})


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "f\\"", "arguments": {"a": "</tool_call>}", "b": [1.50]}}\n</tool_call>'),
        ("llama3", '{"name": "f\\"", "parameters": {"a": "</tool_call>}", "b": [1.50]}}'),
        ("mistral_args", '[TOOL_CALLS]f"[ARGS]{"a": "</tool_call>}", "b": [1.50]}'),
    ],
)
def test_arguments_are_emitted_as_they_arrive_where_a_grammar_makes_sure_of_them(kind: str, text: str) -> None:
    form = find_tool_form(FORMS[kind].template)
    assert form is not None
    tool = {"type": "function", "function": {"name": 'f"', "strict": True}}
    use = read_tool_use({"tools": [tool]})
    assert use is not None
    arguments = '{"a": "</tool_call>}", "b": [1.50]}'
    for size in (1, 3, 7, len(text)):
        parser = ToolCallParser(form, use)
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        found = [parser.push(piece, is_final=at == len(pieces) - 1) for at, piece in enumerate(pieces)]
        assert "".join(one.text for one in found) == ""
        (call,) = merge_calls(delta for one in found for delta in one.calls)
        assert (call.name, call.arguments) == ('f"', arguments)  # the model's own text
        assert parser.has_calls
        assert size > 1 or sum(len(one.calls) for one in found) == len(arguments)
    parser = ToolCallParser(form, use)
    (cut,) = parser.push(text[: text.index("[1.5") + 4], is_final=True).calls
    assert cut.arguments == '{"a": "</tool_call>}", "b": [1.5'
    assert not parser.has_calls


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": {}, "tool_choice": "required"}, "tool_choice"),
        ({"tools": "x"}, "tools"),
        ({"tools": [{}]}, "tools"),
        ({"tools": [3]}, "tools"),
        ({"tools": [{"type": "retrieval", "function": {"name": "x"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 129}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": 3}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "x", "description": 3}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": {"a": float("nan")}}}]}, "tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 3}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
def test_wrong_tools_are_refused_by_name(body: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_tool_use(body)
    assert caught.value.where == field


def test_the_choices_of_a_request() -> None:
    assert read_tool_use({}) is None
    assert read_tool_use({"tools": [], "tool_choice": "none", "parallel_tool_calls": True}) is None
    assert read_tool_use({"tools": TOOLS, "tool_choice": "none"}) is None
    auto = read_tool_use({"tools": TOOLS})
    assert auto == ToolUse(json.dumps(TOOLS))
    one = read_tool_use({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "set_mode"}}})
    assert one is not None
    assert list(one.callable_schemas) == ["set_mode"]
    for body in (auto, one, ToolUse(json.dumps(TOOLS), is_required=True, is_parallel=False)):
        assert body is not None
        assert read_tool_use(body.as_openai()) == body


@pytest.mark.parametrize(
    ("written", "name", "number"),
    [
        ("functions.read_file:3", "read_file", "functions.read_file:3"),
        ("functions.a.b:c:12", "a.b:c", "functions.a.b:c:12"),
        ("read_file:0", "read_file", "read_file:0"),
        ("functions.read_file", "read_file", None),
        ("functions.read_file:x", "read_file:x", None),
    ],
)
def test_calls_of_kimi_have_the_ids_that_the_model_wrote(written: str, name: str, number: str | None) -> None:
    form = find_tool_form(FORMS["kimi"].template)
    assert form is not None
    call = f"<|tool_call_begin|>{written}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    parser = ToolCallParser(form, ToolUse(json.dumps(TOOLS)))
    first, again = parser.push(f"<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>").calls
    assert first.name == again.name == name
    assert (first.id == number) == (number is not None)
    assert again.id != first.id  # results name the call that they answer
