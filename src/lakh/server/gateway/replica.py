"""One engine behind a gateway: whether it can be used, and a stream of pieces from it.

Speaks OpenAI's /v1/completions with server-sent events, which lakh, vLLM and SGLang serve. What only lakh knows
(stop_rule, order, timeout_ms) is sent to lakh alone; for others the gateway does it here: the hole as text
(fim_text.py), the stop rule on what comes back. Closing the stream closes the connection, by which an engine knows that
nobody waits any more.

An engine that cannot be reached, breaks off or goes silent is a `ReplicaFailed`, one that has no room a `ReplicaBusy`:
another may answer. What an engine says about the request itself is a RequestError and goes to the client.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import aiohttp

from lakh.server.backend import ModelCard, CompletionDelta, Usage
from lakh.server.gateway.fim_template import FimTemplate, fim_prompt
from lakh.server.request import RequestError, CompletionRequest
from lakh.server.stopping import StopRule, indent_width

__all__ = ["Replica", "ReplicaBusy", "ReplicaFailed"]

CHECK_TIMEOUT_S = 3.0
CONNECT_S = 2.0
SILENT_CHECKS = 2  # checks without an answer after which a replica is down; a refused connection is enough at once
DEFAULT_CONTEXT = 4096  # tokens, of an engine that does not say
MAX_LINE_BYTES = 1 << 22


class ReplicaFailed(Exception):
    """It cannot be reached, broke off, is silent, or says that it failed."""

    def __init__(self, found: str, *, is_gone: bool = True) -> None:
        super().__init__(found)
        self.is_gone = is_gone
        """Surely: others should not be sent there before the next check."""


class ReplicaBusy(Exception):
    """It has no room, or takes no more requests."""


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
        """unknown, up, draining (finishes what it has) or down"""
        self.found = "not asked yet"
        self.cards: list[ModelCard] = []
        self.is_lakh = True
        self.num_at_work = 0
        self._silent = 0

    # --- health ---

    async def check(self) -> None:
        """EditorRequest how it is; sets `state`, `found` and `cards`. Never raises."""
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                status = await self._status("/ready")
                if status in (404, 405):  # no lakh: vLLM and SGLang have /health
                    status = await self._status("/health")
                if status == 200:
                    self.cards = await self._models()
        except TimeoutError:
            self._silent += 1
            if self._silent >= SILENT_CHECKS or self.state != "up":
                self.state, self.found = "down", "does not answer"
            return
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            self.state, self.found = "down", f"{type(error).__name__}: {error}"[:200]
            return
        self._silent = 0
        if status == 200:
            self.state, self.found = "up", "ready"
        else:
            self.state, self.found = "draining" if status == 503 else "down", f"says {status}"

    async def _status(self, path: str) -> int:
        async with self._session.get(self.url + path, headers=self._headers) as response:
            return response.status

    async def _models(self) -> list[ModelCard]:
        async with self._session.get(f"{self.url}/v1/models", headers=self._headers) as response:
            data = json.loads(await response.read())["data"]
        self.is_lakh = all(card.get("owned_by") == "lakh" for card in data)
        return [
            ModelCard(str(card["id"]), card.get("context") or card.get("max_model_len"), str(card.get("weights", "")))
            for card in data
        ]

    # --- completions ---

    async def stream(self, request: CompletionRequest, timeout_s: float | None) -> AsyncGenerator[CompletionDelta | Usage, None]:
        self.num_at_work += 1
        try:
            async with aclosing(self._stream(request, timeout_s)) as items:
                async for item in items:
                    yield item
        except TimeoutError:
            raise ReplicaFailed("is silent", is_gone=False) from None  # it may be a long queue
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            raise ReplicaFailed(f"{type(error).__name__}: {error}"[:200]) from None
        finally:
            self.num_at_work -= 1

    async def _stream(self, request: CompletionRequest, timeout_s: float | None) -> AsyncGenerator[CompletionDelta | Usage, None]:
        rules = [] if self.is_lakh or request.stop_rule is None else _rules(request)
        ended: set[int] = set()
        usage: Usage | None = None
        url, body = f"{self.url}/v1/completions", self._body(request, timeout_s)
        async with self._session.post(url, json=body, headers=self._headers, timeout=self._timeout) as response:
            if response.status != 200:
                await _refused(response)
            async for data in _events(response):
                if "error" in data:
                    raise ReplicaFailed(f"says {_told(500, data).message!r}", is_gone=False)
                if data.get("usage"):
                    details = data["usage"].get("prompt_tokens_details") or {}
                    counts = (data["usage"]["prompt_tokens"], data["usage"]["completion_tokens"])
                    usage = Usage(*counts, details.get("cached_tokens") or 0)
                for choice in data.get("choices", ()):
                    piece = _piece(choice)
                    if piece.index in ended:
                        continue
                    if rules:
                        text, found = rules[piece.index].push(piece.text), rules[piece.index].found
                        piece = CompletionDelta(piece.index, text, "stop" if found else piece.finish_reason, piece.tokens)
                    if piece.finish_reason is not None:
                        ended.add(piece.index)
                    yield piece
                if rules and len(ended) == request.num_choices:
                    break  # closes the connection: the engine stops too
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
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or None,
            "seed": sampling.seed,
            "stop": list(sampling.stop) or None,
            "logprobs": sampling.logprobs,
            "return_token_ids": request.return_token_ids or None,
            "cache_salt": self._salt(request),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.is_lakh:
            body |= {"order": request.order, "stop_rule": request.stop_rule, "user": request.user or None}
            body["heal"] = request.heal or None
            body["timeout_ms"] = None if timeout_s is None else max(timeout_s * 1000, 1.0)
        elif request.suffix is not None and self._template is not None:
            room = (card.context or DEFAULT_CONTEXT) - sampling.max_tokens
            texts = [
                fim_prompt(self._template, str(prompt), request.suffix, order=request.order, room_tokens=room)
                for prompt in request.prompts
            ]
            body |= {"prompt": texts[0] if len(texts) == 1 else texts, "suffix": None}
        return {name: value for name, value in body.items() if value is not None}

    def _salt(self, request: CompletionRequest) -> str | None:
        """Tenants stay apart inside the engine too, by a salt that none of them can name for another."""
        if not request.tenant and not request.cache_salt:
            return None
        words = json.dumps([request.tenant, request.cache_salt]).encode()
        return hmac.new(self._key.encode(), words, hashlib.sha256).hexdigest()


async def _refused(response: aiohttp.ClientResponse) -> None:
    """An answer that is no stream. Always raises."""
    try:
        data = json.loads(await response.content.read(MAX_LINE_BYTES))
    except ValueError:
        data = {}
    if response.status == 429 or response.status == 503:
        raise ReplicaBusy(f"says {response.status}")
    if response.status >= 500 or response.status in (401, 403, 408):
        raise ReplicaFailed(f"says {response.status}", is_gone=False)
    raise _told(response.status, data)


def _told(status: int, data: object) -> RequestError:
    """The engine's own words, for the client."""
    error = data.get("error", data) if isinstance(data, Mapping) else {}
    error = error if isinstance(error, Mapping) else {"message": str(error)}
    message, param, code = (error.get(name) for name in ("message", "param", "code"))
    return RequestError(
        param if isinstance(param, str) else None,
        str(message or "the engine refused it")[:500],
        status=status if 400 <= status < 500 else 503,
        code=code if isinstance(code, str) else None,
    )


async def _events(response: aiohttp.ClientResponse) -> AsyncGenerator[dict[str, Any], None]:
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        decoded = json.loads(data)
        if not isinstance(decoded, dict):
            raise ValueError("an event is no object")
        yield decoded


def _piece(choice: dict[str, Any]) -> CompletionDelta:
    reason = choice.get("finish_reason")
    known = reason if reason in (None, "stop", "length", "abort") else "stop"
    return CompletionDelta(
        int(choice.get("index", 0)),
        str(choice.get("text") or ""),
        known,
        tuple(choice.get("token_ids") or ()),
        choice.get("logprobs"),
    )


def _rules(request: CompletionRequest) -> list[StopRule]:
    rules = []
    for prompt in request.prompts:
        line = prompt.rpartition("\n")[2] if isinstance(prompt, str) else ""
        indent = indent_width(line[: len(line) - len(line.lstrip(" \t"))])
        rules += [StopRule(request.stop_rule or "line", indent) for _ in range(request.n)]
    return rules
