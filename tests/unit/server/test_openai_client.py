"""OpenAI's Python client against the HTTP API: whole and streamed completions, types and errors."""

from __future__ import annotations

import asyncio

import pytest

from lakh.server.api.server import running
from lakh.server.backends.in_process import InProcessBackend
from lakh.server.engine import Engine, SamplingParams

openai = pytest.importorskip("openai", reason="pip install openai")


def test_the_openai_client_gets_whole_and_streamed_completions(engine: Engine) -> None:
    expected = engine.generate(["def add("], SamplingParams(max_tokens=12))[0]

    async def main() -> None:
        async with asyncio.timeout(60), running(InProcessBackend(engine), "127.0.0.1", 0) as server:
            client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
            async with client:
                ask = {"model": "tiny", "prompt": "def add(", "max_tokens": 12, "temperature": 0}
                whole = await client.completions.create(**ask, logprobs=1)
                assert whole.choices[0].text == expected.text
                assert len(whole.choices[0].logprobs.token_logprobs) == len(expected.tokens)
                stream = await client.completions.create(**ask, stream=True)
                assert "".join([piece.choices[0].text async for piece in stream]) == expected.text
                several = {**ask, "n": 2, "seed": 7, "temperature": 1.0}
                first, again = [await client.completions.create(**several) for _ in range(2)]
                assert [one.text for one in first.choices] == [one.text for one in again.choices]
                texts = ["", ""]
                async for piece in await client.completions.create(**several, stream=True):
                    texts[piece.choices[0].index] += piece.choices[0].text
                assert texts == [one.text for one in first.choices]
                stop = expected.text[3:5]
                stopped = await client.completions.create(**ask, stop=[stop, "never"])
                assert stopped.choices[0].text == expected.text[: expected.text.index(stop)]
                assert stopped.choices[0].finish_reason == "stop"
                infill = await client.completions.create(**ask, suffix="\n", extra_body={"order": "spm"})
                assert infill.usage.prompt_tokens > len(engine.tokenizer.encode("def add("))
                assert [model.id async for model in await client.models.list()] == ["tiny"]
                assert (await client.models.retrieve("tiny")).id == "tiny"
                with pytest.raises(openai.NotFoundError, match="not served"):
                    await client.models.retrieve("folder/other")
                with pytest.raises(openai.BadRequestError, match="max_tokens"):
                    await client.completions.create(**{**ask, "max_tokens": 0})
                with pytest.raises(openai.NotFoundError):
                    await client.completions.create(**{**ask, "model": "other"})

    asyncio.run(main())
