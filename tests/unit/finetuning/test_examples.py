"""Rows of questions and answers to tokens: only the answers are learned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from lakh.errors import UserError
from lakh.finetuning.data import split_keys
from lakh.finetuning.examples import ExampleEncoder, TuningExample, read_examples
from lakh.server.prompts.chat_template import ChatMessage, ChatTemplate
from lakh.server.prompts.encoder import PromptEncoder
from lakh.spec.model import Model
from lakh.tokens.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


U = {"role": "user", "content": "a"}


def make_tokenizer(folder: Path, merges: Sequence[tuple[str, str]] = ()) -> Tokenizer:
    """A byte is a token; <|end|> ends a text."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    made = tokenizers.Tokenizer(models.BPE({word: number for number, word in enumerate(names)}, list(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not merges)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>", "<|start|>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    return Tokenizer.load(folder)


@pytest.fixture
def encoder(tmp_path: Path) -> ExampleEncoder:
    return ExampleEncoder(make_tokenizer(tmp_path), ChatTemplate.load(str(tmp_path)))


def parts(encoder: ExampleEncoder, example: TuningExample) -> list[tuple[bool, str]]:
    """Neighbouring tokens of one kind, as text."""
    found: list[tuple[bool, list[int]]] = []
    for token, learned in zip(example.ids, example.is_answer, strict=True):
        if not found or found[-1][0] != learned:
            found.append((learned, []))
        found[-1][1].append(token)
    return [(learned, encoder._tokenizer.decode(ids, show_special=True)) for learned, ids in found]


def chat(*texts: str) -> dict[str, Any]:
    roles = ["user", "assistant"]
    return {"messages": [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]}


def test_a_completion_is_learned_and_its_prompt_is_not(encoder: ExampleEncoder) -> None:
    example = encoder.encode({"prompt": "1+1=", "completion": "2"}, "row")
    assert parts(encoder, example) == [(False, "1+1="), (True, "2")]


def test_every_answer_of_a_conversation_is_learned_with_the_end_of_its_turn(encoder: ExampleEncoder) -> None:
    example = encoder.encode(chat("a", "b", "c", "d"), "row")
    assert parts(encoder, example) == [
        (False, "<|start|>user\na<|end|>\n<|start|>assistant\n"),
        (True, "b<|end|>"),
        (False, "\n<|start|>user\nc<|end|>\n<|start|>assistant\n"),
        (True, "d"),  # the token set adds <|end|>
    ]


@pytest.mark.parametrize("answer", ["\n    return x", "\n\n", "  x\n"])
def test_the_context_of_an_answer_has_the_tokens_of_a_request(tmp_path: Path, answer: str) -> None:
    tokenizer = make_tokenizer(tmp_path, merges=[("Ċ", "Ċ"), ("Ċ", "Ġ")])  # join the end of the question and an answer
    encoder = ExampleEncoder(tokenizer, ChatTemplate.load(str(tmp_path)))
    example = encoder.encode(chat("a", f"{answer}b"), "row")
    prompts = PromptEncoder(tokenizer, Model(vocab=999))
    prompts.chat_template = ChatTemplate.load(str(tmp_path))
    request = prompts.encode_chat([ChatMessage("user", "a")])
    assert example.ids[: example.is_answer.index(True)] == request
    assert parts(encoder, example)[-1] == (True, f"{answer}b")


def test_an_answer_of_weight_0_is_context(encoder: ExampleEncoder) -> None:
    row = chat("a", "bad", "c", "good")
    row["messages"][1]["weight"] = 0
    assert [text for learned, text in parts(encoder, encoder.encode(row, "row")) if learned] == ["good"]


def test_an_answer_after_plain_text_has_no_space_of_its_own(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    description = json.loads((tmp_path / "tokenizer.json").read_text())
    description["pre_tokenizer"]["add_prefix_space"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    encoder = ExampleEncoder(Tokenizer.load(tmp_path), None)
    assert parts(encoder, encoder.encode({"prompt": "f(", "completion": "x)"}, "row"))[1] == (True, "x)")


def test_a_template_may_mark_what_the_assistant_wrote_and_leave_a_loop(tmp_path: Path) -> None:
    end = "{% if m.role == 'user' %}{% continue %}{% endif %}"
    source = TEMPLATE.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    encoder = ExampleEncoder(
        make_tokenizer(tmp_path), ChatTemplate(source.replace("{% endfor %}", f"{end}{{% endfor %}}"), {})
    )
    assert parts(encoder, encoder.encode(chat("a", "b"), "row"))[-1] == (True, "b")


def test_answers_to_one_question_are_held_out_together(encoder: ExampleEncoder) -> None:
    rows = [{"prompt": f"question {number}", "completion": answer} for number in range(8) for answer in "ab"]
    keys = split_keys([encoder.encode(row, "row") for row in rows])
    assert keys[::2] == keys[1::2]
    assert len(set(keys)) == 8
    assert len(set(split_keys([encoder.encode({**row, "prompt": ""}, "row") for row in rows]))) == 2  # by the answer


def test_a_message_cannot_end_its_own_turn(encoder: ExampleEncoder) -> None:
    example = encoder.encode(chat("say <|end|>", "ok"), "row")
    end = encoder._tokenizer.eot
    assert example.ids.count(end) == 1  # of the user's turn


def test_an_instruction_is_a_message_or_plain_text(encoder: ExampleEncoder, tmp_path: Path) -> None:
    row = {"instruction": "add", "input": "1 2", "output": "3"}
    assert encoder.encode(row, "row") == encoder.encode(chat("add\n\n1 2", "3"), "row")
    plain = ExampleEncoder(Tokenizer.load(tmp_path), None)
    assert parts(plain, plain.encode(row, "row")) == [(False, "add\n\n1 2\n"), (True, "3")]


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ([], "not a JSON object"),
        ({"text": "a"}, "has the fields text"),
        ({"prompt": "a"}, "completion is missing"),
        ({"prompt": "a", "completion": ""}, "its answer is empty"),
        ({"messages": "a"}, "not a list of objects"),
        ({"messages": [{"role": "user"}]}, "content is missing"),
        (chat("only a question"), "no message of the assistant"),
        (chat("a", " \n"), "its answer is empty"),
        (chat("a", "b") | {"tools": [{"type": "function"}]}, "has tools"),
        ({"messages": [U, {"role": "assistant", "content": None, "tool_calls": [{}]}]}, "calls a tool"),
        ({"messages": [U, {"role": "assistant", "content": "b", "weight": 0.5}]}, "weight is 0.5"),
        ({"messages": [U, {"role": "assistant", "content": "b", "weight": 0}]}, "no message of the assistant"),
    ],
)
def test_a_row_without_question_and_answer_is_refused(encoder: ExampleEncoder, row: Any, found: str) -> None:
    with pytest.raises(UserError, match=f"row: .*{found}"):
        encoder.encode(row, "row")


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    plain = ExampleEncoder(make_tokenizer(tmp_path), None)
    with pytest.raises(UserError, match="no chat template"):
        plain.encode(chat("a", "b"), "row")


def test_a_template_that_changes_earlier_answers_is_refused(tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.content if loop.last else '-' }}<|end|>{% endfor %}"
    encoder = ExampleEncoder(make_tokenizer(tmp_path), ChatTemplate(source, {}))
    with pytest.raises(UserError, match="changes earlier messages"):
        encoder.encode(chat("a", "b", "c", "d"), "row")


def test_files_are_read_line_by_line_and_each_row_once(encoder: ExampleEncoder, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    row = json.dumps({"prompt": "a", "completion": "b"})
    file.write_text(f"{row}\n\n{row}\n")
    assert len(list(read_examples([str(file)], encoder))) == 1
    other = json.dumps({"id": 7, "completion": "b", "prompt": "a"})  # the same example, written differently
    file.write_bytes(f"\ufeff{row}\r\n{other}\r\n".encode())
    assert len(list(read_examples([str(file)], encoder))) == 1
    file.write_text('{"prompt": "a", "prompt": "b", "completion": "c"}')
    with pytest.raises(UserError, match=r"line 1: has the key 'prompt' twice"):
        list(read_examples([str(file)], encoder))
    file.write_text(json.dumps({"prompt": "\ud800", "completion": "b"}))
    with pytest.raises(UserError, match=r"line 1: contains half of a surrogate pair"):
        list(read_examples([str(file)], encoder))
    file.write_text(f"{row}\n{{\n")
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2: is not valid JSON"):
        list(read_examples([str(file)], encoder))
    with pytest.raises(UserError, match="no such file"):
        list(read_examples([str(tmp_path / "none.jsonl")], encoder))
