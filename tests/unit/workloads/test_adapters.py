"""Low-rank adapters: equal to PEFT, to the merged weights, and refused for another base."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.workloads import families

from lakh.errors import ConfigError, CorruptCheckpoint, InfeasiblePlan, UserError
from lakh.server.model import weights as model_weights
from lakh.server.model.inference import InferenceModel, SequenceChunk
from lakh.server.model.kv_cache import PagedCache
from lakh.spec import Adapter, Mesh, Run
from lakh.spec.model import Model
from lakh.spec.parallel_check import check_parallelism
from lakh.tokens.dataset.shards import CONTEXT
from lakh.trainer.optim.optimizer import build_optimizer, named_state
from lakh.workloads.code.adapters import add_adapters, fingerprint, merge, require_base
from lakh.workloads.code.batch import IGNORED
from lakh.workloads.code.data import to_batch
from lakh.workloads.code.formats import hf, peft
from lakh.workloads.code.model import CodeModel, init_weights

pytest.importorskip("transformers", reason="pip install transformers")

JOINED_CASES = {
    "phi3": ["qkv_proj", "gate_up_proj", "down_proj"],
    "glm4": ["q_proj", "gate_up_proj", "down_proj"],
    "gpt_bigcode": ["c_attn", "c_proj"],
    "gpt_bigcode with many heads of keys, exact GELU": ["c_attn", "c_proj"],
}
"""Whose files have several matrices in one tensor, and some of their names in PEFT."""
CASES = (
    *(
        "llama",
        "qwen2",
        "qwen3",
        "seed_oss",
        *JOINED_CASES,
        "starcoder2",
        "llama with biases",
        "stablelm",
        "granite",
        "olmo2",
        "gemma",
        "gemma2",
        "gemma3",
    ),
    *("mixtral", "qwen2_moe", "qwen3_moe", "minimax_m2", "deepseek_v3", "llama4", "glm4_moe", "gpt_oss"),
)
PEFT_TARGETS = {
    "deepseek_v3": ("q", "kv_b", "o"),
    **dict.fromkeys(("qwen2_moe", "llama4", "glm4_moe"), ("q", "k", "v", "o")),
}
"""PEFT leaves out the adapters of feed-forwards beside experts."""
SETTINGS = Adapter(rank=3, alpha=6.0)
SPEC = Model(layers=2, width=16, heads=2, kv_heads=1, ffn=24, vocab=32, context=32)


def adapted(spec: Model, weights: dict[str, torch.Tensor], settings: Adapter = SETTINGS) -> CodeModel:
    """The model with adapters that are not 0."""
    model = CodeModel(spec)
    model.load_state_dict(weights)
    add_adapters(model, settings, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                parameter.normal_(0, 0.1, generator=generator)
    return model


def adapters_of(model: CodeModel) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if ".lora_" in name}


def small_model() -> CodeModel:
    model = CodeModel(SPEC)
    init_weights(model, seed=1)
    return model


@pytest.mark.parametrize("case", CASES)
def test_adapters_compute_what_the_merged_weights_compute(case: str, tmp_path: Path) -> None:
    families.make(case).save_pretrained(tmp_path)
    spec, weights = hf.load(tmp_path)
    model = adapted(spec, weights)
    tokens = torch.randint(1, spec.vocab, (2, 20), generator=torch.Generator().manual_seed(1))
    plain, merged = CodeModel(spec), CodeModel(spec)
    plain.load_state_dict(weights)
    merged.load_state_dict(merge("test", weights, adapters_of(model), SETTINGS.scale))
    with torch.no_grad():
        expected = merged(tokens)
        assert (expected - plain(tokens)).abs().max() > 0.1  # the adapters matter
        assert (model(tokens) - expected).abs().max() < 1e-4  # float32 sums in another order


PEFT_CASES = [(case, False) for case in CASES if case not in (*JOINED_CASES, "mixtral")]


@pytest.mark.parametrize(("case", "rank_stabilized"), [*PEFT_CASES, ("llama", True)])
def test_losses_of_training_are_those_of_peft(case: str, rank_stabilized: bool, tmp_path: Path) -> None:
    theirs_package: Any = pytest.importorskip("peft", reason="pip install peft")
    base = families.make(case)
    base.save_pretrained(tmp_path / "base")
    spec, weights = hf.load(tmp_path / "base")
    settings = replace(SETTINGS, targets=PEFT_TARGETS.get(case, ()), rank_stabilized=rank_stabilized)
    model = adapted(spec, weights, settings)
    peft.save(tmp_path / "adapter", spec, adapters_of(model), settings, base=str(tmp_path / "base"))
    theirs = theirs_package.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    ours_sgd = torch.optim.SGD(trained, lr=0.05)
    theirs_sgd = torch.optim.SGD([p for p in theirs.parameters() if p.requires_grad], lr=0.05)
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        tokens = torch.randint(1, spec.vocab, (2, 24), generator=generator)
        ours_sgd.zero_grad()
        loss = model(tokens[:, :-1], targets_BT=tokens[:, 1:].contiguous())
        loss.backward()
        ours_sgd.step()
        theirs_sgd.zero_grad()
        expected = theirs(tokens, labels=tokens).loss
        expected.backward()
        theirs_sgd.step()
        assert float(loss) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(("case", "rank_stabilized"), [*((case, False) for case in JOINED_CASES), ("phi3", True)])
def test_an_adapter_of_a_tensor_that_holds_several_matrices_is_read(
    case: str, rank_stabilized: bool, tmp_path: Path
) -> None:
    """PEFT's adapter of Phi-3's qkv_proj is one for queries, keys and values each, with the same A."""
    theirs_package: Any = pytest.importorskip("peft", reason="pip install peft")
    base = families.make(case)
    base.save_pretrained(tmp_path / "base")
    base.name_or_path = str(tmp_path / "base")
    spec, weights = hf.load(tmp_path / "base")
    settings = theirs_package.LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=JOINED_CASES[case],
        init_lora_weights=False,
        use_rslora=rank_stabilized,
    )
    torch.manual_seed(4)
    theirs = theirs_package.get_peft_model(base, settings)
    theirs.save_pretrained(tmp_path / "adapter")
    adapters = peft.load(tmp_path / "adapter", spec)
    merged = CodeModel(spec)
    merged.load_state_dict(merge("test", weights, adapters, peft.read_config(tmp_path / "adapter").scale))
    tokens = torch.randint(1, spec.vocab, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (merged(tokens) - theirs(tokens).logits).abs().max() < 1e-4  # float32 sums in another order
    served = InferenceModel(spec, weights, spec.vocab, torch.device("cpu"), "f32")
    adapter, _ = served.read_adapter("one", str(tmp_path / "adapter"))
    cache = PagedCache(spec, 8, device=torch.device("cpu"), dtype=torch.float32)
    chunk = SequenceChunk(tokens[0].tolist(), 0, [0, 1], scored=20, adapter=adapter)
    with torch.no_grad():
        assert (served.forward([chunk], cache) - theirs(tokens).logits[0]).abs().max() < 1e-4


@pytest.mark.parametrize("case", JOINED_CASES)
def test_adapters_of_the_parts_of_a_tensor_are_one_of_peft(case: str, tmp_path: Path) -> None:
    theirs_package: Any = pytest.importorskip("peft", reason="pip install peft")
    base = families.make(case)
    base.save_pretrained(tmp_path / "base")
    spec, weights = hf.load(tmp_path / "base")
    whole, two = (6, ("gate", "up")) if case == "glm4" else (9, ("q", "v", "down"))
    settings_of: list[tuple[tuple[str, ...], int, bool]]
    settings_of = [((), whole, False), (two, 6, False), (("o",), 3, False), (two, 6, True)]
    for targets, rank, rank_stabilized in settings_of:
        settings = Adapter(rank=3, alpha=6.0, targets=targets, rank_stabilized=rank_stabilized)
        model, folder = adapted(spec, weights, settings), tmp_path / f"{len(targets)} {rank_stabilized}"
        peft.save(folder, spec, adapters_of(model), settings, base=str(tmp_path / "base"))
        config = peft.read_config(folder)
        assert (config.rank, config.scale) == (rank, pytest.approx(settings.scale, rel=1e-12))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of a matrix that is named as one with an adapter, and has none
            theirs = theirs_package.PeftModel.from_pretrained(families.make(case), folder)
        merged = CodeModel(spec)
        merged.load_state_dict(merge("test", weights, peft.load(folder, spec), config.scale))
        tokens = torch.randint(1, spec.vocab, (2, 20), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            expected = model(tokens)
            assert (theirs(tokens).logits - expected).abs().max() < 1e-4  # float32 sums in another order
            assert (merged(tokens) - expected).abs().max() < 1e-4


def test_adapters_of_peft_are_read_back(tmp_path: Path) -> None:
    model = small_model()
    add_adapters(model, Adapter(rank=2, targets=("q", "v")), seed=1)
    saved = adapters_of(model)
    assert {name.split(".")[-2] for name in saved} == {"q", "v"}
    peft.save(tmp_path, SPEC, saved, Adapter(rank=2, alpha=8.0, base_sha256="abc"), base="base")
    config = peft.read_config(tmp_path)
    assert (config.base, config.rank, config.scale, config.base_sha256) == ("base", 2, 4.0, "abc")
    found = peft.load(tmp_path, SPEC)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)


def test_only_adapters_are_trained_and_saved() -> None:
    model = small_model()
    add_adapters(model, SETTINGS, seed=1)
    optimizer = build_optimizer(model, Run(name="a").optim)
    tokens = torch.randint(1, SPEC.vocab, (2, 9), generator=torch.Generator().manual_seed(1))
    model(tokens[:, :-1], targets_BT=tokens[:, 1:].contiguous()).backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == set(adapters_of(model))
    names = {name for name in named_state(model, optimizer) if name.startswith("model.")}
    assert names == {f"model.{name}" for name in adapters_of(model)}


def test_a_new_adapter_changes_nothing_and_is_random_by_the_seed() -> None:
    plain, first, again, other = (small_model() for _ in range(4))
    for model, seed in ((first, 1), (again, 1), (other, 2)):
        add_adapters(model, SETTINGS, seed)
    tokens = torch.arange(1, 9)[None]
    assert torch.equal(first(tokens), plain(tokens))
    name = "blocks.1.ffn.up.lora_a"
    assert torch.equal(adapters_of(first)[name], adapters_of(again)[name])
    assert not torch.equal(adapters_of(first)[name], adapters_of(other)[name])


def test_a_compiled_block_with_adapters_is_one_graph() -> None:
    model = small_model()
    add_adapters(model, SETTINGS, seed=1)
    tokens = torch.arange(1, 9)[None]
    expected = model(tokens)
    explained = torch._dynamo.explain(model)(tokens)
    assert explained.graph_break_count == 0
    torch._dynamo.reset()
    assert torch.isfinite(expected).all()


def test_another_base_is_refused() -> None:
    weights = small_model().state_dict()
    require_base("here", "base", weights, fingerprint(weights))
    half = {name: tensor.bfloat16() for name, tensor in weights.items()}
    widened = {name: tensor.float() for name, tensor in half.items()}
    assert fingerprint(half) == fingerprint(widened)  # of the values, not of their type
    other = {**weights, "blocks.0.ffn.up.weight": weights["blocks.0.ffn.up.weight"] + 1e-3}
    with pytest.raises(UserError, match="not those that the adapter was trained on"):
        require_base("here", "base", other, fingerprint(weights))


def test_adapters_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = small_model()
    add_adapters(model, SETTINGS, seed=1)
    weights = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
    wrong = {"blocks.0.ffn.up.lora_a": torch.ones(2, 5), "blocks.0.ffn.up.lora_b": torch.ones(24, 2)}
    with pytest.raises(CorruptCheckpoint, match=r"blocks\.0\.ffn\.up does not fit"):
        merge("here", weights, wrong, 1.0)
    peft.save(tmp_path, SPEC, adapters_of(model), SETTINGS, base="base")
    shapes = {"lora_a": (3, 16), "lora_b": (16, 3)}
    deeper = {
        f"blocks.{layer}.attention.q.{kind}": torch.ones(shape) for layer in range(3) for kind, shape in shapes.items()
    }
    peft.save(tmp_path / "deep", Model(**{**_fields(SPEC), "layers": 3}), deeper, SETTINGS, base="base")
    with pytest.raises(UserError, match="no adapter of a matrix of the base"):
        peft.load(tmp_path / "deep", SPEC)
    config = json.loads((tmp_path / peft.CONFIG).read_text())
    (tmp_path / peft.CONFIG).write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(UserError, match="use_dora is True"):
        peft.read_config(tmp_path)
    (tmp_path / peft.CONFIG).write_text('{"r": "3"}')
    with pytest.raises(CorruptCheckpoint, match="not the configuration"):
        peft.read_config(tmp_path)
    changes: dict[str, Any]
    for changes in (
        {"init_lora_weights": "pissa_niter_4"},
        {"alora_invocation_tokens": [1]},
        {"layer_replication": [[0, 1]]},
        {"use_a_later_idea": True},
        {"use_rslora": "often"},
        {"later_config": {"rank": 2}},
    ):
        (tmp_path / peft.CONFIG).write_text(json.dumps({**config, **changes}))
        with pytest.raises(UserError, match=f"{next(iter(changes))} is"):
            peft.read_config(tmp_path)
    name = next(name for name in adapters_of(model) if name.endswith(".lora_a"))
    with pytest.raises(CorruptCheckpoint, match="does not fit"):
        merge("here", weights, {key: tensor for key, tensor in adapters_of(model).items() if key != name}, 1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"r": 0}, r"\(r is 0"),
        ({"r": 8}, r"lora_A\.weight is float32 of shape \[3, \d+\], and the rank is 8"),
        ({"lora_alpha": float("nan")}, r"lora_alpha is nan"),
        ({"lora_alpha": float("inf")}, r"lora_alpha is inf"),
    ],
)
def test_an_adapter_of_another_rank_or_factor_than_it_says_is_refused(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model = small_model()
    add_adapters(model, SETTINGS, seed=1)
    peft.save(tmp_path, SPEC, adapters_of(model), SETTINGS, base="base")
    config = json.loads((tmp_path / peft.CONFIG).read_text())
    (tmp_path / peft.CONFIG).write_text(json.dumps({**config, "a_later_number": 16, "a_later_option": None, **change}))
    with pytest.raises(CorruptCheckpoint, match=words):
        peft.load(tmp_path, SPEC)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda tensor: tensor * float("nan"), "NaN or infinite"),
        (lambda tensor: tensor.flatten(), r"of shape \[\d+\], and the rank is 3"),
        (lambda tensor: tensor.sum(), r"of shape \[\], and the rank is 3"),
        (lambda tensor: tensor.to(torch.int8), "is int8 of shape"),
        (None, "holds no adapter"),
    ],
)
def test_damaged_adapters_are_refused(damage: Any, words: str, tmp_path: Path) -> None:
    model = small_model()
    add_adapters(model, SETTINGS, seed=1)
    peft.save(tmp_path, SPEC, adapters_of(model), SETTINGS, base="base")
    tensors = peft.safetensors.torch.load_file(tmp_path / peft.WEIGHTS)
    damaged = {} if damage is None else {name: damage(tensor).contiguous() for name, tensor in tensors.items()}
    peft.safetensors.torch.save_file(damaged, tmp_path / peft.WEIGHTS)
    with pytest.raises(CorruptCheckpoint, match=words):
        peft.load(tmp_path, SPEC)


@pytest.mark.parametrize(("base", "words"), [("Org/Model", "is not on this machine"), (".", "is the adapter itself")])
def test_an_adapter_whose_base_is_elsewhere_says_how_to_give_it(
    base: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model()
    add_adapters(model, SETTINGS, seed=1)
    peft.save(tmp_path, SPEC, adapters_of(model), SETTINGS, base=base)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"{words}.*base_model_name_or_path.*lakh serve BASE --adapter NAME="):
        model_weights.read(tmp_path)


def _fields(spec: Model) -> dict[str, Any]:
    names = ("layers", "width", "heads", "kv_heads", "ffn", "vocab", "context")
    return {name: getattr(spec, name) for name in names}


def test_wrong_settings_of_adapters_are_refused() -> None:
    with pytest.raises(UserError, match="'gates' is no matrix"):
        add_adapters(small_model(), Adapter(rank=2, targets=("gates",)), seed=1)
    with pytest.raises(ConfigError, match="need a base model"):
        Run(name="a", adapter=SETTINGS)
    run = Run(name="a", init_from="base", adapter=SETTINGS, mesh=Mesh(tp=2))
    with pytest.raises(InfeasiblePlan, match="tp is 2"):
        check_parallelism(run, 2)
    full, low = Run(name="a").memory_bytes(1), Run(name="a", init_from="b", adapter=SETTINGS).memory_bytes(1)
    assert low["states"] < 0.5 * full["states"]


def test_tokens_marked_as_context_are_read_and_not_predicted() -> None:
    tokens = np.array([[5 | CONTEXT, 6 | CONTEXT, 7, 8, 9 | CONTEXT]], np.int32)
    batch = to_batch(tokens, np.array([5], np.int32), None, torch.device("cpu"))
    assert batch.inputs.tolist() == [[5, 6, 7, 8]]
    assert batch.targets.tolist() == [[IGNORED, 7, 8, IGNORED]]
    assert batch.weight == 1 / 4


def test_an_adapted_feed_forward_has_the_gradients_of_plain_products() -> None:
    """The operation of a GPU, in the plain form that it is compared with."""
    from lakh.workloads.code.kernels.low_rank import AdaptedMatrix, low_rank_feed_forward

    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.3

    w1, w2, grad = normal(44, 12), normal(12, 22), normal(9, 12)
    shapes = ((9, 12), (3, 12), (22, 3), (3, 12), (22, 3), (3, 22), (12, 3))
    inputs = [normal(*shape).requires_grad_() for shape in shapes]
    x, a_gate, b_gate, a_up, b_up, a2, b2 = inputs
    gate, up = x @ (w1[:22] + 0.5 * b_gate @ a_gate).mT, x @ (w1[22:] + 0.5 * b_up @ a_up).mT
    expected = (torch.nn.functional.silu(gate) * up) @ (w2 + 2 * b2 @ a2).mT
    gate_up = AdaptedMatrix(w1, [a_gate, a_up], [b_gate, b_up], [0, 22], 0.5)
    found = low_rank_feed_forward(x, gate_up, AdaptedMatrix(w2, [a2], [b2], [0], 2.0))
    assert torch.allclose(found, expected, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(y, inputs, grad) for y in (found, expected)), strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_halves_of_a_block_have_the_gradients_of_plain_products() -> None:
    """The operations of a GPU, in the plain form that they are compared with."""
    from lakh.workloads.code.kernels.low_rank import AdaptedMatrix
    from lakh.workloads.code.kernels.low_rank_block import (
        low_rank_linear_norm_feed_forward,
        low_rank_norm_linear,
        widened,
    )

    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.3

    def matrix(base: torch.Tensor, *sizes: int) -> tuple[AdaptedMatrix, list[torch.Tensor], torch.Tensor]:
        """With an update of each part; the updates; and the sum of base and updates."""
        a = [normal(3, base.shape[1]).requires_grad_() for _ in sizes]
        b = [normal(size, 3).requires_grad_() for size in sizes]
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        wide = widened(base, 3 * len(sizes))
        whole = base + torch.cat([0.5 * left @ right for left, right in zip(b, a, strict=True)])
        return AdaptedMatrix(wide[: len(base), : base.shape[1]], a, b, starts, 0.5, None, wide), [*a, *b], whole

    def norm_of(total: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(total, (12,), norm, 1e-5)

    norm = normal(12)
    x, y, delta = (normal(*shape).requires_grad_() for shape in ((9, 12), (9, 8), (9, 12)))
    qkv, trained, whole = matrix(normal(20, 12), 12, 4, 4)
    inputs = [x, delta, *trained]
    found = low_rank_norm_linear(x, delta, norm, 1e-5, qkv)
    expected = (x + delta, norm_of(x + delta) @ whole.mT)
    check = [(found, expected, inputs, [normal(9, 12), normal(9, 20)])]

    matrices = [matrix(normal(12, 8), 12), matrix(normal(44, 12), 22, 22), matrix(normal(12, 22), 12)]
    (output, *_), (gate_up, *_), (down, *_) = matrices
    inputs = [x, y, *(one for _, trained, _ in matrices for one in trained)]
    found = low_rank_linear_norm_feed_forward(y, output, x, norm, 1e-5, gate_up, down)
    total = x + y @ matrices[0][2].mT
    gate, up = (norm_of(total) @ matrices[1][2].mT).chunk(2, dim=-1)
    expected = (total, (torch.nn.functional.silu(gate) * up) @ matrices[2][2].mT)
    check.append((found, expected, inputs, [normal(9, 12), normal(9, 12)]))
    for found, expected, inputs, grads in check:
        grad_found, grad_expected = (torch.autograd.grad(z, inputs, grads) for z in (found, expected))
        for a, b in zip((*found, *grad_found), (*expected, *grad_expected), strict=True):
            assert torch.allclose(a, b, atol=1e-12)
