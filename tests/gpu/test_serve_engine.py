"""The engine on a GPU answers as on a CPU: batched, with cached prefixes, drafts, a draft model and new weights."""

from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from lakh.server.engine import Engine, SamplingParams
from lakh.server.model import weights as model_weights
from lakh.server.model.kv_cache import PagedCache
from lakh.spec.model import Model
from lakh.tokens.tokenizer import SPECIAL_TOKENS, Tokenizer
from lakh.workloads.code.model import CodeModel, init_weights

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]
SPEC = Model(layers=2, width=128, heads=4, kv_heads=2, ffn=256, vocab=280, context=512)
PROMPTS = [[20 + (i * i) % 200 for i in range(n)] for n in (3, 40, 150, 150, 260)]
GREEDY = SamplingParams(max_tokens=24)


def weights(seed: int, noise: float = 0.0) -> dict[str, torch.Tensor]:
    model = CodeModel(SPEC)
    init_weights(model, seed)
    made = {name: t.detach() * (8 if t.dim() > 1 else 1) for name, t in model.state_dict().items()}
    generator = torch.Generator().manual_seed(3)
    return {name: t + noise * t.std() * torch.randn(t.shape, generator=generator) for name, t in made.items()}


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = tokenizers.Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.add_special_tokens(list(SPECIAL_TOKENS))
    made.save(str(path))
    return path


def engine(tokenizer_json: Path, device: str, **options: object) -> Engine:
    tokenizer = Tokenizer.load(tokenizer_json)
    return Engine("m", SPEC, weights(1), tokenizer, device=device, precision="f32", **options)  # type: ignore[arg-type]


def assert_same(seed: int, found: list[tuple[int, ...]], expected: list[tuple[int, ...]], near: float = 0.1) -> None:
    """Equal, or different from where two ids nearly tie: tensor cores round float32 products to 11 bits."""
    reference = CodeModel(SPEC)
    reference.load_state_dict(weights(seed))
    for prompt, ours, theirs in zip(PROMPTS, found, expected, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if at is None:
            assert ours == theirs
            continue
        with torch.no_grad():
            scores = reference(torch.tensor([[*prompt, *theirs[:at]]]))[0, -1]
        gap = float(scores.max() - min(scores[ours[at]], scores[theirs[at]]))
        assert gap < near * float(scores.std()), (at, ours, theirs)


def test_answers_equal_those_of_the_cpu(tokenizer_json: Path) -> None:
    expected = [done.tokens for done in engine(tokenizer_json, "cpu").generate(PROMPTS, GREEDY)]
    draft = model_weights.LoadedModel("draft", "", SPEC, weights(1, 0.05), tokenizer_json)
    for options in ({}, {"speculation": "lookup"}, {"draft": draft}):
        gpu = engine(tokenizer_json, "cuda", **options)
        for _ in range(2):  # the second time from cached prefixes
            found = [done.tokens for done in gpu.generate(PROMPTS, GREEDY)]
            assert_same(1, found, expected)
        assert gpu.pool.num_used == 0
    assert gpu.counters.draft_tokens > 0


def test_a_cache_of_8_bits_gives_the_answers_of_the_cpu(tokenizer_json: Path) -> None:
    """Batched, from cached prefixes, with drafts, and where sequences are preempted for lack of blocks."""
    cpu = engine(tokenizer_json, "cpu", kv_dtype="int8")
    sampling = SamplingParams(max_tokens=100)
    expected = [done.tokens for done in cpu.generate(PROMPTS, sampling)]
    for options in ({}, {"speculation": "lookup"}, {"cache_tokens": 540}):
        gpu = engine(tokenizer_json, "cuda", kv_dtype="int8", **options)
        assert gpu.cache.keys_LKCD.dtype == torch.int8
        for _ in range(2):
            found = [done.tokens for done in gpu.generate(PROMPTS, sampling)]
            assert_same(1, found, expected, near=0.25)  # and the numbers of the cache to 8
        assert gpu.pool.num_used == 0
        assert gpu.counters.cached_tokens > 0
    assert gpu.counters.preempted_seqs > 0


def test_the_same_memory_holds_nearly_twice_the_tokens() -> None:
    spec = Model(layers=2, width=512, heads=4, kv_heads=2, ffn=256, vocab=280, context=512)  # heads of 128
    sizes = {}
    for dtype in (torch.bfloat16, torch.int8):
        before = torch.cuda.memory_allocated()
        cache = PagedCache(spec, 1024, device=torch.device("cuda"), dtype=dtype)
        sizes[dtype] = torch.cuda.memory_allocated() - before
        assert cache.num_blocks == 1024
        del cache  # else the next difference counts its release
    assert sizes[torch.bfloat16] / sizes[torch.int8] == pytest.approx(256 / 132, rel=0.02)


def test_new_weights_reach_the_captured_graphs(tokenizer_json: Path) -> None:
    gpu = engine(tokenizer_json, "cuda")
    gpu.generate(PROMPTS, GREEDY)
    gpu.swap(weights(2))
    cpu = Engine("m", SPEC, weights(2), Tokenizer.load(tokenizer_json), device="cpu", precision="f32")
    found, expected = ([done.tokens for done in one.generate(PROMPTS, GREEDY)] for one in (gpu, cpu))
    assert_same(2, found, expected)


def test_log_probabilities_of_prompts_are_those_of_the_cpu(tokenizer_json: Path) -> None:
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=2)
    expected = engine(tokenizer_json, "cpu").generate(PROMPTS, sampling)
    gpu = engine(tokenizer_json, "cuda")
    for _ in range(2):  # the second time with cached prefixes, which are computed again
        for one, other in zip(expected, gpu.generate(PROMPTS, sampling), strict=True):
            assert one.prompt_logprobs is not None
            assert other.prompt_logprobs is not None
            for ours, theirs in zip(other.prompt_logprobs[1:], one.prompt_logprobs[1:], strict=True):
                assert ours is not None
                assert theirs is not None
                # Tensor cores round float32 products to 11 bits.
                assert abs(ours.logprob - theirs.logprob) < 0.1
    assert gpu.runner.steps_without_graph == {"size": 0, "adapter": 0}
