"""A GGUF file is served as it is: completions, fill-in-the-middle and chats equal those of transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from tests.unit.workloads import families
from tests.unit.workloads.small_tokenizers import byte_level_settings, sentence_piece_settings

from lakh.server.api.server import running
from lakh.server.backends.in_process import InProcessBackend
from lakh.server.engine import Engine, SamplingParams
from lakh.server.model.cpu import native
from lakh.server.model.inference import SequenceChunk
from lakh.server.model.kv_cache import PagedCache
from lakh.tokens.tokenizer import Tokenizer
from lakh.workloads.code.formats import gguf, gguf_tokenizer, hf

pytest.importorskip("transformers", reason="pip install transformers")
pytest.importorskip("gguf", reason="pip install gguf")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
TURNS = "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>{% endfor %}"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "qwen2": ({"pre": "qwen2", "eos_token_id": 1}, {}, CHATML),
    "gemma": ({"add_space_prefix": False}, {}, TURNS),
    "gemma2": ({"add_space_prefix": False}, {"query_pre_attn_scalar": 16, "sliding_window": 64}, TURNS),
}
NEW_TOKENS = 8


class Served:
    """A random model of transformers with the tokenizer of its family, and the GGUF file of both."""

    def __init__(self, case: str, folder: Path) -> None:
        keys, changes, template = CASES[case]
        settings = {**(byte_level_settings() if case == "qwen2" else sentence_piece_settings()), **keys}
        found = {f"tokenizer.ggml.{key}": value for key, value in settings.items()}
        raw, files = gguf_tokenizer.read("m", {**found, "tokenizer.chat_template": template})
        for name, content in {"tokenizer.json": raw, **files}.items():
            (folder / name).write_bytes(content)
        sizes = {"vocab_size": len(settings["tokens"]), "intermediate_size": 64}
        self.theirs = families.make(case, **sizes, **changes)
        self.theirs.save_pretrained(folder / "hf")
        self.folder, self.tokenizer = folder, Tokenizer.load(folder)
        self.spec, self.weights = hf.load(folder / "hf")

    def save(self, quantization: str) -> str:
        path = self.folder / f"{quantization}.gguf"
        tokenizer_json = self.folder / "tokenizer.json"
        gguf.save(path, "small", self.spec, self.weights, tokenizer_json, quantization=quantization)
        return str(path)

    def continuation(self, ids: Sequence[int]) -> str:
        """Of transformers, without a token that ends the text."""
        ends, prompt = list(self.tokenizer.end_ids), torch.tensor([list(ids)])
        with torch.no_grad():
            made = self.theirs.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=ends,
                pad_token_id=ends[0],
            )
        return self.tokenizer.decode([int(token) for token in made[0, len(ids) :] if int(token) not in ends])


@pytest.fixture(scope="module", params=list(CASES))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(request.param, tmp_path_factory.mktemp("served"))


def test_completions_infilling_and_chats_of_a_gguf_file_are_those_of_transformers(served: Served) -> None:
    engine, tokenizer = Engine.load(served.save("f32"), cache_tokens=256), served.tokenizer
    assert engine.network.precision == "f32"
    begin, fim = tokenizer.begin_ids, tokenizer.fim
    assert fim is not None
    assert fim.middle is not None
    prefix, suffix, code = tokenizer.encode("def f(x):\n"), tokenizer.encode("\n    return x"), "def "
    turn = [("<|im_start|>", "<|im_end|>\n", "<|im_start|>assistant\n"), ("<start_of_turn>", "<end_of_turn>", "")]
    start, end, after = turn[served.spec.family_name != "qwen2"]
    chat = engine.prompts.encode_special(f"{start}user\nhello{end}{after}")
    expected = {
        "completion": served.continuation([*begin, *tokenizer.encode(code)]),
        "infill": served.continuation([*begin, fim.prefix, *prefix, fim.suffix, *suffix, fim.middle]),
        "chat": served.continuation(chat),
    }
    assert any(number in chat for number in [tokenizer.find(end.strip()), tokenizer.find(start)])
    found = asyncio.run(_ask(engine, code))
    assert found == expected


async def _ask(engine: Engine, code: str) -> dict[str, str]:
    common = {"max_tokens": NEW_TOKENS, "temperature": 0}
    async with running(InProcessBackend(engine), "127.0.0.1", 0) as server, aiohttp.ClientSession() as session:

        async def post(path: str, **body: Any) -> Any:
            async with session.post(server.url + path, json={**common, **body}) as answer:
                assert answer.status == 200, await answer.text()
                return (await answer.json())["choices"][0]

        chat = await post("/v1/chat/completions", messages=[{"role": "user", "content": "hello"}])
        return {
            "completion": (await post("/v1/completions", prompt=code))["text"],
            "infill": (await post("/v1/completions", prompt="def f(x):\n", suffix="\n    return x"))["text"],
            "chat": chat["message"]["content"],
        }


@pytest.mark.skipif(native.open_library() is None, reason="the native engine library is not built")
@pytest.mark.parametrize(
    ("form", "precision", "most"), [("q8_0", None, 0.1), ("f32", "int8", 0.1), ("f32", "int4", 0.6)]
)
def test_quantized_weights_of_a_gguf_file_are_served(served: Served, form: str, precision: Any, most: float) -> None:
    engine = Engine.load(served.save(form), precision=precision, cache_tokens=256)
    assert engine.network.precision == (precision or "stored")
    assert engine.generate(["def f(x):\n"], SamplingParams(max_tokens=NEW_TOKENS))[0].tokens
    ids = served.tokenizer.encode("def f(x):\n    return it's 12345")
    cache = PagedCache(served.spec, 8, device=torch.device("cpu"), dtype=torch.float32)
    found = engine.network.forward([SequenceChunk(ids, 0, [0, 1, 2, 3, 4, 5], scored=len(ids))], cache)
    with torch.no_grad():
        expected = served.theirs(torch.tensor([ids])).logits[0]
    # Weights of small random models are wide: one rounding of 8 bits moves logits by a few percent, of 4 bits by 16
    # times as much; a wrong order of rows or a missing bias gives above 1.
    assert (found - expected).norm() < most * expected.norm()
