"""One engine behind a gateway: its health, and a stream of deltas from it.

Uses OpenAI's /v1/completions with server-sent events, which lakh, vLLM and SGLang serve. lakh's own fields (stop_rule,
order, timeout_ms) are sent to lakh only; for other engines the gateway writes the fill-in-the-middle prompt as text and
applies the stop rule to the response. Closing the stream closes the connection, which cancels the request.

An engine that cannot be reached, breaks off or goes silent raises `ReplicaFailed`, one without room `ReplicaBusy`:
another replica may answer. An engine's error about the request itself is a RequestError for the client.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any

import aiohttp

from lakh.server.backend import CompletionDelta, ModelCard, Usage
from lakh.server.gateway.fim_template import FimTemplate, end_of, fim_prompt
from lakh.server.prompts.chat_template import ChatMessage
from lakh.server.request import CompletionRequest, RequestError
from lakh.server.sampling.params import SamplingParams
from lakh.server.stopping import StopRule, stop_rule_for
from lakh.server.tools.tool_call import ToolCallDelta

__all__ = ["Replica", "ReplicaBusy", "ReplicaFailed"]

CHECK_TIMEOUT_S = 3.0
CONNECT_S = 2.0
SILENT_CHECKS = 2  # unanswered checks after which a replica is down; a refused connection counts at once
DEFAULT_CONTEXT = 4096  # tokens, if the engine does not report it
MAX_LINE_BYTES = 1 << 22
MAX_STATUS_BYTES = 1 << 12
DRAINING = "draining"  # in the body of lakh's /ready


_ALWAYS_SENT = ("max_tokens", "temperature", "top_p", "seed")  # engines have other defaults; the rest only if it is set
_DEFAULTS = {name: value for name, value in asdict(SamplingParams()).items() if name not in _ALWAYS_SENT}


class ReplicaFailed(Exception):
    """It cannot be reached, broke off, is silent, or reports a failure."""

    def __init__(self, found: str, *, is_gone: bool = True) -> None:
        super().__init__(found)
        self.is_gone = is_gone
        """Certainly down: send nothing there before the next check."""


class ReplicaBusy(Exception):
    """Its queue is full, or it is draining."""


class Replica:
    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        *,
        template: FimTemplate | None = None,
        key: str = "",
        stall_s: float = 30.0,
    ) -> None:
        self.url, self._session, self._template, self._key = url, session, template, key
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=stall_s)
        self.state = "unknown"
        """unknown, up, draining (finishes its requests) or down"""
        self.found = "not checked yet"
        self.cards: list[ModelCard] = []
        self.is_lakh = True
        self.num_running = 0
        self._silent = 0

    # --- health ---

    async def check(self) -> None:
        """Check its health; sets `state`, `found` and `cards`. Never raises."""
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                status, reported = await self._status("/ready")
                if status in (404, 405):  # not lakh: vLLM and SGLang have /health
                    status, reported = await self._status("/health")
                if status == 200:
                    self.cards = await self._models()
        except TimeoutError:
            self._silent += 1
            if self._silent >= SILENT_CHECKS or self.state != "up":
                self.state, self.found = "down", "does not answer"
            return
        except ReplicaFailed as error:
            self.state, self.found = "down", str(error)
            return
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            self.state, self.found = "down", f"{type(error).__name__}: {error}"[:200]
            return
        self._silent = 0
        if status == 200:
            self.state, self.found = "up", "ready"
        elif reported == DRAINING:
            self.state, self.found = "draining", "finishes its requests"
        else:
            self.state, self.found = "down", f"returns {status}" + (f": {reported}"[:200] if reported else "")

    async def _status(self, path: str) -> tuple[int, str]:
        """The HTTP status, and the reason that lakh's server gives in its body."""
        async with self._session.get(self.url + path, headers=self._headers) as response:
            body = b"" if response.status == 200 else await response.content.read(MAX_STATUS_BYTES)
        try:
            data = json.loads(body)
        except ValueError:
            data = None
        return response.status, str(data.get("status", "")) if isinstance(data, dict) else ""

    async def _models(self) -> list[ModelCard]:
        async with self._session.get(f"{self.url}/v1/models", headers=self._headers) as response:
            if response.status in (401, 403):
                raise ReplicaFailed(_wrong_key(response.status))
            data = json.loads(await response.read())["data"]
        self.is_lakh = all(card.get("owned_by") == "lakh" for card in data)
        return [
            ModelCard(
                str(card["id"]),
                card.get("context") or card.get("max_model_len"),
                str(card.get("weights", "")),
                has_tools=card.get("tools") is True,
            )
            for card in data
        ]

    # --- completions ---

    async def stream(
        self, request: CompletionRequest, timeout_s: float | None
    ) -> AsyncGenerator[CompletionDelta | Usage, None]:
        self.num_running += 1
        try:
            async with aclosing(self._stream(request, timeout_s)) as items:
                async for item in items:
                    yield item
        except RequestError as error:
            raise _with_own_field(error, request) from None
        except TimeoutError:
            raise ReplicaFailed("is silent", is_gone=False) from None  # it may have a long queue
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            raise ReplicaFailed(f"{type(error).__name__}: {error}"[:200]) from None
        finally:
            self.num_running -= 1

    async def _stream(
        self, request: CompletionRequest, timeout_s: float | None
    ) -> AsyncGenerator[CompletionDelta | Usage, None]:
        rules = [] if self.is_lakh else _stop_rules(request)
        ended: set[int] = set()
        usage: Usage | None = None
        url, body = f"{self.url}/v1/completions", self._body(request, timeout_s)
        async with self._session.post(url, json=body, headers=self._headers, timeout=self._timeout) as response:
            if response.status != 200:
                await _raise_error(response)
            async for data in _events(response):
                if "error" in data:
                    error = _client_error(400, data)
                    if _is_of_request(data):
                        raise error
                    raise ReplicaFailed(f"reports {error.message!r}", is_gone=False)
                if data.get("usage"):
                    details = data["usage"].get("prompt_tokens_details") or {}
                    counts = (data["usage"]["prompt_tokens"], data["usage"]["completion_tokens"])
                    drafts = data["usage"].get("completion_tokens_details") or {}
                    accepted = int(drafts.get("accepted_prediction_tokens") or 0)
                    drafted = accepted + int(drafts.get("rejected_prediction_tokens") or 0)
                    cached = details.get("cached_tokens") or 0
                    usage = Usage(*counts, cached, draft_tokens=drafted, accepted_tokens=accepted)
                for choice in data.get("choices", ()):
                    delta = _delta(choice)
                    if delta.index in ended:
                        continue
                    if rules:
                        text, found = rules[delta.index].push(delta.text), rules[delta.index].found
                        reason = "stop" if found else delta.finish_reason
                        stop_reason = None if found else delta.stop_reason
                        delta = CompletionDelta(delta.index, text, reason, delta.tokens, stop_reason=stop_reason)
                    if delta.finish_reason is not None:
                        ended.add(delta.index)
                    yield delta
                if rules and len(ended) == request.num_choices:
                    break  # closes the connection, which stops the engine too
        if len(ended) < request.num_choices:
            raise ReplicaFailed("broke off")
        yield usage or Usage(0, 0)

    def _body(self, request: CompletionRequest, timeout_s: float | None) -> dict[str, Any]:
        sampling = request.sampling
        card = next((card for card in self.cards if request.model in (None, card.id)), self.cards[0])
        body: dict[str, Any] = {
            "model": card.id,
            "prompt": request.prompts[0] if len(request.prompts) == 1 else list(request.prompts),
            "suffix": request.suffix,
            "n": request.n if request.n > 1 else None,
            **{name: value for name, value in asdict(sampling).items() if value != _DEFAULTS.get(name)},
            "prompt_logprobs": request.prompt_logprobs,
            "echo": request.echo or None,
            "return_token_ids": request.return_token_ids or None,
            "cache_salt": self._salt(request),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.messages and not self.is_lakh:
            raise RequestError("messages", "messages: this engine is not lakh; ask its own chat API")
        if request.messages:
            body |= {"prompt": None, "messages": [_as_openai(message) for message in request.messages]}
            body |= {} if request.tools is None else request.tools.as_openai()
            body["add_generation_prompt"] = request.add_generation_prompt
            body["continue_final_message"] = request.continue_final_message
            body["chat_template_kwargs"] = json.loads(request.template_variables or "{}")
        form = sampling.structured_outputs
        body["logit_bias"] = {str(number): bias for number, bias in sampling.logit_bias} or None
        body["structured_outputs"] = None if form is None else form.as_structured_outputs()
        if request.as_message and not self.is_lakh and (request.system or request.context_ids):
            raise RequestError("system", "system, context: this engine is not lakh; ask its own chat API")
        if self.is_lakh:
            if request.as_message:
                body |= {"as_message": True, "system": request.system, "context": list(request.context_ids)}
            body |= {"order": request.order, "stop_rule": request.stop_rule, "user": request.user or None}
            body |= {"heal": request.heal or None, "parse_special": request.parse_special or None}
            body["input_extra"] = [{"filename": file.name, "text": file.text} for file in request.extra] or None
            body["timeout_ms"] = None if timeout_s is None else max(timeout_s * 1000, 1.0)
            body["generation_ms"] = None if request.generation_s is None else request.generation_s * 1000
        elif request.suffix == "" or (request.suffix is not None and self._template is not None):
            room = (card.context or DEFAULT_CONTEXT) - sampling.max_tokens
            texts = [self._prompt(prompt, request, room) for prompt in request.prompts]
            body |= {"prompt": texts[0] if len(texts) == 1 else texts, "suffix": None}
        return {name: value for name, value in body.items() if value is not None}

    def _prompt(
        self, prompt: str | tuple[int, ...], request: CompletionRequest, room_tokens: int
    ) -> str | tuple[int, ...]:
        """For an engine that takes no suffix."""
        if not request.suffix or self._template is None:
            return end_of(prompt, room_tokens)
        return fim_prompt(self._template, str(prompt), request.suffix, order=request.order, room_tokens=room_tokens)

    def _salt(self, request: CompletionRequest) -> str | None:
        """Separates tenants inside the engine too, by a salt that no other tenant can compute."""
        if not request.tenant and not request.cache_salt:
            return None
        identity = json.dumps([request.tenant, request.cache_salt]).encode()
        return hmac.new(self._key.encode(), identity, hashlib.sha256).hexdigest()


def _as_openai(message: ChatMessage) -> dict[str, Any]:
    found = {name: value for name, value in message._asdict().items() if value is not None or name == "content"}
    return found | {"tool_calls": [call.as_openai() for call in message.tool_calls]}


async def _raise_error(response: aiohttp.ClientResponse) -> None:
    """Raise the error of a response that is not a stream."""
    try:
        data = json.loads(await response.content.read(MAX_LINE_BYTES))
    except ValueError:
        data = {}
    if response.status == 429 or response.status == 503:
        raise ReplicaBusy(f"returns {response.status}")
    if response.status in (401, 403):
        raise ReplicaFailed(_wrong_key(response.status))
    if response.status >= 500 or response.status == 408:
        raise ReplicaFailed(f"returns {response.status}", is_gone=False)
    raise _client_error(response.status, data)


def _wrong_key(status: int) -> str:
    return f"rejects the gateway's key ({status}): see --engine-key-file"


def _client_error(status: int, data: object) -> RequestError:
    """The engine's own error message, for the client."""
    error = data.get("error", data) if isinstance(data, Mapping) else {}
    error = error if isinstance(error, Mapping) else {"message": str(error)}
    message, param, code = (error.get(name) for name in ("message", "param", "code"))
    return RequestError(
        param if isinstance(param, str) else None,
        str(message or "the engine rejected the request")[:500],
        status=status if 400 <= status < 500 else 503,
        code=code if isinstance(code, str) else None,
    )


def _is_of_request(data: Mapping[str, Any]) -> bool:
    """An error in a stream that every engine would report, such as a form that cannot be followed any further."""
    error = data.get("error")
    return isinstance(error, Mapping) and error.get("type") == "invalid_request_error" and bool(error.get("param"))


def _with_own_field(error: RequestError, request: CompletionRequest) -> RequestError:
    """The field by which the client states a form, in the place of the one by which the gateway asks for it."""
    form, asked = request.sampling.structured_outputs, "structured_outputs"
    if form is None or error.param != asked:
        return error
    return replace(error, param=form.field, message=error.message.replace(asked, form.field, 1))


async def _events(response: aiohttp.ClientResponse) -> AsyncGenerator[dict[str, Any], None]:
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        decoded = json.loads(data)
        if not isinstance(decoded, dict):
            raise ValueError("an event is not an object")
        yield decoded


def _delta(choice: dict[str, Any]) -> CompletionDelta:
    reason = choice.get("finish_reason")
    known = reason if reason in (None, "stop", "tool_calls", "length", "abort") else "stop"
    calls = [(call["index"], call.get("id"), call["function"]) for call in choice.get("tool_calls") or ()]
    return CompletionDelta(
        int(choice.get("index", 0)),
        str(choice.get("text") or ""),
        known,
        tuple(choice.get("token_ids") or ()),
        choice.get("logprobs"),
        int(choice.get("accepted_prediction_tokens") or 0),
        choice.get("prompt_logprobs"),
        None if choice.get("prompt_token_ids") is None else tuple(choice["prompt_token_ids"]),
        tuple(
            ToolCallDelta(int(index), str(number or ""), str(made.get("name") or ""), str(made["arguments"]))
            for index, number, made in calls
        ),
        _stop_reason(choice.get("stop_reason")),
        str(choice.get("reasoning_content") or ""),
    )


def _stop_reason(value: object) -> str | int | None:
    """vLLM's, which other engines may lack."""
    return value if isinstance(value, str | int) and not isinstance(value, bool) else None


def _stop_rules(request: CompletionRequest) -> list[StopRule]:
    rules = [stop_rule_for(request.stop_rule, prompt) for prompt in request.prompts for _ in range(request.n)]
    return [rule for rule in rules if rule is not None]
