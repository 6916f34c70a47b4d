"""A pretrained model: the engine's greedy text equals that of transformers, with and without speculation."""

from __future__ import annotations

import inspect
import json
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from lakh.server.engine import Engine, SamplingParams
from lakh.tokens.tokenizer import Tokenizer
from lakh.workloads.code.formats import gguf, hf

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NEW_TOKENS = 16
PYTHON = [json.dumps, json.loads, textwrap.dedent, textwrap.fill, inspect.cleandoc, inspect.getdoc, zipfile.is_zipfile]
PROSE = [
    "The capital of France is",
    "To sort a list in Python, call",
    "A binary tree is a data structure in which",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    ",
    "class Stack:\n    def __init__(self):\n",
    "import os\n\nfor name in os.listdir(",
    "SELECT name, price FROM products WHERE",
    "function add(a, b) {\n  return",
    '{"name": "lakh", "version":',
    "#include <stdio.h>\n\nint main(void) {\n",
    "for i in range(10):\n    print(",
    "# Compute the greatest common divisor\ndef gcd(a, b):\n",
]


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a Hugging Face directory."""
    folder = tmp_path_factory.mktemp("smollm2-hf")
    loaded = gguf.load(smollm2_gguf)
    (folder / "tokenizer.json").write_bytes(loaded.tokenizer_json)
    hf.save(folder / "model", loaded.spec, loaded.weights, folder / "tokenizer.json")
    return folder / "model"


def test_greedy_text_equals_transformers_for_twenty_prompts(smollm2: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    prompts = [inspect.getsource(thing)[:240] for thing in PYTHON] + PROSE
    assert len(prompts) == 20
    spec, weights = hf.load(smollm2)
    tokenizer = Tokenizer.load(smollm2)
    theirs = transformers.LlamaForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    for speculation in ("off", "lookup"):
        engine = Engine("m", spec, weights, tokenizer, device="cpu", precision="f32", speculation=speculation)
        done = engine.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS))
        if speculation == "off":
            ours = done
        assert [item.text for item in done] == [item.text for item in ours]
    for prompt, item in zip(prompts, ours, strict=True):
        ids = torch.tensor([tokenizer.encode(prompt)])
        with torch.inference_mode():
            made = theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=tokenizer.eot,
                pad_token_id=tokenizer.eot,
            )
        new = made[0, ids.shape[1] :].tolist()
        assert tuple(new) == item.tokens
        assert tokenizer.decode([token for token in new if token != tokenizer.eot]) == item.text


def test_the_gguf_file_is_served_directly(smollm2: Path, smollm2_gguf: Path) -> None:
    prompts, sampling = [PROSE[4]], SamplingParams(max_tokens=8)
    ours, theirs = (
        Engine.load(str(path), precision="f32").generate(prompts, sampling) for path in (smollm2_gguf, smollm2)
    )
    assert ours == theirs


def test_the_question_of_the_readme_is_answered_with_a_function_that_works(smollm2_gguf: Path) -> None:
    prompt = "def reverse(text):"
    (answer,) = Engine.load(str(smollm2_gguf)).generate([prompt], SamplingParams(max_tokens=32, stop=("\n\n",)))
    names: dict[str, Any] = {}
    exec(prompt + answer.text, names)
    assert names["reverse"]("lakh") == "hkal"
