"""Catalogue models count as the published tables do, for every kind of block."""

from dataclasses import replace

import pytest

from lakh import config
from lakh.errors import ConfigError, InfeasiblePlan, UserError
from lakh.planner.catalogue import DATA, load_model
from lakh.spec import Model
from lakh.spec.model import Experts, Latent


@pytest.mark.parametrize(
    ("name", "total_b", "active_b"),
    [
        ("llama3-405b", 405.9, 405.9),
        ("llama3-70b", 70.6, 70.6),
        ("gpt3-175b", 174.6, 174.6),
        ("gpt-1t", 1008.0, 1008.0),
        ("mixtral-8x7b", 46.7, 12.9),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235.1, 22.2),
        ("deepseek-v3", 671.0, 37.6),
    ],
)
def test_catalogue_models_have_their_published_sizes(name: str, total_b: float, active_b: float) -> None:
    model = load_model(name)
    assert model.parameters / 1e9 == pytest.approx(total_b, rel=0.005)
    assert model.active_parameters / 1e9 == pytest.approx(active_b, rel=0.02)  # papers round to two digits


def test_flops_of_published_tables() -> None:
    # Megatron-Bridge prints 51.5 GFLOP per token for Llama 3 8B at 8K, attention causal; with all of it 57.9.
    model = load_model("llama3-8b")
    assert (model.flops_per_token(8192)) / 1e9 == pytest.approx(51.5, abs=0.1)
    assert (model.flops_per_token(8192, causal=False)) / 1e9 == pytest.approx(57.9, abs=0.1)
    assert load_model("llama3-405b").flops_per_token(8192) / 1e9 == pytest.approx(2524.2, rel=0.01)


def test_every_catalogue_model_has_a_source() -> None:
    assert all(table["source"] for table in config.read_toml(DATA / "models.toml").values())


def test_an_unknown_model_is_answered_with_the_nearest_name(tmp_path) -> None:
    with pytest.raises(UserError, match="did you mean llama3-70b"):
        load_model("lama3-70b")
    file = tmp_path / "m.toml"
    file.write_text('layers=2\nwidth=64\nheads=5\nkv_heads=1\nffn=64\nvocab=100\nsource="me"\n')
    with pytest.raises(ConfigError, match="5 does not divide width 64"):
        load_model(str(file))


MIXTURE = Model(
    layers=61, width=7168, heads=128, kv_heads=128, head_size=128, ffn=18432, vocab=129280, tied=False, context=4096,
    experts=Experts(count=256, top_k=8, ffn=2048, shared=1, dense_layers=3, most_nodes=4, groups=8, top_groups=4,
                    weight_scale=2.5),
    latent=Latent(q_rank=1536, kv_rank=512, rope_dim=64), family="deepseek_v3",
)  # fmt: skip


def test_a_run_can_describe_a_catalogue_model() -> None:
    """DeepSeek-V3 as the model of a run equals the catalogue model."""
    assert replace(load_model("deepseek-v3"), context=4096) == MIXTURE
    # All tensors of the released checkpoint without its block for multi-token prediction.
    assert MIXTURE.parameters == 671_026_419_200
    MIXTURE.require_trainable()


def test_model_files_with_the_flat_keys_of_earlier_versions_are_read(tmp_path) -> None:
    file = tmp_path / "m.toml"
    file.write_text(
        "layers=61\nwidth=7168\nheads=128\nkv_heads=128\nhead_dim=128\nffn=18432\nvocab=129280\nexperts=256\ntop_k=8\n"
        "expert_ffn=2048\nshared_experts=1\ndense_layers=3\nrouted_nodes=4\nq_rank=1536\nkv_rank=512\nrope_dim=64\n"
        'window=0\nwindowed=0.0\nsource="me"\n'
    )
    expected = load_model("deepseek-v3")
    experts = Experts(count=256, top_k=8, ffn=2048, shared=1, dense_layers=3, most_nodes=4)
    assert load_model(str(file)) == replace(expected, family=None, experts=experts)
    file.write_text(file.read_text() + "layres=3\n")
    with pytest.raises(ConfigError, match="layres"):
        load_model(str(file))
    with pytest.raises(UserError, match="no such file"):
        load_model("nowhere.toml")


def test_latent_keys_with_uncompressed_queries() -> None:
    """DeepSeek-V2-Lite (arXiv 2405.04434, appendix B) compresses no queries: 15.7B parameters, 2.4B of them active."""
    lite = Model(
        layers=27, width=2048, heads=16, kv_heads=16, head_size=128, ffn=10944, vocab=102400, tied=False, context=4096,
        experts=Experts(count=64, top_k=6, ffn=1408, shared=2, dense_layers=1),
        latent=Latent(kv_rank=512, rope_dim=64),
    )  # fmt: skip
    assert lite.parameters / 1e9 == pytest.approx(15.7, abs=0.05)
    assert (lite.active_weights + 2 * lite.vocab * lite.width) / 1e9 == pytest.approx(2.66, abs=0.05)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"experts": Experts(count=8, top_k=2, ffn=64, bias=True)}, "model.experts.bias"),
        ({"latent": Latent(kv_rank=32, rope_dim=16)}, "model.latent"),
        ({"gated": False}, "model.gated"),
        ({"latent": Latent(kv_rank=32, rope_dim=16), "family": "qwen2"}, "model.latent"),
    ],
)
def test_the_trainer_refuses_models_that_are_only_planned(change: dict, where: str) -> None:
    from lakh.spec.parallel_check import check_parallelism
    from lakh.spec.run import Run

    assert Model().is_trainable
    model = Model(**change)
    assert not model.is_trainable
    with pytest.raises(InfeasiblePlan, match=f"{where}.*(planned|has no)"):
        check_parallelism(Run(name="mixed", model=model), 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_k": 9}, "9 of 8 experts"),
        ({"dense_layers": -1}, "-1 is negative"),
        ({"ffn": 0}, "0 is not positive"),
    ],
)
def test_impossible_mixtures_are_refused(change: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Experts(**{"count": 8, "top_k": 2, "ffn": 64, **change})


def test_gpt_oss_has_its_published_parameters_and_flops() -> None:
    """116.8 billion parameters, 5.1 active beside the embedding; NVIDIA counts 32.6 GFLOP per token at 4,096."""
    model = load_model("gpt-oss-120b")
    assert model.parameters / 1e9 == pytest.approx(116.8, rel=0.005)
    assert (model.active_parameters - model.vocab * model.width) / 1e9 == pytest.approx(5.1, rel=0.02)
    assert (model.flops_per_token(4096.0)) / 1e9 == pytest.approx(32.6, rel=0.01)
