"""Parameters, FLOPs and bytes of a model agree with published tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.errors import ConfigError
from lakh.spec import Model

LLAMA_3_8B = Model(
    layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, tied=False, context=8192, rope_base=5e5
)


def test_llama_3_8b_has_its_published_parameters() -> None:
    assert LLAMA_3_8B.parameters == 8_030_261_248  # sum over the tensors of the released checkpoint


def test_smollm2_135m_has_its_published_parameters() -> None:
    model = Model(layers=30, width=576, heads=9, kv_heads=3, ffn=1536, vocab=49152, tied=True, context=8192)
    assert model.parameters == 134_515_008
    assert model.kv_bytes_per_token() == 23_040


def test_flops_per_token_by_hand() -> None:
    model = Model(layers=24, width=2048, heads=16, kv_heads=8, ffn=5504, vocab=32064, context=16384)
    weights = 24 * (2 * 2048 * 2048 + 2 * 2048 * 1024 + 3 * 2048 * 5504) + 2048 * 32064
    assert model.flops_per_token(4096) == 6 * weights + 6 * 24 * 2048 * 4096
    assert model.flops_per_token(4096, causal=False) == 6 * weights + 12 * 24 * 2048 * 4096


def test_adamw_in_float32_needs_sixteen_bytes_per_parameter() -> None:
    assert LLAMA_3_8B.state_bytes() == 16 * LLAMA_3_8B.parameters


@given(tokens=st.integers(1, 10**6))
def test_recomputation_reduces_activation_memory(tokens: int) -> None:
    kept = LLAMA_3_8B.activation_bytes(tokens)
    assert LLAMA_3_8B.activation_bytes(tokens, recompute=True) < kept
    assert LLAMA_3_8B.activation_bytes(2 * tokens) == 2 * kept


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": 5}, "5 does not divide width 256; choose one of 1, 2, 4"),
        ({"kv_heads": 3}, "3 does not divide heads 4"),
        ({"layers": 0}, "0 is not positive"),
        ({"heads": 256, "kv_heads": 256}, "odd size 1"),
        ({"rope_base": 0.5}, "rope_base"),
    ],
)
def test_impossible_shapes_are_refused_with_a_choice(change: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Model(**{"width": 256, "heads": 4, "kv_heads": 2, **change})
