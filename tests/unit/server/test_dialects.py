"""Dialects over HTTP: Ollama's and Tabby's, and the example of docs/how-to/add-an-api-dialect.md as written."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import tokenizers

from lakh.server.api import dialects
from lakh.server.api.dialects import DIALECTS
from lakh.server.api.dialects.dialect import DialectResponse
from lakh.server.api.dialects.llama_cpp import LLAMA_CPP
from lakh.server.api.server import running
from lakh.server.backends.in_process import InProcessBackend
from lakh.server.engine import Engine, SamplingParams
from lakh.server.request import RequestError
from lakh.tokens.tokenizer import Tokenizer

PAGE = Path(__file__).parents[3] / "docs/how-to/add-an-api-dialect.md"


def test_the_dialect_of_the_docs_page_is_served(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, test = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len((code + test).splitlines()) < 150
    names: dict[str, Any] = {"DialectResponse": DialectResponse}
    exec(code + "\n\n" + test, names)
    names["test_tgi_names_become_openais_and_back"]()
    monkeypatch.setattr(dialects, "DIALECTS", (*DIALECTS, names["TGI"]))
    expected = engine.generate(["def "], SamplingParams(max_tokens=5))[0].text

    async def scenario() -> None:
        async with running(InProcessBackend(engine), "127.0.0.1", 0) as server, aiohttp.ClientSession() as session:
            body = {"inputs": "def ", "parameters": {"max_new_tokens": 5}}
            async with session.post(f"{server.url}/generate", json=body) as response:
                assert (response.status, await response.json()) == (200, {"generated_text": expected})

    asyncio.run(asyncio.wait_for(scenario(), 120))


Post = Callable[..., Awaitable[tuple[int, str, str]]]


def run(engine: Engine, scenario: Callable[[Post], Awaitable[None]]) -> None:
    async def main() -> None:
        async with running(InProcessBackend(engine), "127.0.0.1", 0) as server, aiohttp.ClientSession() as session:

            async def send(path: str, body: Any = None) -> tuple[int, str, str]:
                """Status, content type and text."""
                verb = session.get if body is None else session.post
                async with verb(server.url + path, json=body) as response:
                    return response.status, response.content_type, await response.text()

            await scenario(send)

    asyncio.run(asyncio.wait_for(main(), 120))


def test_ollama_generates_whole_streamed_raw_and_with_a_suffix(engine: Engine) -> None:
    greedy = {"temperature": 0, "num_predict": 6}
    expected = engine.generate(["def "], SamplingParams(max_tokens=6))[0]
    middle = engine.prompts.infill("def ", "\n", 6)
    filled = engine.generate([middle], SamplingParams(max_tokens=6))[0]

    async def scenario(send: Post) -> None:
        body = {"model": "tiny:latest", "prompt": "def ", "options": greedy}
        status, _, text = await send("/api/generate", {**body, "stream": False})
        answer = json.loads(text)
        assert (status, answer["response"], answer["done"]) == (200, expected.text, True)
        assert (answer["eval_count"], answer["done_reason"]) == (len(expected.tokens), "length")
        assert answer["prompt_eval_duration"] > 0 < answer["eval_duration"]  # nanoseconds
        assert answer["total_duration"] >= answer["prompt_eval_duration"] + answer["eval_duration"]
        status, kind, text = await send("/api/generate", body)  # a stream, by default
        lines = [json.loads(line) for line in text.splitlines()]
        assert (status, kind) == (200, "application/x-ndjson")
        assert "".join(line["response"] for line in lines) == expected.text
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        assert lines[-1]["prompt_eval_count"] == expected.prompt_tokens
        _, _, text = await send("/api/generate", {**body, "suffix": "\n", "stream": False})
        assert json.loads(text)["response"] == filled.text
        raw = "<|fim_prefix|>def <|fim_suffix|>\n<|fim_middle|>"
        _, _, text = await send("/api/generate", {**body, "prompt": raw, "raw": True, "stream": False})
        assert json.loads(text)["response"] == filled.text
        for unlimited in (0, -1):  # Ollama's forms of "no limit", and of a random seed
            options = {"num_predict": unlimited, "seed": -1, "temperature": 0}
            ask = {**body, "stream": False, "options": options}
            status, _, text = await send("/api/generate", {**ask, "suffix": "x"})
            assert status == 400  # 128 tokens are more than the context of this model
            assert "max_tokens 128" in text or "max_tokens: 128" in text
            status, _, text = await send("/api/generate", ask)  # as a text at most 128, and half of the context
            assert (status, json.loads(text)["eval_count"]) == (200, engine.spec.context // 2)
        for bad in ({"format": "xml"}, {"system": "x"}, {"options": 3}, {"options": {"num_predict": "x"}}):
            assert (await send("/api/generate", {**body, **bad}))[0] == 400
        assert (await send("/api/generate", {**body, "model": "other"}))[0] == 404
        assert json.loads((await send("/api/tags"))[2])["models"][0]["name"] == "tiny"
        shown = json.loads((await send("/api/show", {"model": "tiny:latest"}))[2])
        assert shown["model_info"]["llama.context_length"] == engine.spec.context
        assert ".Suffix" in shown["template"]  # Continue then sends the suffix, and no tokens of another model
        assert "insert" in shown["capabilities"]
        assert json.loads((await send("/api/ps"))[2])["models"][0]["name"] == "tiny"
        status, _, text = await send("/api/generate", {"model": "other", "prompt": "x"})
        assert "other" in json.loads(text)["error"]  # a text, which Ollama's clients show
        assert (await send("/api/show", {"model": "other"}))[0] == 404
        assert (await send("/api/version"))[0] == 200

    run(engine, scenario)


@pytest.mark.parametrize(
    ("path", "body"), [("/api/generate", {}), ("/api/generate", {"prompt": ""}), ("/api/chat", {"messages": []})]
)
def test_ollamas_request_to_load_a_model_generates_nothing(engine: Engine, path: str, body: dict[str, Any]) -> None:
    before = engine.counters.prompt_tokens

    async def scenario(send: Post) -> None:
        status, _, text = await send(path, {"model": "tiny", **body})
        answer = json.loads(text)
        assert (status, answer["done"], answer["done_reason"]) == (200, True, "load")
        assert answer.get("response", answer.get("message", {}).get("content")) == ""
        assert (await send(path, {"model": "other", **body}))[0] == 404

    run(engine, scenario)
    assert engine.counters.prompt_tokens == before


@pytest.mark.parametrize(
    ("family", "changes", "context_key"),
    [("llama", {}, "llama.context_length"), ("qwen3", {"family": "qwen3", "qk_norm": True}, "qwen3.context_length")],
)
def test_ollama_is_told_what_the_model_is(
    save_model: Callable[..., Path], family: str, changes: dict[str, Any], context_key: str
) -> None:
    folder = save_model(**changes)
    engine = Engine.load(str(folder), precision="bf16")

    async def scenario(send: Post) -> None:
        (model,) = json.loads((await send("/api/tags"))[2])["models"]
        assert model["size"] == sum(file.stat().st_size for file in folder.glob("*.safetensors")) > 0
        details = model["details"]
        assert (details["family"], details["families"], details["format"]) == (family, [family], "safetensors")
        assert details["parameter_size"] == f"{engine.spec.parameters / 1e6:.4g}M"
        assert details["quantization_level"] == "BF16"
        shown = json.loads((await send("/api/show", {"model": "tiny"}))[2])
        assert shown["details"] == details
        assert shown["model_info"]["general.architecture"] == family
        assert shown["model_info"][context_key] == engine.spec.context
        assert shown["model_info"]["general.parameter_count"] == engine.spec.parameters

    run(engine, scenario)


@pytest.mark.parametrize(
    ("fim_tokens", "abilities"),
    [
        ([], ["completion"]),
        (["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], ["completion", "insert"]),
        (["[PREFIX]", "[SUFFIX]"], ["completion", "insert"]),
    ],
)
def test_ollama_is_told_whether_a_model_can_fill_in(
    make_engine: Callable[..., Engine], tmp_path: Path, fim_tokens: list[str], abilities: list[str]
) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"<|endoftext|>": 0, "a": 1}, []))
    tokenizer.add_special_tokens(["<|endoftext|>", *fim_tokens])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    engine = make_engine()
    engine.tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")

    async def scenario(send: Post) -> None:
        shown = json.loads((await send("/api/show", {"model": "tiny"}))[2])
        assert (".Suffix" in shown["template"], shown["capabilities"]) == (bool(fim_tokens), abilities)

    run(engine, scenario)


def test_tabbys_body_on_openais_path_gets_tabbys_answer(engine: Engine) -> None:
    async def scenario(send: Post) -> None:
        segments = {
            "prefix": "def ",
            "suffix": "\n",
            "declarations": [{"filepath": "a.py", "body": "def add(left): ..."}],
            "relevant_snippets_from_changed_files": [{"filepath": "b.py", "body": "x", "score": 1.0}],
        }
        body = {"language": "python", "segments": segments, "temperature": 0}
        status, _, text = await send("/v1/completions", body)
        answer = json.loads(text)
        assert (status, list(answer["choices"][0])) == (200, ["index", "text"])
        assert answer["id"].startswith("cmpl-")
        plain = {"prompt": "def ", "suffix": "\n", "max_tokens": 64, "temperature": 0}
        extra = [{"filename": "b.py", "text": "x"}, {"filename": "a.py", "text": "def add(left): ..."}]
        _, _, text = await send("/v1/completions", {**plain, "input_extra": extra})
        assert json.loads(text)["choices"][0]["text"] == answer["choices"][0]["text"]
        status, _, _ = await send("/v1/completions", {"segments": {"prefix": "x = 1\n" * 500}})  # a long file
        assert status == 200
        for bad in ({"segments": 1}, {"segments": {}}, {"segments": {"prefix": "x", "declarations": [1]}}):
            assert (await send("/v1/completions", bad))[0] == 400
        assert json.loads((await send("/v1/health"))[2])["model"] == "tiny"
        for kind in ("view", "select", "dismiss"):
            assert (await send("/v1/events", {"type": kind, "completion_id": answer["id"]}))[0] == 200
        page = (await send("/metrics"))[2]
        assert "lakh:suggestions_shown_total 1.0" in page
        assert "lakh:suggestions_accepted_total 1.0" in page

    run(engine, scenario)


def test_infill_has_the_defaults_limits_and_timings_of_llama_cpp(engine: Engine) -> None:
    sent = {"input_prefix": "def f():\n    ", "input_suffix": "\n", "n_indent": 4, "t_max_predict_ms": 500}
    fields = LLAMA_CPP.to_openai(sent)
    assert [fields[name] for name in ("temperature", "top_k", "top_p", "min_p")] == [0.8, 40, 0.95, 0.05]
    assert (fields["stop_rule"], fields["generation_ms"]) == ("block", 500)
    assert LLAMA_CPP.to_openai({**sent, "stop_rule": "line"})["stop_rule"] == "line"
    assert LLAMA_CPP.to_openai({**sent, "n_indent": 0, "min_p": 0})["min_p"] == 0
    assert LLAMA_CPP.to_openai({**sent, "n_indent": 0}).get("stop_rule") is None
    with pytest.raises(RequestError, match="n_indent"):
        LLAMA_CPP.to_openai({**sent, "n_indent": "4"})

    async def scenario(send: Post) -> None:
        body = {"input_prefix": "def ", "input_suffix": "\n", "n_predict": 6, "temperature": 0}
        status, _, text = await send("/infill", {**body, "t_max_predict_ms": 0.001})  # counts from the first token
        answer = json.loads(text)
        assert (status, answer["stop"], answer["stop_type"]) == (200, True, "limit")
        timings = answer["timings"]
        assert timings["prompt_n"] + timings["cache_n"] == answer["tokens_evaluated"]
        assert timings["predicted_n"] == answer["tokens_predicted"] > 0
        assert timings["predicted_per_second"] == pytest.approx(
            1e3 * timings["predicted_n"] / timings["predicted_ms"], rel=1e-3
        )
        _, kind, text = await send("/infill", {**body, "stream": True})
        events = [json.loads(line[6:]) for line in text.splitlines() if line]
        assert kind == "text/event-stream"
        assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
        assert events[-1]["tokens_predicted"] == 6
        assert "".join(event["content"] for event in events) == answer["content"]

    run(engine, scenario)


def test_infill_uses_the_extra_files_of_llama_vim(engine: Engine) -> None:
    async def scenario(send: Post) -> None:
        body = {"input_prefix": "def ", "input_suffix": "\n", "prompt": "", "n_predict": 8, "temperature": 0}
        extra = [{"filename": "a.py", "text": "def add(left): ..."}]
        texts = []
        for more in ({}, {"input_extra": extra}):
            status, _, text = await send("/infill", {**body, **more})
            assert status == 200
            texts.append(json.loads(text)["tokens_evaluated"])
        assert texts[1] > texts[0] + 5
        assert (await send("/infill", {**body, "input_extra": [{"text": 3}]}))[0] == 400
        assert (await send("/infill", {**body, "grammar": "root ::= x"}))[0] == 400

    run(engine, scenario)
