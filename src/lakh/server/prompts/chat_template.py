"""Chat messages as a prompt, by the template that a model brings along (tokenizer_config.json or chat_template.jinja).

The template is Jinja, run in a sandbox: it comes with the model and is not trusted. Special tokens in the template are
special tokens; the same text in a message stays text, so a message cannot end its own turn.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lakh import storage
from lakh.errors import UserError

if TYPE_CHECKING:
    from lakh.server.prompts.special_tokens import SpecialTokens

__all__ = ["ChatMessage", "ChatTemplate"]

MASK = "\ue000{}\ue001"  # private characters around a number: a special token that stays text
ERRORS = (ArithmeticError, TypeError, ValueError, LookupError, AttributeError, RecursionError, MemoryError)
"""What a template can end in, besides Jinja's own errors."""
CONFIG, FILE = "tokenizer_config.json", "chat_template.jinja"


class ChatMessage(NamedTuple):
    role: str
    content: str


class ChatTemplate:
    def __init__(self, source: str, variables: dict[str, Any]) -> None:
        """`variables`: bos_token, eos_token and others of the tokenizer's configuration. An invalid template is refused
        where it is used: the model completes texts without it."""
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
        )
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        self._errors = (TemplateError, *ERRORS)
        self._variables = variables
        self._invalid = ""
        try:
            self._template = environment.from_string(source)
        except self._errors as error:  # of expressions without variables, too: these are computed here
            self._invalid = f"is not valid ({str(error) or type(error).__name__})"[:300]

    @staticmethod
    def load(folder: str) -> ChatTemplate | None:
        """The template of a Hugging Face directory; None if it has none."""
        config: dict[str, Any] = {}
        if storage.exists(storage.join(folder, CONFIG)):
            try:
                config = json.loads(storage.read_bytes(storage.join(folder, CONFIG)))
            except (ValueError, RecursionError):
                config = {}
        config = config if isinstance(config, dict) else {}
        source = config.get("chat_template")
        if isinstance(source, list):  # several, by name
            named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
            source = named.get("default")
        if storage.exists(storage.join(folder, FILE)):
            source = storage.read_bytes(storage.join(folder, FILE)).decode("utf-8", "replace")
        if not isinstance(source, str):
            return None
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        return ChatTemplate(source, {name: _text(config.get(name)) for name in names})

    def pieces(
        self, messages: Sequence[ChatMessage], special: SpecialTokens, *, expects_answer: bool = True
    ) -> list[str | int]:
        """The prompt, up to where the model's turn begins if `expects_answer`: ids of special tokens, and text between
        them. Raises a UserError where the template refuses."""
        if self._invalid:
            raise UserError("chat template", self._invalid, "use /v1/completions")
        masked = [{"role": role, "content": special.mask(content, MASK)} for role, content in messages]
        try:
            text = self._template.render(
                messages=masked, add_generation_prompt=expects_answer, tools=None, **self._variables
            )
            text.encode()  # no half of a surrogate pair
        except self._errors as error:
            found = f"the model's chat template refuses them ({str(error) or type(error).__name__})"
            raise UserError("messages", found[:300], "change them") from None
        return [special.unmask(piece, MASK) if isinstance(piece, str) else piece for piece in special.split(text)]


def _generation_tag() -> type[Any]:
    """The tag by which templates mark what an assistant wrote, for tools that train: it changes no text."""
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationTag


def _refuse(message: str) -> None:
    raise ValueError(message)


def _now(form: str) -> str:
    return datetime.datetime.now(datetime.UTC).strftime(form)


def _text(token: object) -> str:
    """A token of the configuration: its text, or an object with it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
