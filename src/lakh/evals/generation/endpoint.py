"""A model behind an OpenAI-compatible URL (completions or chat): lakh serve, vLLM, SGLang, llama.cpp, a hosted one.

Up to CONCURRENCY requests run at one time. After a server error a request is repeated with growing waits and finally
raises PeerLost; a rejected request raises UserError with the server's message. $OPENAI_API_KEY has the API key, if any.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lakh.errors import PeerLost, UserError

if TYPE_CHECKING:
    import aiohttp

    from lakh.server.engine import Completion, SamplingParams
    from lakh.server.prompts.fim import Order

__all__ = ["EndpointClient", "InfillPrompt"]

CONCURRENCY = 16
CONNECT_TIMEOUT_S = 10.0
RESPONSE_TIMEOUT_S = 600.0
TRIES = 5
FIRST_WAIT_S = 0.5
CHAT_PROMPT = (
    "Complete this program. Answer with the whole program in one code block and nothing else.\n\n```python\n{}\n```"
)


@dataclass(frozen=True)
class InfillPrompt:
    """A prompt with a gap between prefix and suffix."""

    prefix: str
    suffix: str


class EndpointClient:
    max_seqs = CONCURRENCY

    def __init__(self, url: str, *, chat: bool = False, served_name: str | None = None) -> None:
        self._base = url.rstrip("/")
        if not self._base.endswith("/v1"):
            self._base += "/v1"
        self._chat, self._name = chat, served_name

    def infill(self, prefix: str, suffix: str, max_tokens: int, order: Order = "psm") -> InfillPrompt:
        """The server orders the parts as its model needs."""
        return InfillPrompt(prefix, suffix)

    def generate(
        self,
        prompts: Sequence[str | InfillPrompt],
        samplings: Sequence[SamplingParams],
        *,
        stop_when: Callable[[str], bool] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """One sampling for each prompt. `stop_when` is not used: a server cannot be stopped by it."""
        return asyncio.run(self._generate(prompts, samplings, progress))

    async def _generate(
        self,
        prompts: Sequence[str | InfillPrompt],
        samplings: Sequence[SamplingParams],
        progress: Callable[[int], None] | None,
    ) -> list[Completion]:
        import aiohttp

        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=RESPONSE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        slots, done = asyncio.Semaphore(CONCURRENCY), 0

        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            name = self._name or await self._first_model(session)

            async def one(prompt: str | InfillPrompt, sampling: SamplingParams) -> Completion:
                nonlocal done
                async with slots:
                    completion = await self._complete(session, name, prompt, sampling)
                done += 1
                if progress:
                    progress(done)
                return completion

            tasks = [asyncio.ensure_future(one(*each)) for each in zip(prompts, samplings, strict=True)]
            try:
                return list(await asyncio.gather(*tasks))
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
        self, session: aiohttp.ClientSession, name: str, prompt: str | InfillPrompt, sampling: SamplingParams
    ) -> Completion:
        from lakh.server.engine import Completion

        body: dict[str, Any] = {
            "model": name,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.stop:
            body["stop"] = list(sampling.stop)[:4]  # OpenAI's maximum; Task.extract applies the others
        if self._chat:
            body["messages"] = [{"role": "user", "content": CHAT_PROMPT.format(prompt)}]
        elif isinstance(prompt, InfillPrompt):
            body |= {"prompt": prompt.prefix, "suffix": prompt.suffix}
        else:
            body["prompt"] = prompt
        document = await self._request(session, "POST", "/chat/completions" if self._chat else "/completions", body)
        try:
            choice = document["choices"][0]
            text = choice["message"]["content"] if self._chat else choice["text"]
            reason: Literal["length", "stop"] = "length" if choice.get("finish_reason") == "length" else "stop"
            return Completion(str(text or ""), (), reason, int((document.get("usage") or {}).get("prompt_tokens", 0)))
        except (KeyError, IndexError, TypeError, AttributeError):
            raise UserError(self._base, "answered in a form that is not OpenAI's", "check the URL") from None

    async def _request(self, session: aiohttp.ClientSession, method: str, path: str, body: Any) -> dict[str, Any]:
        import aiohttp

        url, found = self._base + path, ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(FIRST_WAIT_S * 2 ** (attempt - 1))
            try:
                async with session.request(method, url, json=body) as response:
                    if response.status == 200:
                        document: dict[str, Any] = await response.json(content_type=None)
                        return document
                    found = f"answers {response.status}: {(await response.text())[:200]}"
                    if response.status < 500 and response.status not in (408, 409, 429):
                        raise UserError(url, found, "check the URL, the model's name and OPENAI_API_KEY")
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                found = f"does not answer ({type(error).__name__}: {error})"
        raise PeerLost(url, f"{found}; tried {TRIES} times", "check that the server runs, and try again")
