"""Every architecture computes what transformers computes: logits, greedy tokens, packed documents, training steps."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.unit.workloads import families

from lakh.errors import ConfigError, UserError
from lakh.server.model.inference import InferenceModel, SequenceChunk
from lakh.server.model.kv_cache import PagedCache
from lakh.spec import Data, Run
from lakh.spec.model import Model
from lakh.workloads.code.architectures import parameters
from lakh.workloads.code.attention import Documents
from lakh.workloads.code.formats import hf
from lakh.workloads.code.model import CodeModel

pytest.importorskip("transformers", reason="pip install transformers")

LENGTH = 40  # past the windows
TOLERANCE = 1e-4  # float32 sums in another order


class Pair:
    """A model of transformers, and lakh's of the same weights."""

    def __init__(self, case: str, folder: Path) -> None:
        self.theirs = families.make(case)
        self.theirs.save_pretrained(folder, max_shard_size="30KB")
        self.spec, self.weights = hf.load(folder)
        self.trained = CodeModel(self.spec).eval()
        self.trained.load_state_dict(self.weights)
        self.served = InferenceModel(self.spec, self.weights, self.spec.vocab, torch.device("cpu"), "f32")

    def cache(self) -> PagedCache:
        return PagedCache(self.spec, 8, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module", params=list(families.CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp("model"))


def tokens_of(spec: Model, num: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, spec.vocab, (num, LENGTH), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_logits_of_training_and_serving_are_those_of_transformers(pair: Pair) -> None:
    tokens = tokens_of(pair.spec)
    expected = pair.theirs(tokens).logits
    assert expected.std() > 0.3  # the weights matter
    assert (pair.trained(tokens) - expected).abs().max() < TOLERANCE
    served = pair.served.forward([SequenceChunk(tokens[0].tolist(), 0, [2, 0, 1, 3], scored=LENGTH)], pair.cache())
    assert (served - expected[0]).abs().max() < TOLERANCE


@torch.no_grad()
def test_a_prompt_in_chunks_beside_another_sequence_scores_the_same(pair: Pair) -> None:
    first, second = tokens_of(pair.spec, num=2).tolist()
    expected = pair.theirs(torch.tensor([first, second])).logits
    cache, found = pair.cache(), []
    for start, end in ((0, 3), (3, 20), (20, 22), (22, 23), (23, LENGTH)):  # the CPU kernel takes chunks of up to 4
        chunks = [
            SequenceChunk(first[start:end], start, [0, 1, 2, 3], scored=end - start),
            SequenceChunk(second[start:end], start, [4, 5, 6, 7], scored=0),
        ]
        found.append(pair.served.forward(chunks, cache))
    last = pair.served.forward([SequenceChunk(second[-1:], LENGTH - 1, [4, 5, 6, 7])], cache)
    assert (torch.cat(found) - expected[0]).abs().max() < TOLERANCE
    assert (last - expected[1, -1]).abs().max() < TOLERANCE


@torch.no_grad()
def test_greedy_tokens_with_and_without_a_cache_are_those_of_transformers(pair: Pair) -> None:
    prompt = tokens_of(pair.spec)[:, :9]
    expected = pair.theirs.generate(prompt, max_new_tokens=24, do_sample=False)[0].tolist()
    whole = prompt
    while whole.shape[1] < len(expected):
        whole = torch.cat((whole, pair.trained(whole)[:, -1:].argmax(dim=-1)), dim=1)
    assert whole[0].tolist() == expected
    cache, ids, start = pair.cache(), prompt[0].tolist(), 0
    while len(ids) < len(expected):
        logits = pair.served.forward([SequenceChunk(ids[start:], start, [0, 1, 2, 3])], cache)
        start = len(ids)
        ids.append(int(logits.argmax()))
    assert ids == expected


@torch.no_grad()
def test_packed_documents_score_as_alone(pair: Pair) -> None:
    tokens, starts = tokens_of(pair.spec), [0, 5, 6, 24, LENGTH]
    positions = torch.cat([torch.arange(end - start) for start, end in itertools.pairwise(starts)])[None]
    documents = Documents.padded(torch.tensor(starts, dtype=torch.int32), 18, LENGTH)
    packed = pair.trained(tokens, positions, documents=documents)
    for start, end in itertools.pairwise(starts):
        expected = pair.theirs(tokens[:, start:end]).logits
        assert (packed[:, start:end] - expected).abs().max() < TOLERANCE


def test_losses_of_training_are_those_of_transformers(pair: Pair, tmp_path: Path) -> None:
    ours, theirs = CodeModel(pair.spec), type(pair.theirs)(pair.theirs.config)
    ours.load_state_dict(pair.weights)
    theirs.load_state_dict(pair.theirs.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (ours, theirs)]
    for step in range(5):
        tokens = tokens_of(pair.spec, num=2, seed=step)
        losses = [
            ours(tokens[:, :-1], targets_BT=tokens[:, 1:]),
            theirs(tokens, labels=tokens).loss,
        ]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-5)


def test_parameters_are_those_that_the_spec_counts(pair: Pair) -> None:
    assert sum(tensor.numel() for tensor in pair.weights.values()) == pair.spec.parameters
    assert {name: tuple(tensor.shape) for name, tensor in pair.trained.state_dict().items()} == hf.shapes(pair.spec)
    assert set(parameters(pair.spec)) == set(pair.weights)


@torch.no_grad()
def test_an_export_loads_in_transformers_and_in_lakh(pair: Pair, tmp_path: Path) -> None:
    import transformers

    by_name = dict(sorted(pair.weights.items()))  # the order in which a checkpoint gives them
    hf.save(tmp_path, pair.spec, by_name, None, shard_bytes=20_000)
    spec, weights = hf.load(tmp_path)
    assert spec == pair.spec
    assert all(torch.equal(weights[name], tensor) for name, tensor in pair.weights.items())
    again: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    again.config._attn_implementation = "eager"
    tokens = tokens_of(pair.spec)
    assert type(again) is type(pair.theirs) or spec.family_name == "llama"
    assert (again(tokens).logits - pair.theirs(tokens).logits).abs().max() < TOLERANCE


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in the checkpoints of DeepSeek-V3, whose layer 61 of 61 is one."""
    families.make("deepseek_v3").save_pretrained(tmp_path)
    spec, weights = hf.load(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    last = {name: tensor for name, tensor in tensors.items() if "layers.3." in name}
    more = {name.replace("layers.3.", "layers.4."): tensor.clone() for name, tensor in last.items()}
    safetensors.torch.save_file({**tensors, **more, "model.layers.4.eh_proj.weight": torch.ones(2, 2)}, path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    same_spec, same = hf.load(tmp_path)
    assert same_spec == spec
    assert same.keys() == weights.keys()
    assert all(torch.equal(same[name], tensor) for name, tensor in weights.items())
    assert f"left out {len(more) + 1} tensors of layers that predict further tokens" in caplog.text


@torch.no_grad()
def test_a_whole_context_of_learned_positions_scores_as_in_transformers(tmp_path: Path) -> None:
    pair = Pair("gpt_bigcode", tmp_path)
    tokens = torch.randint(1, pair.spec.vocab, (1, pair.spec.context), generator=torch.Generator().manual_seed(1))
    expected = pair.theirs(tokens).logits
    assert (pair.trained(tokens) - expected).abs().max() < TOLERANCE
    chunk = SequenceChunk(tokens[0].tolist(), 0, list(range(8)), scored=pair.spec.context)
    assert (pair.served.forward([chunk], pair.cache()) - expected[0]).abs().max() < TOLERANCE
    with pytest.raises(ConfigError, match=r"data.sequence: 129 is longer than model.context 128"):
        Run(name="long", model=pair.spec, data=Data(sequence=129, batch=1, micro_batch=1))


def test_causal_masks_of_old_checkpoints_are_left_out(tmp_path: Path) -> None:
    families.make("gpt_bigcode").save_pretrained(tmp_path)
    spec, weights = hf.load(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors, mask = safetensors.torch.load_file(path), torch.ones(128, 128, dtype=torch.bool).tril()
    masks = {"transformer.bias": mask, "transformer.h.0.attn.bias": mask, "transformer.h.0.attn.masked_bias": mask[0]}
    safetensors.torch.save_file({**tensors, **{name: one.float() for name, one in masks.items()}}, path)
    same_spec, same = hf.load(tmp_path)
    assert same_spec == spec
    assert all(torch.equal(same[name], tensor) for name, tensor in weights.items())
    safetensors.torch.save_file({**tensors, "transformer.h.0.crossattention.bias": mask.float()}, path)
    with pytest.raises(UserError, match=r"unknown tensor transformer\.h\.0\.crossattention\.bias"):
        hf.load(tmp_path)


@pytest.mark.parametrize("case", ["llama", "qwen2 with late windows", "gemma2"])
def test_a_block_compiles_without_a_graph_break(case: str, tmp_path: Path) -> None:
    torch._dynamo.reset()  # what other tests compiled counts towards its limit
    model = Pair(case, tmp_path).trained
    compiled = [torch.compile(block, fullgraph=True, backend="eager") for block in model.each_block()]
    tokens = tokens_of(model.spec)
    expected = model(tokens)
    model.blocks = torch.nn.ModuleDict()
    model.each_block = lambda: compiled  # type: ignore[method-assign]
    assert torch.allclose(model(tokens), expected, atol=TOLERANCE)
