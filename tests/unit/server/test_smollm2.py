"""A pretrained model: its logits and greedy text, with and without speculation, equal those of transformers."""

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
from lakh.workloads.code.model import CodeModel

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
    # A dict: tensors of the file are made anew whenever they are asked for.
    hf.save(folder / "model", loaded.spec, dict(loaded.weights), folder / "tokenizer.json")
    return folder / "model"


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> Any:
    """The model of transformers."""
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    return transformers.LlamaForCausalLM.from_pretrained(smollm2, dtype=torch.float32)


def test_logits_equal_those_of_transformers(smollm2_gguf: Path, theirs: Any) -> None:
    loaded = gguf.load(smollm2_gguf)
    assert loaded.spec.parameters == 134_515_008
    model = CodeModel(loaded.spec)
    model.load_state_dict(loaded.weights)
    tokenizer = Tokenizer(loaded.tokenizer_json)
    ids = torch.tensor([tokenizer.encode("def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(")])
    with torch.no_grad():
        logits = model(ids)
        # Equal to the bit where both call the same kernels; 1e-4 of logits near 20 is float32 rounding.
        assert torch.allclose(logits, theirs(ids).logits, atol=1e-4, rtol=0)
    assert tokenizer.decode([int(logits[0, -1].argmax())]) == "n"


def test_greedy_text_equals_transformers_for_twenty_prompts(smollm2: Path, theirs: Any) -> None:
    prompts = [inspect.getsource(thing)[:240] for thing in PYTHON] + PROSE
    assert len(prompts) == 20
    spec, weights = hf.load(smollm2)
    tokenizer = Tokenizer.load(smollm2)
    for speculation in ("off", "lookup"):
        engine = Engine("m", spec, weights, tokenizer, device="cpu", precision="f32", speculation=speculation)
        done = engine.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS))
        if speculation == "off":
            ours = done
        assert [item.text for item in done] == [item.text for item in ours]
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    width = max(map(len, encoded))
    ids = torch.tensor([[tokenizer.eot] * (width - len(row)) + row for row in encoded])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in encoded])
    with torch.inference_mode():
        made = theirs.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=tokenizer.eot,
            pad_token_id=tokenizer.eot,
        )
    for row, item in zip(made, ours, strict=True):
        new = row[width:].tolist()
        if tokenizer.eot in new:  # those that end before the others are filled up with it
            new = new[: new.index(tokenizer.eot) + 1]
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
