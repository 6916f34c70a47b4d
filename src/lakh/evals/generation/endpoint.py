"""A model behind an OpenAI-compatible URL (completions or chat): lakh serve, vLLM, SGLang, llama.cpp, a hosted one.

Up to CONCURRENCY requests run at one time. After a server error a request is repeated with growing waits, or after the
time that the server names, and finally raises PeerLost. A server with too many requests (429) is asked for longer. A
rejected request (a prompt that is too long) has an empty completion and the others go on; if all are rejected,
UserError has the server's message. $OPENAI_API_KEY has the API key, if any.
"""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lakh.errors import PeerLost, UserError

if TYPE_CHECKING:
    import aiohttp

    from lakh.server.engine import Completion, SamplingParams
    from lakh.server.prompts.fim import Order

__all__ = ["ChatPrompt", "EndpointClient", "InfillPrompt"]

log = logging.getLogger(__name__)

CONCURRENCY = 16
CONNECT_TIMEOUT_S = 10.0
RESPONSE_TIMEOUT_S = 600.0
TRIES = 5
FIRST_WAIT_S = 0.5
RATE_LIMIT_TIMEOUT_S = 900.0  # how long one request waits in all because the server has too many
LONGEST_WAIT_S = 30.0  # between two tries, if the server does not say when to come back
REJECTED_STATUSES = (400, 413, 422)
CHAT_PROMPT = (
    "Complete this program. Answer with the whole program in one code block and nothing else.\n\n```{}\n{}\n```"
)


class RequestRejected(UserError):
    """The server refuses this request; others may succeed."""


@dataclass(frozen=True)
class InfillPrompt:
    """A prompt with a gap between prefix and suffix."""

    prefix: str
    suffix: str


@dataclass(frozen=True)
class ChatPrompt:
    """What a chat model is asked."""

    text: str

    @staticmethod
    def to_complete(program: str, language: str = "python") -> ChatPrompt:
        return ChatPrompt(CHAT_PROMPT.format(language, program))


class EndpointClient:
    max_seqs = CONCURRENCY

    def __init__(self, url: str, *, chat: bool = False, served_name: str | None = None) -> None:
        self._base = url.rstrip("/")
        if not self._base.endswith("/v1"):
            self._base += "/v1"
        self._chat, self._name = chat, served_name
        self._limit_key = "max_tokens"

    def infill(self, prefix: str, suffix: str, max_tokens: int, order: Order = "psm") -> InfillPrompt:
        """The server orders the parts as its model needs."""
        return InfillPrompt(prefix, suffix)

    def generate(
        self,
        prompts: Sequence[str | InfillPrompt | ChatPrompt],
        samplings: Sequence[SamplingParams],
        *,
        stop_when: Callable[[str], bool] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """One sampling for each prompt. `stop_when` is not used: a server cannot be stopped by it."""
        return asyncio.run(self._generate(prompts, samplings, progress))

    async def _generate(
        self,
        prompts: Sequence[str | InfillPrompt | ChatPrompt],
        samplings: Sequence[SamplingParams],
        progress: Callable[[int], None] | None,
    ) -> list[Completion]:
        import aiohttp

        from lakh.server.engine import Completion

        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=RESPONSE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        slots, done = asyncio.Semaphore(CONCURRENCY), 0

        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            name = self._name or await self._first_model(session)
            rejections: list[UserError] = []

            async def one(prompt: str | InfillPrompt | ChatPrompt, sampling: SamplingParams) -> Completion:
                nonlocal done
                async with slots:
                    try:
                        completion = await self._complete(session, name, prompt, sampling)
                    except RequestRejected as error:
                        rejections.append(error)
                        completion = Completion("", (), "stop", 0)
                done += 1
                if progress:
                    progress(done)
                return completion

            tasks = [asyncio.ensure_future(one(*each)) for each in zip(prompts, samplings, strict=True)]
            try:
                completions = list(await asyncio.gather(*tasks))
                if rejections and len(rejections) == len(tasks):
                    raise rejections[0]
                if rejections:
                    found = f"{len(rejections)} of {len(tasks)} requests were rejected and count as failed"
                    log.warning("%s: %s: %s", self._base, found, rejections[0].found)
                return completions
            except BaseException:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                raise

    async def _first_model(self, session: aiohttp.ClientSession) -> str:
        document = await self._request(session, "GET", "/models", None)
        try:
            return str(document["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise UserError(self._base, "lists no model", "name one with --served-name") from None

    async def _complete(
        self,
        session: aiohttp.ClientSession,
        name: str,
        prompt: str | InfillPrompt | ChatPrompt,
        sampling: SamplingParams,
    ) -> Completion:
        from lakh.server.engine import Completion

        body: dict[str, Any] = {
            "model": name,
            self._limit_key: sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.stop:
            body["stop"] = list(sampling.stop)[:4]  # OpenAI's maximum; Task.extract applies the others
        if self._chat:
            asked = prompt if isinstance(prompt, ChatPrompt) else ChatPrompt.to_complete(str(prompt))
            body["messages"] = [{"role": "user", "content": asked.text}]
        elif isinstance(prompt, InfillPrompt):
            body |= {"prompt": prompt.prefix, "suffix": prompt.suffix}
        else:
            body["prompt"] = prompt.text if isinstance(prompt, ChatPrompt) else prompt
        path = "/chat/completions" if self._chat else "/completions"
        try:
            document = await self._request(session, "POST", path, body)
        except RequestRejected as error:
            if "max_completion_tokens" not in error.found or "max_tokens" not in body:
                raise
            self._limit_key = "max_completion_tokens"  # what OpenAI's reasoning models call it
            body["max_completion_tokens"] = body.pop("max_tokens")
            document = await self._request(session, "POST", path, body)
        try:
            choice = document["choices"][0]
            text = choice["message"]["content"] if self._chat else choice["text"]
            reason: Literal["length", "stop"] = "length" if choice.get("finish_reason") == "length" else "stop"
            return Completion(str(text or ""), (), reason, int((document.get("usage") or {}).get("prompt_tokens", 0)))
        except (KeyError, IndexError, TypeError, AttributeError):
            raise UserError(self._base, "answered in a form that is not OpenAI's", "check the URL") from None

    async def _request(self, session: aiohttp.ClientSession, method: str, path: str, body: Any) -> dict[str, Any]:
        import aiohttp

        url, found, attempt, waits, waited_s = self._base + path, "", 0, 0, 0.0
        while attempt < TRIES:
            if attempt:
                await asyncio.sleep(FIRST_WAIT_S * 2 ** (attempt - 1))
            try:
                async with session.request(method, url, json=body) as response:
                    if response.status == 200:
                        document: dict[str, Any] = await response.json(content_type=None)
                        return document
                    found = f"answers {response.status}: {(await response.text())[:200]}"
                    if response.status < 500 and response.status not in (408, 409, 429):
                        kind = RequestRejected if response.status in REJECTED_STATUSES else UserError
                        raise kind(url, found, "check the URL, the model's name and OPENAI_API_KEY")
                    wait_s = _retry_after_s(response.headers.get("Retry-After"))
                    if wait_s is None and response.status == 429:
                        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**waits)
                if wait_s is not None and waited_s + wait_s <= RATE_LIMIT_TIMEOUT_S:
                    waits, waited_s = waits + 1, waited_s + wait_s
                    await asyncio.sleep(wait_s)
                    continue
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                found = f"does not answer ({type(error).__name__}: {error})"
            attempt += 1
        raise PeerLost(url, f"{found}; tried {TRIES} times", "check that the server runs, and try again")


def _retry_after_s(header: str | None) -> float | None:
    """Seconds that the server asks for, as a number or as a date; None if it says neither."""
    if not header:
        return None
    try:
        return max(0.1, float(header))
    except ValueError:
        pass
    try:
        date = email.utils.parsedate_to_datetime(header)
        return max(0.1, (date - datetime.datetime.now(datetime.UTC)).total_seconds())
    except (ValueError, TypeError):  # TypeError: a date without a time zone
        return None
