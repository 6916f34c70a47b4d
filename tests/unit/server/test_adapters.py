"""LoRA adapters by name: each sequence gets what the model with that adapter merged in gives it, in one batch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lakh.errors import DataError, UserError
from lakh.server.backend import CompletionDelta
from lakh.server.backends.in_process import InProcessBackend
from lakh.server.engine import Completion, Engine, SamplingParams
from lakh.server.model import weights as model_weights
from lakh.server.request import RequestError, parse
from lakh.spec.run import Adapter
from lakh.workloads.code.adapters import fingerprint
from lakh.workloads.code.architectures import parameters
from lakh.workloads.code.formats import hf, peft

TIMEOUT_S = 60.0
PROMPTS = ["def add(", "class Größe:\n    ", "x = "]
SAMPLING = SamplingParams(max_tokens=24)
TARGETS = {
    "attention": ("attention.q", "attention.v"),
    "all": ("attention.q", "attention.k", "attention.v", "attention.o", "ffn.gate", "ffn.up", "ffn.down"),
}


def write_adapter(folder: Path, base: Path, seed: int, targets: str = "all", rank: int = 4) -> Path:
    """A random adapter of the model in `base`, large enough to change most tokens."""
    loaded = model_weights.read(base)
    table = parameters(loaded.spec)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, info in table.items():
        stem = name.removesuffix(".weight")
        if stem.split(".", 2)[-1] in TARGETS[targets]:
            rows, columns = info.shape
            tensors[f"{stem}.lora_a"] = torch.randn(rank, columns, generator=generator)
            tensors[f"{stem}.lora_b"] = torch.randn(rows, rank, generator=generator) * 0.2
    assert len(tensors) == 2 * loaded.spec.layers * len(TARGETS[targets])
    settings = Adapter(rank=rank, alpha=2 * rank, base_sha256=fingerprint(loaded.weights))
    peft.save(folder, loaded.spec, tensors, settings, str(base))
    return folder


@pytest.fixture
def folders(model_dir: Path, tmp_path: Path) -> dict[str, Path]:
    return {
        "first": write_adapter(tmp_path / "first", model_dir, 1),
        "second": write_adapter(tmp_path / "second", model_dir, 2, "attention", rank=2),
    }


@pytest.fixture
def adapted(model_dir: Path, folders: dict[str, Path]) -> Engine:
    engine = Engine.load(str(model_dir))
    for name, folder in folders.items():
        engine.load_adapter(name, str(folder))
    return engine


def complete(engine: Engine, work: list[tuple[str, str | None]], sampling: SamplingParams = SAMPLING) -> list[Any]:
    """Completions of (prompt, adapter) pairs in one batch."""
    seqs = [
        engine.make_sequence(
            engine.prompts.encode_prompt(prompt), sampling, adapter=None if name is None else engine.adapters[name]
        )
        for prompt, name in work
    ]
    engine.submit(*seqs)
    while any(seq.finish_reason is None for seq in seqs):
        engine.step()
    return [seq.completion() for seq in seqs]


def test_each_sequence_of_a_batch_gets_its_own_adapter(
    adapted: Engine, model_dir: Path, folders: dict[str, Path]
) -> None:
    merged = {name: Engine.load(str(folder)) for name, folder in folders.items()}
    merged_and_base: dict[str | None, Engine] = {**merged, None: Engine.load(str(model_dir))}
    work = [(prompt, name) for prompt in PROMPTS for name in ("first", None, "second")]
    found = complete(adapted, work)
    expected: list[Completion] = [merged_and_base[name].generate([prompt], SAMPLING)[0] for prompt, name in work]
    assert [one.text for one in found] == [one.text for one in expected]
    assert len({one.text for one in found[:3]}) == 3  # the adapters change the text
    assert [one.text for one in complete(adapted, work)] == [one.text for one in expected]  # from cached prefixes


def test_adapters_never_share_cached_prefixes(adapted: Engine) -> None:
    prompt = "def add(left, right):\n    return left + right\n"
    hits = []
    for name in ("first", None, "second", "first", None):
        before = adapted.counters.cached_tokens
        complete(adapted, [(prompt, name)])
        hits.append(adapted.counters.cached_tokens > before)
    assert hits == [False, False, False, True, True]


@pytest.mark.parametrize("precision", ["int8", "f32"])
def test_adapters_of_a_quantized_base_and_with_draft_tokens(
    model_dir: Path, folders: dict[str, Path], precision: Any
) -> None:
    engine = Engine.load(str(model_dir), precision=precision, speculation="lookup")
    plain = Engine.load(str(model_dir), precision=precision)
    for one in (engine, plain):
        one.load_adapter("first", str(folders["first"]))
    work = [(prompt, "first") for prompt in PROMPTS]
    expected = [complete(plain, [item])[0].text for item in work]
    assert [one.text for one in complete(engine, work)] == expected
    assert expected != [one.text for one in complete(plain, [(prompt, None) for prompt in PROMPTS])]


def test_requests_select_adapters_by_name_and_loading_is_live(adapted: Engine, folders: dict[str, Path]) -> None:
    async def scenario() -> None:
        backend = InProcessBackend(adapted)

        async def text(model: str | None) -> str:
            body = {"prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0, "model": model}
            items = backend.complete(parse(body))
            return "".join([item.text async for item in items if isinstance(item, CompletionDelta)])

        cards = backend.models()
        assert [(card.id, card.base) for card in cards] == [("tiny", None), ("first", "tiny"), ("second", "tiny")]
        assert len({card.weights for card in cards}) == 3
        texts = await asyncio.gather(*[text(name) for name in ("tiny", "first", "second", None)])
        assert len(set(texts)) == 3
        assert texts[0] == texts[3]
        await backend.unload_adapter("first")
        with pytest.raises(RequestError) as caught:
            await text("first")
        assert caught.value.status == 404
        await backend.load_adapter("again", str(folders["first"]))
        assert await text("again") == texts[1]
        await backend.close()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


def test_adapters_of_another_model_are_refused(
    adapted: Engine, make_engine: Callable[..., Engine], folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="does not fit"):
        make_engine(width=64).load_adapter("first", str(folders["first"]))
    with pytest.raises(UserError, match="no such folder"):
        adapted.load_adapter("x", str(tmp_path / "missing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no adapter"):
        adapted.load_adapter("x", str(tmp_path / "empty"))
    with pytest.raises(UserError, match="name of the model"):
        adapted.load_adapter("tiny", str(folders["first"]))
    with pytest.raises(UserError, match="is not loaded"):
        adapted.unload_adapter("missing")


def test_an_adapter_of_the_head_is_refused_with_what_to_do(model_dir: Path, tmp_path: Path) -> None:
    tied = model_weights.read(model_dir)
    spec, base = replace(tied.spec, tied=False), tmp_path / "untied"
    hf.save(base, spec, {**tied.weights, "head.weight": tied.weights["embed.weight"].clone()}, tied.tokenizer_json)
    folder = write_adapter(tmp_path / "head", base, 1)
    tensors = load_file(folder / peft.WEIGHTS)
    tensors["base_model.model.lm_head.lora_A.weight"] = torch.ones(4, spec.width)
    tensors["base_model.model.lm_head.lora_B.weight"] = torch.ones(spec.vocab, 4)
    save_file(tensors, folder / peft.WEIGHTS)
    with pytest.raises(UserError, match=r"adapts head, which cannot be adapted while serving; merge it: lakh export"):
        Engine.load(str(base)).load_adapter("head", str(folder))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_an_adapter_that_is_not_numbers_is_refused(adapted: Engine, folders: dict[str, Path], number: float) -> None:
    tensors = load_file(folders["first"] / peft.WEIGHTS)
    tensors[max(tensors)][0, 0] = number
    save_file(tensors, folders["first"] / peft.WEIGHTS, {"format": "pt"})
    with pytest.raises(DataError, match="NaN or infinite"):
        adapted.load_adapter("first", str(folders["first"]))
    assert set(adapted.adapters) == {"first", "second"}  # the one that was loaded serves on


def test_an_adapter_of_other_weights_of_the_same_shape_is_refused(
    adapted: Engine, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = folders["first"]
    tensors = load_file(folder / peft.WEIGHTS)
    save_file(tensors, folder / peft.WEIGHTS, {"format": "pt", "base_sha256": "0" * 64})
    with pytest.raises(UserError, match="not those that the adapter was trained on"):
        adapted.load_adapter("other", str(folder))
    save_file(tensors, folder / peft.WEIGHTS, {"format": "pt"})  # as PEFT writes it: nothing to check
    adapted.load_adapter("other", str(folder))
    assert adapted.adapters["other"].digest == adapted.adapters["first"].digest
    config = json.loads((folder / peft.CONFIG).read_text())
    (folder / peft.CONFIG).write_text(json.dumps({**config, "lora_alpha": 16.5}))
    adapted.load_adapter("other", str(folder))
    assert adapted.adapters["other"].digest != adapted.adapters["first"].digest
