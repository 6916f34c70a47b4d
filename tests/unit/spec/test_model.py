"""Parameters, FLOPs and bytes of a model agree with published tables."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.errors import ConfigError, InfeasiblePlan
from lakh.spec import Model
from lakh.spec.model import Experts, Latent, RopeScaling, SlidingWindow

LLAMA_3_8B = Model(
    layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, tied=False, context=8192, rope_base=5e5
)

BIGCODE = {"family": "gpt_bigcode", "gated": False, "kv_heads": 1}


def test_a_chunk_is_a_triangle_and_a_window_a_band() -> None:
    sizes = {"layers": 4, "sliding_window": SlidingWindow(tokens=100, share=0.5)}
    chunked = Model(**sizes, family="llama4", experts=Experts(count=4, top_k=1, ffn=32, shared=1, normalize=False))
    assert Model(**sizes).attended_tokens(1000) == (1000 + 200) / 2
    assert chunked.attended_tokens(1000) == (1000 + 100) / 2
    assert chunked.attended_tokens(80) == 80


def test_llama_3_8b_has_its_published_parameters() -> None:
    assert LLAMA_3_8B.parameters == 8_030_261_248  # sum over the tensors of the released checkpoint


def test_smollm2_135m_has_its_published_parameters() -> None:
    model = Model(layers=30, width=576, heads=9, kv_heads=3, ffn=1536, vocab=49152, tied=True, context=8192)
    assert model.parameters == 134_515_008
    assert model.kv_bytes_per_token() == 23_040


@pytest.mark.parametrize(
    ("settings", "published"),
    [  # sums over the tensors of the released checkpoints
        ({"family": "mistral", "layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 32000,
          "tied": False, "sliding_window": SlidingWindow(tokens=4096)}, 7_241_732_096),
        ({"family": "qwen2", "layers": 24, "width": 896, "heads": 14, "kv_heads": 2, "ffn": 4864, "vocab": 151936},
         494_032_768),
        ({"family": "seed_oss", "layers": 64, "width": 5120, "heads": 80, "kv_heads": 8, "head_size": 128, "ffn": 27648,
          "vocab": 155136, "tied": False}, 36_151_104_512),
        ({"family": "phi3", "layers": 32, "width": 3072, "heads": 32, "kv_heads": 32, "ffn": 8192, "vocab": 32064,
          "tied": False}, 3_821_079_552),
        ({"family": "phi3", "layers": 40, "width": 5120, "heads": 40, "kv_heads": 10, "ffn": 17920, "vocab": 100352,
          "tied": False}, 14_659_507_200),
        ({"family": "smollm3", "layers": 36, "width": 2048, "heads": 16, "kv_heads": 4, "ffn": 11008, "vocab": 128256,
          "unrotated_interval": 4}, 3_075_098_624),
        ({"family": "starcoder2", "layers": 30, "width": 3072, "heads": 24, "kv_heads": 2, "ffn": 12288,
          "vocab": 49152, "gated": False}, 3_030_371_328),
        # StarCoderBase 15B and SantaCoder
        ({"family": "gpt_bigcode", "layers": 40, "width": 6144, "heads": 48, "kv_heads": 1, "ffn": 24576,
          "vocab": 49152, "context": 8192, "gated": False, "exact_gelu": True}, 15_517_456_384),
        ({"family": "gpt_bigcode", "layers": 24, "width": 2048, "heads": 16, "kv_heads": 1, "ffn": 8192,
          "vocab": 49280, "context": 2048, "gated": False}, 1_124_886_528),
        # Stable Code 3B
        ({"family": "stablelm", "layers": 32, "width": 2560, "heads": 32, "kv_heads": 32, "ffn": 6912, "vocab": 50304,
          "tied": False, "rotary_size": 20}, 2_795_443_200),
        # StableLM 2 12B, as transformers counts it
        ({"family": "stablelm", "layers": 40, "width": 5120, "heads": 32, "kv_heads": 8, "ffn": 13824, "vocab": 100352,
          "tied": False, "rotary_size": 40, "qk_norm": True, "parallel_residual": True}, 12_143_185_920),
        ({"family": "granite", "layers": 40, "width": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 49155,
          "embedding_scale": 12.0, "score_scale": 0.015625, "residual_scale": 0.22, "logit_divisor": 8.0},
         2_533_531_648),
        ({"family": "olmo2", "layers": 32, "width": 4096, "heads": 32, "kv_heads": 32, "ffn": 11008, "vocab": 100352,
          "tied": False, "qk_norm": True}, 7_298_617_344),
        ({"family": "gemma", "layers": 18, "width": 2048, "heads": 8, "kv_heads": 1, "head_size": 256, "ffn": 16384,
          "vocab": 256000}, 2_506_172_416),
        ({"family": "gemma2", "layers": 26, "width": 2304, "heads": 8, "kv_heads": 4, "head_size": 256, "ffn": 9216,
          "vocab": 256000}, 2_614_341_888),
        ({"family": "gemma3", "layers": 26, "width": 1152, "heads": 4, "kv_heads": 1, "head_size": 256, "ffn": 6912,
          "vocab": 262144, "qk_norm": True}, 999_885_952),
        ({"family": "qwen3", "layers": 28, "width": 1024, "heads": 16, "kv_heads": 8, "head_size": 128, "ffn": 3072,
          "vocab": 151936, "qk_norm": True}, 596_049_920),
        # Qwen1.5-MoE-A2.7B
        ({"family": "qwen2_moe", "layers": 24, "width": 2048, "heads": 16, "kv_heads": 16, "ffn": 5632,
          "vocab": 151936, "tied": False, "experts": Experts(count=60, top_k=4, ffn=1408, shared=4)}, 14_315_784_192),
        ({"family": "minimax_m2", "layers": 62, "width": 3072, "heads": 48, "kv_heads": 8, "head_size": 128,
          "ffn": 1536, "vocab": 200064, "tied": False, "qk_norm": True, "rotary_size": 64,
          "experts": Experts(count=256, top_k=8, ffn=1536)}, 228_689_764_864),
        # GLM-4.5-Air, without its layer that predicts further tokens
        ({"family": "glm4_moe", "layers": 46, "width": 4096, "heads": 96, "kv_heads": 8, "head_size": 128, "ffn": 10944,
          "vocab": 151552, "tied": False, "rotary_size": 64,
          "experts": Experts(count=128, top_k=8, ffn=1408, shared=1, dense_layers=1)}, 106_852_251_264),
    ],
)  # fmt: skip
def test_each_family_has_its_published_parameters(settings: dict[str, Any], published: int) -> None:
    model = Model(**settings)
    assert model.parameters == published
    model.require_trainable()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sliding_window": SlidingWindow(tokens=128)}, "sliding_window.*llama has no.*mistral"),
        ({"logit_softcap": 30.0, "family": "qwen2"}, "logit_softcap.*qwen2 has no.*gemma2"),
        ({"rotary_size": 16}, "rotary_size.*llama has no positions in a part of a head.*phi3 or stablelm"),
        ({"family": "phi3", "rope_scaling": RopeScaling(kind="linear", factor=2.0)}, "rope_scaling.*phi3 has longrope"),
        (
            {"query_growth": 0.1, "rope_scaling": RopeScaling(kind="yarn", factor=2.0, original_context=64)},
            "query_growth.*llama has no factor of queries that grows with the position.*ministral3",
        ),
        ({"residual_scale": 0.5}, "residual_scale.*llama has no factor of what a block adds.*granite"),
        ({"local_rope_base": 1e4}, "local_rope_base.*llama has no base of positions of its own.*olmo3 or gemma3"),
        ({"qk_norm": True, "family": "mistral"}, "qk_norm.*mistral needs false"),
        ({"family": "starcoder2"}, "gated.*starcoder2 needs false"),
        ({"family": "mistral", "mlp_bias": True}, "mlp_bias.*is true, and mistral needs false"),
        (
            {"family": "starcoder2", "gated": False, "exact_gelu": True},
            "exact_gelu.*is true, and starcoder2 needs false",
        ),
        ({**BIGCODE, "kv_heads": 2}, "kv_heads.*is 2: gpt_bigcode has one head of keys and values, or as many"),
        ({**BIGCODE, "rope_base": 5e5}, "rope_base.*gpt_bigcode has a learned embedding of each position; remove it"),
        ({**BIGCODE, "head_size": 32}, "head_size.*gives heads of 32: gpt_bigcode has heads of width / heads"),
        ({**BIGCODE, "rope_scaling": RopeScaling(kind="linear", factor=2.0)}, "rope_scaling.*gpt_bigcode has unscaled"),
        ({"family": "stablelm", "head_size": 32}, "head_size.*gives heads of 32: stablelm has heads of width / heads"),
        ({"latent": Latent(kv_rank=32, rope_dim=16)}, "latent.*llama has no.*deepseek_v2 or deepseek_v3"),
        (
            {"family": "minimax_m2", "qk_norm": True, "experts": Experts(count=8, top_k=2, ffn=32, shared=1)},
            "experts.shared.*not trained by minimax_m2",
        ),
        (
            {"family": "llama4", "experts": Experts(count=8, top_k=1, ffn=32, shared=2, normalize=False)},
            "experts.shared.*is 2, and llama4 needs 1; set it to 1",
        ),
        ({"experts": Experts(count=8, top_k=2, ffn=32, groups=2)}, "experts.groups.*not trained by mixtral"),
        ({"experts": Experts(count=8, top_k=2, ffn=32, interval=2)}, "experts.interval.*not trained by mixtral"),
        ({"family": "qwen2_moe", "experts": Experts(count=8, top_k=2, ffn=32)}, "shared.*is 0: qwen2_moe has shared"),
    ],
)
def test_combinations_that_no_family_computes_are_refused(settings: dict[str, Any], words: str) -> None:
    model = Model(**settings)
    assert model.parameters > 0  # planned all the same
    assert not model.is_trainable
    with pytest.raises(InfeasiblePlan, match=words):
        model.require_trainable()


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"mamba.*llama, mistral"):
        Model(family="mamba")


@pytest.mark.parametrize(
    ("share", "first", "windows"),
    [(1.0, None, "111111"), (0.5, None, "101010"), (5 / 6, None, "111110"), (1.0, 2, "001111"), (0.5, 1, "010101")],
)
def test_a_share_of_the_layers_has_a_window(share: float, first: int | None, windows: str) -> None:
    window = SlidingWindow(tokens=128, share=share, first_layer=first)
    assert "".join(str(int(window.covers(layer))) for layer in range(6)) == windows


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


def test_blocks_without_experts_are_counted_and_checked() -> None:
    experts = Experts(count=4, top_k=1, ffn=8, interval=2, dense_layers=3, dense_blocks=(5, 6, 2))
    model = Model(layers=12, experts=experts)
    assert [layer for layer in range(12) if experts.are_in(layer)] == [3, 7, 9, 11]
    assert model.mixture_layers == 4
    with pytest.raises(ConfigError, match=r"dense_blocks: \[1, 1\] has one twice"):
        Experts(count=4, top_k=1, ffn=8, dense_blocks=(1, 1))
    with pytest.raises(ConfigError, match=r"experts.dense_blocks: 9 of 4 layers"):
        Model(layers=4, experts=Experts(count=4, top_k=1, ffn=8, dense_blocks=(9,)))
    with pytest.raises(InfeasiblePlan, match=r"experts.interval.*not trained by mixtral"):
        model.require_trainable()
