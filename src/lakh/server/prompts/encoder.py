"""Encodes prompts: a client's text or ids, truncated to the context; fill-in-the-middle prompts; token healing.

Text that will be cut to the context is cut to MAX_CHARS_PER_TOKEN characters per token first, so the cost of a prompt
is bounded by the context and not by what a client sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from lakh.errors import ConfigError, UserError
from lakh.server.prompts import fim
from lakh.server.prompts.chat_template import ChatMessage, ChatTemplate
from lakh.server.prompts.extra_files import ExtraFile
from lakh.server.prompts.incremental_tokenizer import DEFAULT_OPTIONS, EncodeOptions, IncrementalTokenizer
from lakh.server.prompts.special_tokens import SpecialTokens
from lakh.server.prompts.token_healing import HealedPrompt, TokenHealer
from lakh.server.retrieval.snippets import outline_files
from lakh.server.structured.constraint import OutputConstraint
from lakh.server.tools.forms import ToolForm
from lakh.server.tools.tool_use import ToolUse
from lakh.spec.model import Model
from lakh.tokens.tokenizer import Tokenizer

__all__ = ["MAX_CHARS_PER_TOKEN", "Prompt", "PromptEncoder"]

FILE_SEP = "<|file_sep|>"
EXTRA_SHARE = 4  # other files get at least a quarter of the room, if they need it

OUTLINE_CHARS_PER_TOKEN = 2  # signatures have short words
MAX_CHARS_PER_TOKEN = 8  # code has 3 to 4; text with more loses context that would have fit

Prompt = str | Sequence[int]
"""Text, or ids for what text cannot express: special tokens are never encoded from text (see `infill`)."""


class PromptEncoder:
    def __init__(self, tokenizer: Tokenizer, spec: Model) -> None:
        self._tokenizer, self._spec = tokenizer, spec
        self.chat_template: ChatTemplate | None = None
        self._incremental = IncrementalTokenizer(tokenizer)

    def encode(
        self, prompt: Prompt, where: str = "prompt", *, options: EncodeOptions = DEFAULT_OPTIONS
    ) -> tuple[int, ...]:
        """All ids of a prompt. Raises a UserError for invalid text and for ids outside the vocabulary."""
        if not isinstance(prompt, str):
            if prompt and not 0 <= min(prompt) <= max(prompt) < self._spec.vocab:
                raise UserError(where, "has ids outside the vocabulary", f"use 0 to {self._spec.vocab - 1}")
            return tuple(prompt)
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            found = f"has an unpaired surrogate at character {error.start}"
            raise UserError(where, found, "send whole Unicode characters") from None
        return tuple(self._incremental.encode(prompt, options))

    def encode_prompt(self, prompt: Prompt, *, options: EncodeOptions = DEFAULT_OPTIONS) -> tuple[int, ...]:
        """`encode`, with the tokens before a text that the model expects. Ids stay as they are."""
        ids = self.encode(prompt, options=options)
        return (*self._tokenizer.begin_ids, *ids) if isinstance(prompt, str) else ids

    def encode_special(self, prompt: str, *, options: EncodeOptions = DEFAULT_OPTIONS) -> tuple[int, ...]:
        """All ids of a prompt whose text may contain special tokens, also those that begin every text."""
        ids, begin = self._encode_pieces(self._special.split(prompt), options), self._tokenizer.begin_ids
        return ids if ids[: len(begin)] == begin else (*begin, *ids)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        expects_answer: bool = True,
        continues: bool = False,
        variables: Mapping[str, Any] | None = None,
        options: EncodeOptions = DEFAULT_OPTIONS,
    ) -> tuple[int, ...]:
        """All ids of a conversation, up to where the model's turn begins, or the last message ends (`continues`)."""
        pieces = self._template.pieces(
            messages,
            self._special,
            tools=tools,
            expects_answer=expects_answer,
            continues=continues,
            variables=variables,
        )
        return self._encode_pieces(pieces, options)

    @property
    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise UserError("messages", "the model has no chat template", "send a prompt to /v1/completions")
        return self.chat_template

    def tool_form(self) -> ToolForm:
        """How the model writes calls of tools. Raises a UserError if that is not known."""
        return self._template.require_tool_form()

    def answer_form(self, use: ToolUse | None) -> ToolForm | None:
        """How the answer of a chat is read; None if all of it is text. Raises a UserError if the model has no tools."""
        if use is not None:
            return self.tool_form()
        form = None if self.chat_template is None else self.chat_template.tool_form
        return form if form is not None and form.has_channels else None

    def tool_grammar(self, use: ToolUse) -> OutputConstraint:
        """The form of an answer that is a call, or also a text if the request demands none."""
        form, schemas = self.tool_form(), use.callable_schemas
        may_be_text = not use.is_required
        grammar = form.grammar(schemas, self._special, is_parallel=use.is_parallel, may_be_text=may_be_text)
        return OutputConstraint("grammar", grammar, "tools")

    def answer_constraint(self, form: ToolForm, constraint: OutputConstraint) -> OutputConstraint:
        """The form of an answer in a chat whose text has a form."""
        return form.around(constraint, self._special)

    def form_tokens(self, form: ToolForm) -> dict[int, str]:
        """The special tokens by which calls are found in an answer, with their texts."""
        found = {text: self._special.split(text) for text in (*form.markers, *form.other_tokens)}
        return {piece: text for text, (piece, *_) in found.items() if isinstance(piece, int)}

    def _encode_pieces(self, pieces: Sequence[str | int], options: EncodeOptions) -> tuple[int, ...]:
        found: list[int] = []
        for number, piece in enumerate(pieces):
            if isinstance(piece, int):
                found.append(piece)
            elif number and self._tokenizer.prefix_space == "first":
                found += self.encode_continuation(piece, "prompt", options)
            else:
                found += self.encode(piece, options=options)
        return tuple(found)

    def encode_continuation(self, text: str, where: str, options: EncodeOptions) -> Sequence[int]:
        """All ids of text that goes on where other text ended."""
        ids = self.encode(text, where, options=options)
        return ids if self._tokenizer.prefix_space == "never" else self._tokenizer.encode_continuation(text)

    def min_tokens(self, prompt: Prompt) -> int:
        """A lower bound on the prompt's tokens, without tokenizing it: rejects prompts of megabytes early."""
        return self._incremental.min_tokens(prompt) if isinstance(prompt, str) else len(prompt)

    def truncate(self, ids: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        """The end of a prompt that leaves room for max_tokens, after the tokens that begin every text. An empty prompt
        becomes the end-of-text token."""
        room, begin = self._max_prompt_tokens(max_tokens), self._tokenizer.begin_ids
        if len(ids) <= room:
            return ids or (self._tokenizer.eot,)
        if not begin or ids[: len(begin)] != begin or len(begin) >= room:
            return ids[-room:]
        return (*begin, *ids[len(begin) - room :])

    def infill(
        self,
        prefix: str,
        suffix: str,
        max_tokens: int,
        order: fim.Order = "psm",
        *,
        options: EncodeOptions = DEFAULT_OPTIONS,
    ) -> tuple[int, ...]:
        """The fill-in-the-middle prompt for a prefix and a suffix, with room for max_tokens."""
        room = self._max_prompt_tokens(max_tokens)
        return self._middle(self._encode_end(prefix, room, options), suffix, room, order, options)

    def prompt_at_cursor(
        self,
        prefix: str,
        suffix: str,
        max_tokens: int,
        order: fim.Order = "psm",
        *,
        heal: bool = False,
        extra: Sequence[ExtraFile] = (),
        options: EncodeOptions = DEFAULT_OPTIONS,
    ) -> HealedPrompt:
        """`infill`, or a plain prompt at the end of a file (an empty suffix); cut to leave room for max_tokens.

        `extra` files come first, as in a repository that the model was trained on: those at the end of the list while
        they fit into what the file leaves, or into a quarter of the room. The first that does not fit is cut to
        outlines of its definitions.
        """
        begin = self._tokenizer.begin_ids
        room = self._max_prompt_tokens(max_tokens) - len(begin)
        before = self._encode_end(prefix, room, options)
        healed = self.heal(before) if heal else HealedPrompt(before)
        context: tuple[int, ...] = ()
        if extra:
            num_own = len(before) + -(-len(suffix) // 3) + fim.NUM_TOKENS
            num_own = -(-num_own // self._step) * self._step  # in steps: the files stay
            context = self._context(extra, prefix, max(room // EXTRA_SHARE, room - num_own), options)
            room -= len(context)
        if suffix:
            ids = self._middle(healed.ids, suffix, room + len(begin), order, options)[len(begin) :]
        else:
            ids = fim.cut_before(healed.ids, room, self._step)
        return healed._replace(ids=begin + context + ids or (self._tokenizer.eot,))

    def _context(self, extra: Sequence[ExtraFile], before: str, room: int, options: EncodeOptions) -> tuple[int, ...]:
        """The last files that fit, each after a separator, and the separator of the file that is completed."""
        file_sep = self._tokenizer.find(FILE_SEP)
        separator = (file_sep,) if file_sep is not None else self.encode("\n\n", options=options)
        room -= len(separator)
        kept: list[tuple[int, ...]] = []

        def encoded(file: ExtraFile) -> tuple[int, ...]:
            name = file.name if file_sep is not None or not file.name else file.name_comment
            text = f"{name}\n{file.text}" if name else file.text
            return separator + self.encode(text[: room * MAX_CHARS_PER_TOKEN], "input_extra", options=options)

        for file in reversed(extra):
            ids = encoded(file)
            if len(ids) > room:
                outlines = outline_files([file], before, room * OUTLINE_CHARS_PER_TOKEN)
                if outlines and len(ids := encoded(outlines[0])) <= room:
                    kept.append(ids)
                break
            kept.append(ids)
            room -= len(ids)
        return (*(token for ids in reversed(kept) for token in ids), *separator) if kept else ()

    def _encode_end(self, prefix: str, room: int, options: EncodeOptions) -> tuple[int, ...]:
        """The ids of the end of a prefix that may fit into `room` tokens."""
        end = fim.cut_before(prefix, room * MAX_CHARS_PER_TOKEN, self._step * MAX_CHARS_PER_TOKEN)
        return self.encode(end, options=options)

    def _middle(
        self, before: tuple[int, ...], suffix: str, room: int, order: fim.Order, options: EncodeOptions
    ) -> tuple[int, ...]:
        after = tuple(self.encode_continuation(suffix[: room * MAX_CHARS_PER_TOKEN], "suffix", options))
        return fim.prompt(self._tokenizer, before, after, room, context=self._spec.context, order=order)

    @property
    def _step(self) -> int:
        return fim.quantum(self._spec.context)

    def heal(self, ids: tuple[int, ...]) -> HealedPrompt:
        return self._healer.heal(ids)

    @cached_property
    def _special(self) -> SpecialTokens:
        return SpecialTokens(self._tokenizer)

    @cached_property
    def _healer(self) -> TokenHealer:  # decodes the whole vocabulary: made on first use
        return TokenHealer(self._tokenizer)

    def _max_prompt_tokens(self, max_tokens: int) -> int:
        context = self._spec.context
        if context < 2:
            raise ConfigError("model.context", f"{context} has no room for a prompt and a token", "train with more")
        return max(context - max_tokens, context // 2)
