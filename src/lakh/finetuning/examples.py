"""Questions with answers, as rows of a JSONL file, to tokens of which only the answers are learned.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}
    {"prompt": "...", "completion": "..."}                     plain text, joined as it is
    {"instruction": "...", "input": "...", "output": "..."}    `input` is optional

Messages become text by the model's own chat template, as `lakh serve` does it; every message of the assistant is an
answer, except with "weight": 0. An instruction is a user's message where the model has a template, else a line of
plain text.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lakh import storage
from lakh.errors import UserError
from lakh.server.prompts.chat_template import ChatMessage, ChatTemplate
from lakh.server.prompts.special_tokens import SpecialTokens
from lakh.tokens.tokenizer import Tokenizer

__all__ = ["ExampleEncoder", "TuningExample", "read_examples", "read_rows"]

SURROGATE = re.compile("[\ud800-\udfff]")
FIRST_MARK, MARKS = 0xD800, re.compile("([\ud800-\udfff])")  # no valid text has them
FORMS = 'write {"messages": [...]}, {"prompt": ..., "completion": ...} or {"instruction": ..., "output": ...}'


@dataclass(frozen=True)
class TuningExample:
    """One document, without the token that ends it."""

    ids: tuple[int, ...]
    is_answer: tuple[bool, ...]
    """For each token: it is predicted. So is the end."""

    @property
    def sha256(self) -> str:
        """Of its tokens: rows that differ in other fields only, or in their layout, are the same example."""
        return _hash((*self.ids, *self.is_answer))

    @property
    def question_sha256(self) -> str:
        """Of the tokens before the first answer."""
        return _hash(self.ids[: self.is_answer.index(True)])


class ExampleEncoder:
    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._special = SpecialTokens(tokenizer)
        self._marks: dict[int, str] = {}
        self._tokens: dict[str, int] = {}

    def encode(self, row: Any, where: str) -> TuningExample:
        """Raises UserError, which begins with `where`, for a row without a question and an answer."""
        if not isinstance(row, dict):
            raise UserError(where, "is not a JSON object", FORMS)
        for key in ("tools", "functions"):
            if row.get(key):
                raise UserError(
                    where, f"has {key}, which lakh tune does not write into the prompt", "leave the row out"
                )
        if "messages" in row:
            return self._chat(*_messages(row["messages"], where), where)
        if "instruction" in row:
            given = {key: value for key, value in row.items() if value is not None}
            question = "\n\n".join(filter(None, (_text(row, "instruction", where), _text(given, "input", where, ""))))
            answer = _text(row, "output", where)
            if self._template is not None:
                return self._chat([ChatMessage("user", question), ChatMessage("assistant", answer)], (), where)
            return self._plain(f"{question}\n", answer, where)
        if "prompt" in row:
            return self._plain(_text(row, "prompt", where), _text(row, "completion", where), where)
        found = f"has the fields {', '.join(map(str, row)) or 'of nothing'}"
        raise UserError(where, found, FORMS)

    def _plain(self, prompt: str, answer: str, where: str) -> TuningExample:
        context = [*self._tokenizer.begin_ids, *self._tokenizer.encode(prompt)]
        learned = self._tokenizer.encode_continuation(answer) if prompt else self._tokenizer.encode(answer)
        if not learned:
            raise UserError(where, "its answer is empty", "remove the row, or give it an answer")
        is_answer = (False,) * len(context) + (True,) * len(learned)
        return TuningExample((*context, *learned), is_answer)

    def _chat(self, messages: Sequence[ChatMessage], ignored: Sequence[int], where: str) -> TuningExample:
        """All messages up to the last answer; the answers `ignored` are context."""
        answers = [at for at, message in enumerate(messages) if message.role == "assistant" and at not in ignored]
        if not answers or not answers[0]:
            raise UserError(where, "has no message of the assistant after another one", FORMS)
        text = self._render(messages[: answers[-1] + 1], where, expects_answer=False)
        bounds = [0]
        for number in answers:
            if not (messages[number].content or "").strip():
                raise UserError(where, "its answer is empty", "remove the row, or give it an answer")
            before = self._render(messages[:number], where, expects_answer=True)
            after = self._render(messages[: number + 1], where, expects_answer=False)
            if not text.startswith(before) or not text.startswith(after) or len(after) <= len(before):
                found = "the model's chat template changes earlier messages when later ones follow"
                raise UserError(where, found, "give one question and one answer in each row")
            turn = after.rstrip()  # most templates write a line break after the token that ends a turn
            bounds += [len(before), len(turn) if turn[-1] in self._tokens else len(after)]
        # Each part by itself, so that the context of an answer has the tokens that it has in a request.
        parts = [self._encode_part(text, start, end) for start, end in itertools.pairwise(bounds)]
        if parts[-1][-1:] == [self._tokenizer.eot]:
            parts[-1].pop()  # the token set adds the end
        is_answer = (bool(number % 2) for number, part in enumerate(parts) for _ in part)
        return TuningExample(tuple(itertools.chain.from_iterable(parts)), tuple(is_answer))

    def _render(self, messages: Sequence[ChatMessage], where: str, *, expects_answer: bool) -> str:
        """The text of the messages with a character of its own, which no text has, for each special token."""
        if self._template is None:
            found = "has messages, and the model has no chat template"
            raise UserError(where, found, 'write {"prompt": ..., "completion": ...}')
        try:
            pieces = self._template.pieces(messages, self._special, expects_answer=expects_answer)
        except UserError as error:
            raise UserError(where, error.found, error.todo) from None
        return "".join(piece if isinstance(piece, str) else self._mark(piece) for piece in pieces)

    def _mark(self, token: int) -> str:
        if token not in self._marks:
            mark = self._marks[token] = chr(FIRST_MARK + len(self._marks))
            self._tokens[mark] = token
        return self._marks[token]

    def _encode_part(self, text: str, start: int, end: int) -> list[int]:
        """The ids of a part of a rendered text."""
        pieces = [self._tokens.get(piece, piece) for piece in MARKS.split(text[start:end]) if piece]
        is_after_mark = text[start - 1 : start] in self._tokens
        if start and isinstance(pieces[0], str) and not (is_after_mark and self._tokenizer.prefix_space == "always"):
            return [*self._tokenizer.encode_continuation(pieces[0]), *self._tokenizer.encode_pieces(pieces[1:])]
        return self._tokenizer.encode_pieces(pieces)


def read_examples(files: Sequence[str], encoder: ExampleEncoder) -> Iterator[TuningExample]:
    """The examples of JSONL files, each once."""
    seen: set[str] = set()
    for row, where in read_rows(files, FORMS):
        example = encoder.encode(row, where)
        if (sha256 := example.sha256) not in seen:
            seen.add(sha256)
            yield example


def read_rows(files: Sequence[str], forms: str) -> Iterator[tuple[Any, str]]:
    """(row, file and line) of JSONL files. `forms` says how a row is written."""
    for file in files:
        if not storage.exists(file):
            raise UserError(file, "no such file", "check the path")
        for number, line in enumerate(storage.read_bytes(file).splitlines(), start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                row = json.loads(line, object_pairs_hook=_without_twins)
            except _KeyTwiceError as error:
                raise UserError(where, f"has the key {error.args[0]!r} twice", "remove one") from None
            except (ValueError, RecursionError):
                raise UserError(where, "is not valid JSON", forms) from None
            if b"\\ud" in line.lower() and SURROGATE.search(json.dumps(row, ensure_ascii=False)):
                raise UserError(where, "contains half of a surrogate pair", "write complete characters")
            yield row, where


class _KeyTwiceError(Exception):
    pass


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _KeyTwiceError(next(key for key in keys if keys.count(key) > 1))
    return found


def _messages(value: Any, where: str) -> tuple[list[ChatMessage], list[int]]:
    """The messages, and the numbers of those that are not learned: `"weight": 0`, as in OpenAI's files."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise UserError(where, "messages is not a list of objects", FORMS)
    messages, ignored = [], []
    for number, message in enumerate(value):
        if any(message.get(key) for key in ("tool_calls", "function_call")):
            raise UserError(where, "calls a tool, which lakh tune does not learn", "leave the row out")
        if message.get("weight", 1) not in (0, 1):
            raise UserError(where, f"weight is {message['weight']!r}", "write 1 to learn an answer, or 0")
        if message.get("weight") == 0:
            ignored.append(number)
        messages.append(ChatMessage(_text(message, "role", where), _text(message, "content", where)))
    return messages, ignored


def _text(row: dict[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = row.get(key, default)
    if not isinstance(value, str):
        raise UserError(where, f"{key} is missing or not text", FORMS)
    return value


def _hash(numbers: Sequence[int]) -> str:
    return hashlib.sha256(np.array(numbers, np.int64).tobytes()).hexdigest()
