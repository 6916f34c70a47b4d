"""A shape counts as the published tables do, for every kind of block."""

import pytest

from lakh.errors import ConfigError, UserError
from lakh.planner.catalogue import architecture, names
from lakh.planner.shape import shape_of
from lakh.spec import Model


def test_a_dense_shape_counts_like_the_model_that_is_trained() -> None:
    model = Model(layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, tied=False, context=8192)
    shape = shape_of(model)
    assert shape.parameters == model.parameters == 8_030_261_248
    assert shape.flops_per_token(8192) == model.flops_per_token(8192)
    assert shape.flops_per_token(8192, causal=False) == model.flops_per_token(8192, causal=False)


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
    shape = architecture(name).shape
    assert float(shape.parameters) / 1e9 == pytest.approx(total_b, rel=0.005)
    assert float(shape.active_parameters) / 1e9 == pytest.approx(active_b, rel=0.02)  # papers round to two digits


def test_flops_of_published_tables() -> None:
    # Megatron-Bridge prints 51.5 GFLOP per token for Llama 3 8B at 8K, attention causal; with all of it 57.9.
    shape = architecture("llama3-8b").shape
    assert float(shape.flops_per_token(8192)) / 1e9 == pytest.approx(51.5, abs=0.1)
    assert float(shape.flops_per_token(8192, causal=False)) / 1e9 == pytest.approx(57.9, abs=0.1)
    assert float(architecture("llama3-405b").shape.flops_per_token(8192)) / 1e9 == pytest.approx(2524.2, rel=0.01)


def test_every_catalogue_model_has_a_source() -> None:
    assert all(architecture(name).source for name in names())


def test_a_model_nobody_knows_is_answered_with_the_nearest_name(tmp_path) -> None:
    with pytest.raises(UserError, match="did you mean llama3-70b"):
        architecture("lama3-70b")
    file = tmp_path / "m.toml"
    file.write_text('layers=2\nwidth=64\nheads=5\nkv_heads=1\nffn=64\nvocab=100\nsource="me"\n')
    with pytest.raises(ConfigError, match="5 does not divide width 64"):
        architecture(str(file))
