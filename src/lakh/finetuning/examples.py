"""Questions with answers, as rows of a JSONL file, to tokens of which only the answers are learned.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}
    {"prompt": "...", "completion": "..."}                     plain text, joined as it is
    {"instruction": "...", "input": "...", "output": "..."}    `input` is optional

Messages become text by the model's own chat template, as `lakh serve` does it; every message of the assistant is an
answer. An instruction is a user's message where the model has a template, else a line of plain text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lakh import storage
from lakh.errors import UserError
from lakh.server.prompts.chat_template import ChatMessage, ChatTemplate
from lakh.server.prompts.special_tokens import SpecialTokens
from lakh.tokens.tokenizer import Tokenizer

__all__ = ["ExampleEncoder", "TuningExample", "read_examples", "read_rows"]

FORMS = 'write {"messages": [...]}, {"prompt": ..., "completion": ...} or {"instruction": ..., "output": ...}'


@dataclass(frozen=True)
class TuningExample:
    """One document, without the token that ends it."""

    ids: tuple[int, ...]
    is_answer: tuple[bool, ...]
    """For each token: it is predicted. So is the end."""
    sha256: str
    """Of the row."""


class ExampleEncoder:
    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._special = SpecialTokens(tokenizer)

    def encode(self, row: Any, where: str, sha256: str = "") -> TuningExample:
        """Raises UserError, which begins with `where`, for a row without a question and an answer."""
        if not isinstance(row, dict):
            raise UserError(where, "is not a JSON object", FORMS)
        if "messages" in row:
            return self._chat(_messages(row["messages"], where), where, sha256)
        if "instruction" in row:
            question = "\n\n".join(filter(None, (_text(row, "instruction", where), _text(row, "input", where, ""))))
            answer = _text(row, "output", where)
            if self._template is not None:
                messages = [ChatMessage("user", question), ChatMessage("assistant", answer)]
                return self._chat(messages, where, sha256)
            return self._plain(f"{question}\n", answer, where, sha256)
        if "prompt" in row:
            return self._plain(_text(row, "prompt", where), _text(row, "completion", where), where, sha256)
        found = f"has the fields {', '.join(map(str, row)) or 'of nothing'}"
        raise UserError(where, found, FORMS)

    def _plain(self, prompt: str, answer: str, where: str, sha256: str) -> TuningExample:
        context = [*self._tokenizer.begin_ids, *self._tokenizer.encode(prompt)]
        learned = self._tokenizer.encode(answer)
        if not learned:
            raise UserError(where, "its answer is empty", "remove the row, or give it an answer")
        is_answer = (False,) * len(context) + (True,) * len(learned)
        return TuningExample((*context, *learned), is_answer, sha256)

    def _chat(self, messages: Sequence[ChatMessage], where: str, sha256: str) -> TuningExample:
        answers = [number for number, message in enumerate(messages) if message.role == "assistant"]
        if not answers or not answers[0]:
            raise UserError(where, "has no message of the assistant after another one", FORMS)
        whole = self._render(messages[: answers[-1] + 1], where, expects_answer=False)
        is_answer = [False] * len(whole)
        for number in answers:
            before = self._render(messages[:number], where, expects_answer=True)
            after = self._render(messages[: number + 1], where, expects_answer=False)
            if whole[: len(before)] != before or whole[: len(after)] != after or len(after) <= len(before):
                found = "the model's chat template changes earlier messages when later ones follow"
                raise UserError(where, found, "give one question and one answer in each row")
            is_answer[len(before) : len(after)] = [True] * (len(after) - len(before))
        ends = [at for at, token in enumerate(whole) if token == self._tokenizer.eot and is_answer[at]]
        length = ends[-1] if ends else len(whole)  # the token set adds the end
        return TuningExample(whole[:length], tuple(is_answer[:length]), sha256)

    def _render(self, messages: Sequence[ChatMessage], where: str, *, expects_answer: bool) -> tuple[int, ...]:
        if self._template is None:
            found = "has messages, and the model has no chat template"
            raise UserError(where, found, 'write {"prompt": ..., "completion": ...}')
        pieces = self._template.pieces(messages, self._special, expects_answer=expects_answer)
        return tuple(
            token
            for piece in pieces
            for token in ([piece] if isinstance(piece, int) else self._tokenizer.encode(piece))
        )


def read_examples(files: Sequence[str], encoder: ExampleEncoder) -> Iterator[TuningExample]:
    """The examples of JSONL files, each row once."""
    for row, where, sha256 in read_rows(files, FORMS):
        yield encoder.encode(row, where, sha256)


def read_rows(files: Sequence[str], forms: str) -> Iterator[tuple[Any, str, str]]:
    """(row, file and line, SHA-256) of JSONL files, each row once. `forms` says how a row is written."""
    seen: set[str] = set()
    for file in files:
        if not storage.exists(file):
            raise UserError(file, "no such file", "check the path")
        for number, line in enumerate(storage.read_bytes(file).splitlines(), start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                raise UserError(where, "is not valid JSON", forms) from None
            sha256 = hashlib.sha256(line).hexdigest()
            if sha256 not in seen:
                seen.add(sha256)
                yield row, where, sha256


def _messages(value: Any, where: str) -> list[ChatMessage]:
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise UserError(where, "messages is not a list of objects", FORMS)
    return [ChatMessage(_text(message, "role", where), _text(message, "content", where)) for message in value]


def _text(row: dict[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = row.get(key, default)
    if not isinstance(value, str):
        raise UserError(where, f"{key} is missing or not text", FORMS)
    return value
