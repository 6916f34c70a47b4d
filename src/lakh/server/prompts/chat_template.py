"""Chat messages as a prompt, by the template that a model brings along (tokenizer_config.json or chat_template.jinja).

The template is Jinja, run in a sandbox: it comes with the model and is not trusted. Special tokens in the template are
special tokens; the same text in a message or in the definition of a tool stays text, so a message cannot end its own
turn. Tools and calls have the form that transformers gives to templates.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lakh import storage
from lakh.errors import UserError
from lakh.server.tools.forms import FORM_NAMES, ToolForm, find_tool_form
from lakh.server.tools.tool_call import ToolCall

if TYPE_CHECKING:
    from lakh.server.prompts.special_tokens import SpecialTokens

__all__ = ["RESERVED_VARIABLES", "ChatMessage", "ChatTemplate"]

MASK = "\ue000{}\ue001"  # private characters around a number: a special token that stays text
END_OF_MESSAGE = "\ue002 "  # marks where the last message goes on; templates that trim it take the space
ERRORS = (ArithmeticError, TypeError, ValueError, LookupError, AttributeError, RecursionError, MemoryError)
"""What a template can end in, besides Jinja's own errors."""
_TESTS_FOR_NONE = re.compile(r"""content['"\]]*\s+is\s+(not\s+)?none""")
TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message", *TOKENS)
"""Variables of a template that have fields or a meaning of their own."""
CONFIG, FILE = "tokenizer_config.json", "chat_template.jinja"


class ChatMessage(NamedTuple):
    role: str
    content: str | None
    """None beside calls without a text."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """Of a tool's result: the call that it answers."""
    name: str | None = None
    reasoning: str | None = None
    """What the assistant thought before its content and its calls."""

    @property
    def num_chars(self) -> int:
        texts = (
            self.content,
            *(part for call in self.tool_calls for part in call),
            self.tool_call_id,
            self.name,
            self.reasoning,
        )
        return sum(len(text) for text in texts if text)

    @property
    def is_of_tools(self) -> bool:
        """A call of a tool, or the result of one."""
        return bool(self.tool_calls) or self.role == "tool"


class ChatTemplate:
    def __init__(self, source: str, variables: dict[str, Any]) -> None:
        """`variables`: bos_token, eos_token and others of the tokenizer's configuration. An invalid template is refused
        where it is used: the model completes texts without it."""
        from jinja2 import meta
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
        )
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        environment.filters["tojson"] = _tojson
        self._errors = (TemplateError, *ERRORS)
        self._variables = variables
        self._invalid = ""
        self.takes_tools = False
        """It shows tools to the model."""
        self._takes_calls = "tool_calls" in source
        self._takes_thinking = ".thinking" in source
        self._tests_for_none = bool(_TESTS_FOR_NONE.search(source))
        self.tool_form = find_tool_form(source)
        """How the model writes calls; None if that is not known."""
        try:
            self._template = environment.from_string(source)
            self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
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
            source, with_tools = named.get("default"), named.get("tool_use")
            if isinstance(source, str) and isinstance(with_tools, str):  # which one is used where there are tools
                source = f"{{% if tools %}}{with_tools}{{% else %}}{source}{{% endif %}}"
        if storage.exists(storage.join(folder, FILE)):
            source = storage.read_bytes(storage.join(folder, FILE)).decode("utf-8", "replace")
        if not isinstance(source, str):
            return None
        return ChatTemplate(source, {name: _text(config.get(name)) for name in TOKENS})

    def pieces(
        self,
        messages: Sequence[ChatMessage],
        special: SpecialTokens,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        expects_answer: bool = True,
        continues: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[str | int]:
        """The prompt, up to where the model's turn begins if `expects_answer`, or where the last message ends if
        `continues`: ids of special tokens, and text between them. `variables` are those that a request sets, such as
        `enable_thinking`. Raises a UserError where the template refuses."""
        self._check_valid()
        has_calls = any(message.is_of_tools for message in messages)
        if tools or (has_calls and not self._takes_calls):
            self._check_takes_tools("tools" if tools else "messages")
        if continues and not (messages and messages[-1].content):
            raise UserError("continue_final_message", "the last message has no text", "give it the text to go on with")
        silent = None if self._tests_for_none else ""
        try:
            as_dicts = (_as_dict(message, silent, takes_thinking=self._takes_thinking) for message in messages)
            dicts = [_masked(one, special) for one in as_dicts]
            masked_tools = [_masked(tool, special) for tool in tools]
            more = {"add_generation_prompt": expects_answer and not continues, **_masked(variables or {}, special)}
            if continues:
                dicts[-1]["content"] += END_OF_MESSAGE
            try:
                text = self._render(dicts, masked_tools, more)
            except self._errors:
                if not tools and not has_calls:
                    raise
                # Some templates need every field, as transformers writes it for functions in Python.
                for message in dicts:
                    message["content"] = message["content"] or ""
                filled = [_with_all_fields(tool) for tool in masked_tools]
                text = self._render(dicts, filled, more)
            text = _before_end(text) if continues else text
            text.encode()  # no half of a surrogate pair
        except self._errors as error:
            found = f"the model's chat template refuses them ({str(error) or type(error).__name__})"
            raise UserError("messages", found[:300], "change them") from None
        return [special.unmask(piece, MASK) if isinstance(piece, str) else piece for piece in special.split(text)]

    def _render(self, messages: list[Any], tools: list[Any], variables: Mapping[str, Any]) -> str:
        return self._template.render(messages=messages, tools=tools or None, **{**self._variables, **variables})

    def _check_valid(self) -> None:
        if self._invalid:
            raise UserError("chat template", self._invalid, "use /v1/completions")

    def _check_takes_tools(self, where: str) -> None:
        if not self.takes_tools:
            found = "the model's chat template has no place for tools"
            raise UserError(where, found, "describe them in a message, or serve a model that takes them")

    def require_tool_form(self) -> ToolForm:
        """Raises a UserError if the model takes no tools, or writes calls in another form than those known."""
        self._check_valid()
        self._check_takes_tools("tools")
        if self.tool_form is None:
            found = "the model's chat template writes calls in a form that is not known"
            raise UserError("tools", found, f"serve a model of one of these: {FORM_NAMES}")
        return self.tool_form


def _before_end(text: str) -> str:
    """The text up to the mark, without white space where the template has trimmed the message."""
    mark = END_OF_MESSAGE.rstrip()
    if mark not in text:
        raise ValueError("the last message is not in the prompt as it is")
    at = text.rindex(mark)
    return text[:at] if text.startswith(END_OF_MESSAGE, at) else text[:at].rstrip()


def _as_dict(message: ChatMessage, silent: str | None, *, takes_thinking: bool) -> dict[str, Any]:
    """As transformers gives it to templates: absent fields are undefined, and arguments are objects. `silent`: the
    content of a message without one. `takes_thinking`: the field of reasoning is GPT-OSS's; beside calls its template
    takes either reasoning or content, and shows both as reasoning."""
    found: dict[str, Any] = {"role": message.role, "content": silent if message.content is None else message.content}
    if message.tool_calls:
        calls = [call.as_openai() for call in message.tool_calls]
        for call in calls:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        found["tool_calls"] = [{name: value for name, value in call.items() if value} for call in calls]  # no empty id
    if message.reasoning is not None:
        found["thinking" if takes_thinking else "reasoning_content"] = message.reasoning
        if takes_thinking and message.tool_calls and message.content and message.reasoning:
            found |= {"thinking": f"{message.reasoning}\n{message.content}", "content": ""}
    return found | {name: value for name in ("tool_call_id", "name") if (value := getattr(message, name)) is not None}


def _with_all_fields(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"description": "", "parameters": {"type": "object", "properties": {}}, **tool["function"]}
    return {"type": "function", **tool, "function": function}


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _masked(value: Any, special: SpecialTokens) -> Any:
    """The value with a mask in place of each special token in its texts."""
    if isinstance(value, str):
        return special.mask(value, MASK)
    if isinstance(value, Mapping):
        return {_masked(key, special): _masked(inner, special) for key, inner in value.items()}
    return [_masked(inner, special) for inner in value] if isinstance(value, list) else value


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
