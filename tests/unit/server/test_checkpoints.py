"""`lakh serve` of a checkpoint from elsewhere: every architecture, with a tokenizer that lakh did not train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import tokenizers
import torch
from tests.unit.workloads import families
from tokenizers import decoders, models, pre_tokenizers, processors

from lakh.errors import CorruptCheckpoint, UserError
from lakh.server.engine import Engine
from lakh.server.model import weights
from lakh.server.sampling.params import SamplingParams
from lakh.workloads.code.formats import hf

pytest.importorskip("transformers", reason="pip install transformers")

PROMPTS = ["def f(x):", "", "a b"]
NEW = 12


def write_tokenizer(folder: Path) -> None:
    """Letters only, with a token before every text and two that end it; none for fill in the middle."""
    words = {word: number for number, word in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())[:93])}
    made = tokenizers.Tokenizer(models.BPE(words, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>", "<|eot|>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 93)])
    made.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write(case: str, folder: Path, end_ids: list[int] | None = None) -> Path:
    theirs = families.make(case)
    theirs.generation_config.eos_token_id = end_ids
    theirs.save_pretrained(folder, max_shard_size="40KB")
    write_tokenizer(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", list(families.CASES))
def test_the_engine_generates_the_greedy_tokens_of_transformers(case: str, tmp_path: Path) -> None:
    import transformers

    folder = write(case, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    theirs_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    engine = Engine.load(str(folder))
    found = engine.generate(PROMPTS, SamplingParams(max_tokens=NEW, temperature=0.0))
    for prompt, completion in zip(PROMPTS, found, strict=True):
        ids = theirs_tokenizer(prompt, return_tensors="pt")["input_ids"].long()
        assert ids[0, 0] == 93  # <s>
        expected = theirs.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=[94])[0, ids.shape[1] :]
        assert list(completion.tokens) == expected.tolist()
        assert completion.prompt_tokens == ids.shape[1]


def test_a_text_ends_where_the_learned_positions_end(tmp_path: Path) -> None:
    import transformers

    folder = write("gpt_bigcode", tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    engine = Engine.load(str(folder))
    prompt, context = engine.prompts.encode_prompt("abcd" * 25), engine.spec.context
    new = context - len(prompt)
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=None)
    seq = engine.make_sequence(prompt, SamplingParams(max_tokens=context, temperature=0.0))
    engine.submit(seq)
    while seq.finish_reason is None:
        engine.step()
    assert seq.finish_reason == "length"
    assert [*prompt, *seq.tokens] == expected[0].tolist()
    short = Engine.load(str(folder), max_model_len=48)
    assert short.spec.context == 48
    wanted = SamplingParams(max_tokens=NEW, temperature=0.0)
    assert short.generate(PROMPTS, wanted) == engine.generate(PROMPTS, wanted)


def test_each_of_several_end_tokens_ends_a_completion(tmp_path: Path) -> None:
    free = Engine.load(str(write("llama", tmp_path / "a"))).generate(["ab"], SamplingParams(max_tokens=6))[0]
    end = free.tokens[3]
    folder = write("llama", tmp_path / "b", end_ids=[95, end])
    stopped = Engine.load(str(folder)).generate(["ab"], SamplingParams(max_tokens=6))[0]
    assert stopped.tokens == free.tokens[: free.tokens.index(end) + 1]
    assert stopped.finish_reason == "stop"


def test_a_suffix_is_refused_at_the_request_where_the_tokenizer_cannot_mark_it(tmp_path: Path) -> None:
    engine = Engine.load(str(write("qwen2", tmp_path)))
    with pytest.raises(UserError, match="no fill-in-the-middle tokens"):
        engine.prompts.infill("a", "b", 4)
    assert engine.generate(["a"], SamplingParams(max_tokens=2))[0].tokens


def test_a_long_prompt_keeps_the_token_that_begins_every_text(tmp_path: Path) -> None:
    engine = Engine.load(str(write("llama", tmp_path)))
    ids = engine.prompts.truncate(engine.prompts.encode_prompt("abcd" * 100), 28)
    assert (len(ids), ids[0]) == (100, 93)
    assert ids[1:] == engine.prompts.encode("abcd" * 100)[-99:]


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path: Path) -> None:
    folder = write("llama", tmp_path)
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens([f"<{number}>" for number in range(9)])
    made.save(str(folder / "tokenizer.json"))
    with pytest.raises(UserError, match="tokenizer: has 105 tokens and the model 96"):
        Engine.load(str(folder))


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_missing_extra_and_misshapen_tensors_are_named(tmp_path: Path, change: str) -> None:
    theirs = families.make("starcoder2")
    theirs.save_pretrained(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.c_fc.bias"
    if change == "missing":
        del tensors[name]
    elif change == "shape":
        tensors[name] = torch.zeros(5)
    else:
        name = "model.layers.1.mlp.c_extra.bias"
        tensors[name] = torch.zeros(5)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    expected = {"missing": f"no tensor {name}", "extra": name, "shape": "ffn.up_bias.* has shape .5."}
    with pytest.raises((UserError, CorruptCheckpoint), match=expected[change]):
        hf.load(tmp_path)


def test_an_export_keeps_the_tokenizer_and_the_end_tokens(tmp_path: Path) -> None:
    loaded = weights.read(write("mistral", tmp_path / "in", end_ids=[94, 95]))
    hf.save(tmp_path / "out", loaded.spec, loaded.weights, loaded.tokenizer_json)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()
    config = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"]) == ([94, 95], 93)
