"""The engine: a completion depends on its request alone, not on its batch, the cache or how it is read.

Random examples are compared by `assert_same`, which allows ties to be decided by rounding.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lakh import checkpoint, config
from lakh.errors import DataError, UserError
from lakh.server.engine import Chunk, Completion, Engine, SamplingParams
from lakh.server.model import runner
from lakh.server.model.cpu.packed import PackedMatrix
from lakh.server.model.inference import SequenceChunk
from lakh.server.model.runner import StepLimits
from lakh.server.speculation import proposer
from lakh.server.speculation.policy import DraftLength
from lakh.spec import Data, Run
from lakh.tokens.tokenizer import Tokenizer
from lakh.workloads.code.formats import hf
from lakh.workloads.code.model import CodeModel

MakeEngine = Callable[..., Engine]
AssertSame = Callable[..., None]
EOT = 0
ids = st.lists(st.integers(7, 299), min_size=1, max_size=60)
few = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def greedy_from_scratch(model: CodeModel, num_ids: int, prompt: list[int], num_tokens: int) -> tuple[int, ...]:
    """Recomputes the whole sequence for every token."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens:
        logits = model(torch.tensor([tokens]))[0, -1, :num_ids]
        tokens.append(int(logits.argmax()))
        if tokens[-1] == EOT:
            break
    return tuple(tokens[len(prompt) :])


@pytest.mark.slow
@few
@given(prompts=st.lists(ids, min_size=1, max_size=6))
def test_batched_equals_single_equals_recomputed(
    engine: Engine, reference: CodeModel, assert_same: AssertSame, prompts: list[list[int]]
) -> None:
    sampling = SamplingParams(max_tokens=12)
    together = engine.generate(prompts, sampling)
    alone = [engine.generate([prompt], sampling)[0] for prompt in prompts]
    assert_same(prompts, sampling, together, alone)
    num_ids = engine.tokenizer.vocab_size
    scratch = [greedy_from_scratch(reference, num_ids, prompt, 12) for prompt in prompts]
    assert_same(prompts, sampling, [done.tokens for done in together], scratch)
    assert [done.prompt_tokens for done in together] == [len(prompt) for prompt in prompts]


@few
@given(prompts=st.lists(ids, min_size=1, max_size=5), seed=st.integers(0, 2**62))
def test_a_sampled_completion_does_not_depend_on_its_batch(
    engine: Engine, assert_same: AssertSame, prompts: list[list[int]], seed: int
) -> None:
    sampling = SamplingParams(max_tokens=8, temperature=1.0, top_p=0.95, top_k=50, seed=seed)
    together = engine.generate(prompts, sampling)
    for prompt, done in zip(prompts, together, strict=True):
        if prompts.count(prompt) == 1:
            assert_same([prompt], sampling, engine.generate([prompt], sampling), [done])


def test_more_prompts_than_running_sequences_keep_their_order(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompts = [[7 + i, *range(20, 20 + (i * 7) % 23)] for i in range(11)]
    sampling = SamplingParams(max_tokens=6)
    expected = engine.generate(prompts, sampling)
    engine.max_seqs = 3
    progress: list[int] = []
    assert engine.generate(prompts, sampling, progress=progress.append) == expected
    assert progress == sorted(set(progress))
    assert progress[-1] == len(prompts)
    assert engine.generate([], sampling) == []
    each = [SamplingParams(max_tokens=1 + i % 3) for i in range(11)]
    assert [len(done.tokens) for done in engine.generate(prompts, each)] == [1 + i % 3 for i in range(11)]


def test_copies_of_a_prompt_differ_and_repeat_with_the_seed(engine: Engine) -> None:
    sampling = SamplingParams(max_tokens=10, temperature=1.0, seed=5)
    first = engine.generate(["def ", "x", "def ", "def "], sampling)
    assert len({done.tokens for done in (first[0], first[2], first[3])}) == 3
    assert engine.generate(["def "] * 3, sampling) == [first[0], first[2], first[3]]
    assert join(engine.stream("def ", sampling, copy=2)).tokens == first[3].tokens
    other = SamplingParams(max_tokens=10, temperature=1.0, seed=6)
    assert engine.generate(["def "], other) != [first[0]]


def test_completions_without_a_seed_vary(engine: Engine) -> None:
    sampling = SamplingParams(max_tokens=16, temperature=1.0)
    assert len({engine.generate(["def "], sampling)[0].tokens for _ in range(4)}) > 1


# --- prefix cache, chunked prefill, draft tokens ---

SAMPLINGS = [SamplingParams(max_tokens=14), SamplingParams(max_tokens=14, temperature=1.0, top_k=40, seed=9)]


@few
@given(prompts=st.lists(ids, min_size=1, max_size=4), sampling=st.sampled_from(SAMPLINGS))
def test_a_cached_prefix_changes_no_completion(
    engine: Engine, make_engine: MakeEngine, assert_same: AssertSame, prompts: list[list[int]], sampling: SamplingParams
) -> None:
    fresh = [make_engine().generate([prompt], sampling)[0] for prompt in prompts]
    for _ in range(2):
        for prompt, done in zip(prompts, fresh, strict=True):
            assert_same([prompt], sampling, engine.generate([prompt], sampling), [done])
    longer = [[*prompt, *done.tokens[:5]] for prompt, done in zip(prompts, fresh, strict=True)]
    before = engine.counters.cached_tokens
    again = engine.generate(longer, sampling)
    assert engine.counters.cached_tokens > before
    assert_same(longer, sampling, again, make_engine().generate(longer, sampling))


@few
@given(prompts=st.lists(ids, min_size=1, max_size=4), step_tokens=st.integers(1, 20))
def test_a_chunked_prompt_gives_the_same_completion(
    engine: Engine, make_engine: MakeEngine, assert_same: AssertSame, prompts: list[list[int]], step_tokens: int
) -> None:
    chunked = make_engine()
    chunked.step_tokens = step_tokens
    sampling = SamplingParams(max_tokens=8)
    assert_same(prompts, sampling, chunked.generate(prompts, sampling), engine.generate(prompts, sampling))


def test_prompts_of_a_batch_go_first_so_that_its_sequences_finish_together(
    make_engine: MakeEngine, assert_same: AssertSame
) -> None:
    made = make_engine()
    made.step_tokens = 16
    prompts = [tuple(range(20 + row, 36 + row)) for row in range(0, 80, 20)]
    sampling = SamplingParams(max_tokens=8, min_tokens=8)
    together = made.generate(prompts, sampling)
    assert made.counters.steps == 4 + 7  # four prompts, of which each step holds one; then seven tokens of all
    assert not made.scheduler.prompts_first  # streams do not pause for prompts
    assert [len(one.tokens) for one in together] == [8] * 4
    assert_same(prompts, sampling, together, [made.generate([prompt], sampling)[0] for prompt in prompts])


@few
@given(
    prompts=st.lists(ids, min_size=1, max_size=3),
    repeats=st.integers(1, 3),
    sampling=st.sampled_from(SAMPLINGS),
    most=st.integers(1, 7),
)
def test_draft_tokens_change_no_completion(
    engine: Engine,
    make_engine: MakeEngine,
    assert_same: AssertSame,
    prompts: list[list[int]],
    repeats: int,
    sampling: SamplingParams,
    most: int,
) -> None:
    prompts = [(prompt * repeats)[-60:] for prompt in prompts]
    speculating = make_engine(options={"speculation": "lookup"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proposer, "choose_draft_length", lambda **_: DraftLength(most, "the test requires it"))
        done = speculating.generate(prompts, sampling)
    assert_same(prompts, sampling, done, engine.generate(prompts, sampling))
    counts = speculating.counters
    assert counts.accepted_tokens <= counts.draft_tokens
    assert counts.generated_tokens == sum(len(one.tokens) for one in done)


def test_draft_tokens_beside_prompts_leave_a_step_within_its_limits(
    engine: Engine, make_engine: MakeEngine, assert_same: AssertSame, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger step does not fit a graph: the generic path would take it."""
    limited = make_engine(options={"speculation": "lookup"})
    limits = limited.runner.step_limits = StepLimits(tokens=24, scored=9)
    limited.step_tokens = limits.tokens
    monkeypatch.setattr(proposer, "choose_draft_length", lambda **_: DraftLength(4, "the test requires it"))
    steps: list[tuple[int, int]] = []
    forward = limited.runner.forward

    def recorded(chunks: list[SequenceChunk]) -> torch.Tensor:
        steps.append((sum(len(chunk.tokens) for chunk in chunks), sum(chunk.scored for chunk in chunks)))
        return forward(chunks)

    monkeypatch.setattr(limited.runner, "forward", recorded)
    prompts = [[20, 21, 22] * 4, [30, 31] * 6, [40] * 12, list(range(50, 90)), list(range(90, 130))]
    sampling = SamplingParams(max_tokens=12)
    done = limited.generate(prompts, sampling)
    assert limited.counters.draft_tokens > 0
    assert max(tokens for tokens, _ in steps) == limits.tokens
    assert max(scored for _, scored in steps) <= limits.scored
    assert_same(prompts, sampling, done, engine.generate(prompts, sampling))


def test_prompt_lookup_saves_steps_in_a_loop(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(options={"speculation": "lookup"})
    monkeypatch.setattr(proposer, "choose_draft_length", lambda **_: DraftLength(5, "the test requires it"))
    loop = iter([20, 21, 22] * 50)
    asked: list[int] = []

    def looping(logits: torch.Tensor, *_: object) -> list[int]:
        asked.append(len(logits))
        start = engine.scheduler.running[0].tokens[-1:] or [22]
        return [20 + (start[0] - 20 + 1 + i) % 3 for i in range(len(logits))]

    monkeypatch.setattr(runner, "most_likely", looping)
    done = engine.generate([[30, 31]], SamplingParams(max_tokens=40))[0]
    assert list(done.tokens) == [next(loop) for _ in range(40)]
    assert engine.counters.steps < 15
    assert engine.counters.accepted_tokens == engine.counters.draft_tokens > 25


@few
@given(prompts=st.lists(ids, min_size=2, max_size=8))
def test_preempted_sequences_get_the_same_completion(
    engine: Engine, make_engine: MakeEngine, assert_same: AssertSame, prompts: list[list[int]]
) -> None:
    small = make_engine(options={"cache_tokens": 1})  # one full context
    sampling = SamplingParams(max_tokens=30)
    assert_same(prompts, sampling, small.generate(prompts, sampling), engine.generate(prompts, sampling))
    assert small.pool.num_used == 0


def test_a_cache_for_one_sequence_preempts_the_others(make_engine: MakeEngine) -> None:
    small = make_engine(options={"cache_tokens": 1})
    prompts = [[7 + i, *range(20, 50)] for i in range(6)]
    done = small.generate(prompts, SamplingParams(max_tokens=60))
    assert small.counters.preempted_seqs > 0
    assert done == make_engine().generate(prompts, SamplingParams(max_tokens=60))


def test_new_weights_apply_from_the_next_step_and_clear_the_prefix_cache(make_engine: MakeEngine) -> None:
    engine, other = make_engine(seed=1), make_engine(seed=2)
    prompt, sampling = list(range(20, 60)), SamplingParams(max_tokens=10)
    first = engine.generate([prompt], sampling)
    seq = engine.make_sequence(tuple(prompt), SamplingParams(max_tokens=20))
    engine.submit(seq)
    for _ in range(4):
        engine.step()
    generated = list(seq.tokens)
    assert engine.swap(random_state(other)) == 1
    after = engine.generate([prompt], sampling)
    assert after == other.generate([prompt], sampling) != first
    while seq.finish_reason is None:
        engine.step()
    assert engine.pool.num_used == 0
    assert seq.tokens[: len(generated)] == generated  # sampled tokens stay; the new weights sample the rest
    rest = other.generate([[*prompt, *generated]], SamplingParams(max_tokens=20 - len(generated)))[0].tokens
    assert tuple(seq.tokens[len(generated) :]) == rest


def as_tensor(matrix: torch.Tensor | PackedMatrix) -> torch.Tensor:
    return matrix.dequantize() if isinstance(matrix, PackedMatrix) else matrix


def random_state(engine: Engine) -> dict[str, torch.Tensor]:
    """The weights of an engine under the model's own names."""
    network, spec = engine.network, engine.spec
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    state = {"embed.weight": network.embedding(range(spec.vocab)), "norm.weight": network.norms[-1]}
    for layer in range(spec.layers):
        qkv, o, gate_up, down = (as_tensor(network.matrix(name, layer)) for name in ("qkv", "o", "gate_up", "down"))
        q, k, v = qkv.split([queries, keys, keys])
        gate, up = gate_up.split([spec.ffn, spec.ffn])
        parts = {"attention.q": q, "attention.k": k, "attention.v": v, "attention.o": o}
        parts |= {"ffn.gate": gate, "ffn.up": up, "ffn.down": down}
        parts |= {"attention_norm": network.norms[2 * layer], "ffn_norm": network.norms[2 * layer + 1]}
        state |= {f"blocks.{layer}.{name}.weight": tensor for name, tensor in parts.items()}
    return state


def test_an_aborted_sequence_frees_its_blocks_at_once(engine: Engine) -> None:
    seqs = [engine.make_sequence(tuple(range(20 + i, 60 + i)), SamplingParams(max_tokens=40)) for i in range(3)]
    engine.submit(*seqs)
    engine.step()
    held = engine.pool.num_used
    engine.abort(seqs[1])
    assert engine.pool.num_used < held
    assert seqs[1].finish_reason == "abort"
    engine.abort(*seqs)
    assert (engine.pool.num_used, engine.num_running, engine.num_waiting) == (0, 0, 0)


def test_a_sequence_past_its_deadline_is_aborted_waiting_or_running(make_engine: MakeEngine) -> None:
    now = [0.0]
    engine = make_engine(options={"clock": lambda: now[0]})
    engine.max_seqs = 1
    at_work = engine.make_sequence((20, 21), SamplingParams(max_tokens=50), deadline_s=5.0)
    waits = engine.make_sequence((22, 23), SamplingParams(max_tokens=50), deadline_s=5.0)
    engine.submit(at_work, waits)
    engine.step()
    assert at_work.finish_reason is None
    now[0] = 6.0
    assert engine.step() == [waits, at_work]
    assert [seq.finish_reason for seq in (at_work, waits)] == ["abort", "abort"]
    assert engine.pool.num_used == 0


def test_the_limit_of_a_generation_counts_from_its_first_token_and_waits_for_a_line_break(
    make_engine: MakeEngine,
) -> None:
    now = [0.0]
    engine = make_engine(options={"clock": lambda: now[0]})
    seq = engine.make_sequence((20, 21), SamplingParams(max_tokens=90), generation_s=1.0)
    engine.submit(seq)
    now[0] = 50.0  # in the queue
    engine.step()
    assert seq.first_token_s == 50.0
    now[0] = 60.0
    while "\n" not in (text := engine.tokenizer.decode(seq.tokens)):
        assert seq.finish_reason is None, text
        seq.append(engine.tokenizer.encode("\n")[0])
    engine.step()
    assert seq.finish_reason == "abort"


def test_prompts_beside_a_stream_advance_by_as_much_as_a_short_step_computes(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    engine = make_engine(context=1024, options={"clock": lambda: now[0]})
    engine.has_own_thread = True
    launch, sizes = engine.runner.launch, []

    def slow(segments: list[SequenceChunk]) -> Any:
        sizes.append([len(segment.tokens) for segment in segments])
        now[0] += 0.004 * sum(sizes[-1])  # 50 tokens in STEP_S
        return launch(segments)

    monkeypatch.setattr(engine.runner, "launch", slow)
    engine.submit(engine.make_sequence((20, 21), SamplingParams(max_tokens=60)))
    engine.step()
    engine.submit(engine.make_sequence(tuple(range(20, 270)) * 2, SamplingParams(max_tokens=1)))
    while engine.num_running > 1 or engine.num_waiting:
        engine.step()
    assert sizes[:3] == [[2], [1, 64], [1, 50]]  # nothing was known before the second step
    assert all(sum(step) <= 51 for step in sizes[2:])
    sizes.clear()
    engine.abort(*engine.scheduler.running)
    engine.submit(engine.make_sequence(tuple(range(30, 290)) * 2, SamplingParams(max_tokens=1)))
    engine.step()
    assert sizes == [[256]]  # no stream waits


def test_one_tenant_computes_what_another_has_cached(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = tuple(range(20, 70))

    def cached(tenant: str) -> int:
        seq = engine.make_sequence(prompt, SamplingParams(max_tokens=1), cache_space=tenant)
        engine.submit(seq)
        while seq.finish_reason is None:
            engine.step()
        return seq.num_cached

    assert [cached(tenant) for tenant in ("a", "a", "b", "b", "")] == [0, 49, 0, 49, 0]


def test_a_tenant_does_not_wait_for_the_same_prompt_of_another(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.step_tokens = 16  # a prompt takes several steps
    seqs = [
        engine.make_sequence(tuple(range(20, 70)), SamplingParams(max_tokens=1), cache_space=tenant)
        for tenant in ("a", "b", "a")
    ]
    engine.submit(*seqs)
    engine.step()
    assert [seq.lease is not None for seq in seqs] == [True, True, False]  # the copy waits to share the blocks


def test_copies_of_a_prompt_are_computed_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = list(range(20, 70))
    engine.generate([prompt] * 8, SamplingParams(max_tokens=1, temperature=1.0, seed=1))
    assert engine.counters.cached_tokens == 7 * 49


def test_every_token_has_logprobs(engine: Engine, reference: CodeModel) -> None:
    sampling = SamplingParams(max_tokens=6, logprobs=3)
    done = engine.generate([[20, 21, 22]], sampling)[0]
    assert done.logprobs is not None
    assert [item.token for item in done.logprobs] == list(done.tokens)
    scores = reference(torch.tensor([[20, 21, 22]]))[0, -1, : engine.tokenizer.vocab_size].log_softmax(-1)
    assert done.logprobs[0].logprob == pytest.approx(scores.max().item(), abs=1e-3)  # sums in another order
    assert done.logprobs[0].top[0][0] == done.tokens[0]
    assert len(done.logprobs[0].top) == 3
    streamed = [item for chunk in engine.stream([20, 21, 22], sampling) for item in chunk.logprobs or ()]
    assert tuple(streamed) == done.logprobs


def test_int8_weights_give_nearly_the_same_logits(make_engine: MakeEngine) -> None:
    shape = {"width": 64, "ffn": 128}
    exact, rounded = make_engine(**shape), make_engine(options={"precision": "int8"}, **shape)
    prompt = [[20 + i % 50 for i in range(30)]]
    sampling = SamplingParams(max_tokens=1, logprobs=20)
    ours, theirs = (engine.generate(prompt, sampling)[0].logprobs[0] for engine in (rounded, exact))
    likeliest = dict(theirs.top)
    shared = [(likeliest[token], logprob) for token, logprob in ours.top if token in likeliest]
    assert len(shared) >= 15
    # 8-bit weights and activations; the logits of this random model have a range of tens.
    assert max(abs(left - right) for left, right in shared) < 1.0
    with pytest.raises(UserError, match="ffn divisible by 32, and it is 72"):
        make_engine(options={"precision": "int8"}, width=64, ffn=72)


# --- streaming ----------------------------------------------------------------------------------------------


def join(chunks: object) -> Completion:
    pieces: list[Chunk] = list(chunks)  # type: ignore[call-overload]
    assert [piece.finish_reason is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    reason = pieces[-1].finish_reason
    assert reason is not None
    text = "".join(piece.text for piece in pieces)
    return Completion(text, tuple(token for piece in pieces for token in piece.tokens), reason, 0)


@few
@given(prompt=ids, seed=st.integers(0, 1000), stop=st.sampled_from([(), ("e",), ("re", "t"), ("\n\n", "(")]))
def test_the_chunks_of_a_stream_concatenate_to_the_completion(
    engine: Engine, prompt: list[int], seed: int, stop: tuple[str, ...]
) -> None:
    sampling = SamplingParams(max_tokens=20, temperature=1.5, seed=seed, stop=stop)
    whole = engine.generate([prompt], sampling)[0]
    streamed = join(engine.stream(prompt, sampling))
    assert (streamed.text, streamed.tokens, streamed.finish_reason) == (whole.text, whole.tokens, whole.finish_reason)
    assert not any(text in whole.text for text in stop)
    if not stop:
        plain = [token for token in whole.tokens if token > 6]
        assert whole.text == engine.tokenizer.decode(plain)


def scripted(engine: Engine, monkeypatch: pytest.MonkeyPatch, tokens: list[int]) -> None:
    """The engine samples these tokens, whatever the logits."""
    script = iter(tokens)
    monkeypatch.setattr(runner, "most_likely", lambda *_: [next(script)])


def test_no_chunk_splits_a_character(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a🙂b日é"
    tokens = engine.tokenizer.encode(text)
    assert len(tokens) > len(text)  # the tokenizer splits characters
    scripted(engine, monkeypatch, [*tokens, EOT])
    pieces = [chunk.text for chunk in engine.stream("x", SamplingParams(max_tokens=60))]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)
    assert len(pieces) > 3  # it does not wait for the end


def test_incomplete_characters_are_emitted_at_the_end(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    half = engine.tokenizer.encode("🙂")[:-1]
    scripted(engine, monkeypatch, [*engine.tokenizer.encode("ok"), *half])
    num_tokens = len(engine.tokenizer.encode("ok")) + len(half)
    done = join(engine.stream("x", SamplingParams(max_tokens=num_tokens)))
    assert (done.text, done.finish_reason) == ("ok\ufffd", "length")


def test_special_tokens_have_no_text_and_end_of_text_stops(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = engine.tokenizer.encode("a")[0], engine.tokenizer.encode("b")[0]
    generated = [a, engine.tokenizer.special("<|file_sep|>"), b, EOT, a]
    scripted(engine, monkeypatch, generated)
    assert engine.generate(["x"], SamplingParams()) == [Completion("ab", tuple(generated[:4]), "stop", 1)]


def test_a_stop_string_is_cut_exactly_even_across_tokens(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [token for letter in "one\n\ntwo" for token in engine.tokenizer.encode(letter)]
    scripted(engine, monkeypatch, tokens)
    chunks = list(engine.stream("x", SamplingParams(stop=("\n\n",))))
    assert "".join(chunk.text for chunk in chunks) == "one"
    assert chunks[-1].finish_reason == "stop"
    scripted(engine, monkeypatch, tokens)
    assert engine.generate(["x"], SamplingParams(stop=("\n\n",)))[0].text == "one"


def test_text_held_back_for_a_stop_string_is_emitted_at_the_end(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [token for letter in "one\n" for token in engine.tokenizer.encode(letter)]
    scripted(engine, monkeypatch, [*tokens, EOT])
    assert engine.generate(["x"], SamplingParams(stop=("\n\n",)))[0].text == "one\n"


# --- limits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 10, 47, 48, 95, 96, 5000])
@pytest.mark.parametrize("length", [1, 48, 96, 300])
def test_a_request_never_overflows_the_context(engine: Engine, max_tokens: int, length: int) -> None:
    prompt = [7 + i % 290 for i in range(length)]
    done = engine.generate([prompt], SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=1))[0]
    assert done.prompt_tokens == min(length, max(96 - max_tokens, 48))
    assert done.prompt_tokens + len(done.tokens) <= 96
    assert len(done.tokens) <= max_tokens


def test_a_long_prompt_keeps_its_end(engine: Engine) -> None:
    prompt = [7 + i % 290 for i in range(300)]
    sampling = SamplingParams(max_tokens=20)
    assert engine.generate([prompt], sampling) == engine.generate([prompt[-76:]], sampling)


def test_an_empty_prompt_starts_a_document(engine: Engine) -> None:
    sampling = SamplingParams(max_tokens=5)
    assert engine.generate([""], sampling) == engine.generate([[EOT]], sampling)


def test_ids_beyond_the_tokenizer_are_never_sampled(make_engine: MakeEngine) -> None:
    engine = make_engine(vocab=600, tied=False)
    done = engine.generate([[7], [8]], SamplingParams(max_tokens=60, temperature=2.0, seed=3))
    assert max(token for seq in done for token in seq.tokens) < engine.tokenizer.vocab_size < 600


@pytest.mark.parametrize("prompt", ["\ud800", [320], [-1]])
def test_a_prompt_of_invalid_text_is_rejected(engine: Engine, prompt: str | list[int]) -> None:
    with pytest.raises(UserError, match="prompt"):
        engine.generate([prompt], SamplingParams())


def test_a_cancelled_request_ends_with_abort(engine: Engine) -> None:
    asked = iter([False, False, True])
    done = join(engine.stream([7, 8], SamplingParams(max_tokens=50), cancelled=lambda: next(asked)))
    assert (len(done.tokens), done.finish_reason) == (3, "abort")
    answers = engine.generate([[7], [8], [9]], SamplingParams(max_tokens=50), cancelled=lambda: True)
    assert [answer.finish_reason for answer in answers] == ["abort"] * 3


# --- fill in the middle -------------------------------------------------------------------------------------


def test_an_infill_prompt_puts_special_ids_around_encoded_text(engine: Engine) -> None:
    encode, special = engine.tokenizer.encode, engine.tokenizer.special
    hostile = "<|fim_middle|>"  # text, not the token
    assert engine.prompts.infill("def ", hostile, 8) == (
        special("<|fim_prefix|>"),
        *encode("def "),
        special("<|fim_suffix|>"),
        *encode(hostile),
        special("<|fim_middle|>"),
    )
    assert special("<|fim_middle|>") not in encode(hostile)


@given(num_prefix=st.integers(0, 200), num_suffix=st.integers(0, 200), max_tokens=st.integers(1, 95))
@few
def test_an_infill_prompt_is_cut_far_from_the_cursor(
    engine: Engine, num_prefix: int, num_suffix: int, max_tokens: int
) -> None:
    before = engine.tokenizer.encode("".join(chr(48 + i % 10) for i in range(num_prefix)))
    after = engine.tokenizer.encode("".join(chr(97 + i % 26) for i in range(num_suffix)))
    prompt = engine.prompts.infill(engine.tokenizer.decode(before), engine.tokenizer.decode(after), max_tokens)
    middle = prompt.index(engine.tokenizer.special("<|fim_suffix|>"))
    kept_before, kept_after = prompt[1:middle], prompt[middle + 1 : -1]
    assert list(kept_before) == before[len(before) - len(kept_before) :]
    assert list(kept_after) == after[: len(kept_after)]
    room = max(96 - max_tokens, 48)
    whole = len(before) + len(after) + 3
    assert len(prompt) <= room
    assert len(prompt) >= min(whole, room - 15)  # the start moves in steps of a block: less than one block is lost
    assert len(prompt) == whole or whole > room - 16


def test_a_tokenizer_without_infill_tokens_is_a_clear_error(
    engine: Engine, reference: CodeModel, tokenizer_json: Path
) -> None:
    raw = tokenizer_json.read_bytes().replace(b"fim_prefix", b"another_01")
    bare = Engine("bare", engine.spec, reference.state_dict(), Tokenizer(raw), device="cpu")
    with pytest.raises(UserError, match="suffix: the tokenizer has no fill-in-the-middle tokens"):
        bare.prompts.infill("a", "b", 4)


# --- loading ------------------------------------------------------------------------------------------------


def test_a_hugging_face_directory_gives_the_same_engine(engine: Engine, model_dir: Path) -> None:
    loaded = Engine.load(str(model_dir))
    assert (loaded.name, loaded.spec) == ("tiny", engine.spec)
    assert loaded.generate(["def "], SamplingParams()) == engine.generate(["def "], SamplingParams())


@pytest.mark.slow
def test_a_shorter_context_is_served_with_the_same_tokens_and_less_memory(engine: Engine, model_dir: Path) -> None:
    short = Engine.load(str(model_dir), max_model_len=48, cache_tokens=1)
    assert short.spec.context == 48 < engine.spec.context
    assert short.pool.num_blocks < Engine.load(str(model_dir), cache_tokens=1).pool.num_blocks
    prompts = [[7, *range(20, 40)]]
    assert short.generate(prompts, SamplingParams(max_tokens=8)) == engine.generate(
        prompts, SamplingParams(max_tokens=8)
    )
    ended = short.generate(prompts, SamplingParams(max_tokens=100))[0]
    assert ended.prompt_tokens + len(ended.tokens) <= 48 + 1  # the last token is not computed with
    assert Engine.load(str(model_dir), max_model_len=engine.spec.context).spec == engine.spec
    with pytest.raises(UserError, match=f"more than the model's context of {engine.spec.context} tokens; give at most"):
        Engine.load(str(model_dir), max_model_len=engine.spec.context + 1)


def test_a_context_beyond_the_memory_says_how_to_lower_it(make_engine: MakeEngine) -> None:
    with pytest.raises(UserError, match=r"does not fit into this machine's memory .*lower --max-model-len"):
        make_engine(context=10**15)


def test_greedy_tokens_equal_those_of_transformers(make_engine: MakeEngine, model_dir: Path) -> None:
    import transformers

    # Not Engine.load: where there is a GPU it rounds the weights to bfloat16.
    spec, weights = hf.load(model_dir)
    engine = Engine("m", spec, weights, Tokenizer.load(model_dir), device="cpu", precision="f32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    read = transformers.AutoTokenizer.from_pretrained(model_dir)
    prompts = ["def add(", "class Größe:\n", "return left + right", "日"]
    for prompt, done in zip(prompts, engine.generate(prompts, SamplingParams(max_tokens=40)), strict=True):
        inputs = read(prompt, return_tensors="pt")
        assert inputs["input_ids"][0].tolist() == engine.tokenizer.encode(prompt)
        # Ids beyond the tokenizer's are padding of the embedding: the engine never samples them.
        padding = [list(range(engine.tokenizer.vocab_size, engine.spec.vocab))]
        after = theirs.generate(
            **inputs, max_new_tokens=40, do_sample=False, suppress_tokens=padding[0], pad_token_id=4
        )
        assert tuple(after[0, inputs["input_ids"].shape[1] :].tolist()) == done.tokens


def test_a_lakh_checkpoint_and_its_run_give_the_same_engine(
    engine: Engine, reference: CodeModel, tmp_path: Path, tokenizer_json: Path
) -> None:
    run = Run(name="mine", model=engine.spec, data=Data(sequence=32))
    folder = str(tmp_path / "run" / "checkpoints" / checkpoint.folder_name(7))
    checkpoint.save(
        folder,
        {f"model.{name}": tensor for name, tensor in reference.state_dict().items()},
        step=7,
        sequence_index=7 * 32,
        run_sha256=config.fingerprint(run),
        data_sha256="none",
        attachments={
            "run.toml": config.to_toml(run).encode(),
            "tokenizer.json": tokenizer_json.read_bytes(),
        },
    )
    for path in (str(tmp_path / "run"), folder):
        loaded = Engine.load(path)
        assert loaded.name == "mine"
        assert loaded.generate(["def "], SamplingParams()) == engine.generate(["def "], SamplingParams())
    with pytest.raises(UserError, match="has no adapters: its run trained every weight; serve it as a model"):
        engine.load_adapter("mine", str(tmp_path / "run"))


def test_an_invalid_model_error_lists_the_supported_forms(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("x")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "manifest.json").write_text("{}")
    for name in ("nothing", "file.txt", "corpus", ""):
        with pytest.raises(UserError, match="Hugging Face directory"):
            Engine.load(str(tmp_path / name))


def test_a_tokenizer_of_another_model_is_rejected(model_dir: Path, save_model: Callable[..., Path]) -> None:
    save_model(tokenizer=None, vocab=280)  # the old tokenizer.json stays
    with pytest.raises(UserError, match="the model 280"):
        Engine.load(str(model_dir))


def test_a_model_without_a_tokenizer_is_rejected(model_dir: Path) -> None:
    (model_dir / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        Engine.load(str(model_dir))


@pytest.mark.parametrize("speculation", ["off", "lookup"])
def test_a_dropped_engine_frees_its_memory_at_once(make_engine: MakeEngine, speculation: str) -> None:
    engine = make_engine(options={"speculation": speculation})
    engine.generate([[20, 21, 22]], SamplingParams(max_tokens=4))
    cache = weakref.ref(engine.cache)
    gc.collect()
    gc.disable()
    try:
        del engine
        assert cache() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("speculation", ["off", "lookup"])
def test_min_tokens_and_penalties_hold_with_and_without_drafts(
    make_engine: Callable[..., Engine], speculation: str
) -> None:
    engine = make_engine(options={"speculation": speculation})
    prompt = engine.prompts.encode("def add(left, right):\n    return left + right\n" * 2)
    at_least = SamplingParams(max_tokens=30, min_tokens=30, temperature=2.0, seed=3)
    assert [len(one.tokens) for one in engine.generate([prompt] * 4, at_least)] == [30] * 4
    never_twice = SamplingParams(max_tokens=20, frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=1.5)
    plain = make_engine().generate([prompt], never_twice)[0]
    assert engine.generate([prompt], never_twice)[0].tokens == plain.tokens
    free = make_engine().generate([prompt], SamplingParams(max_tokens=20))[0]
    assert len(set(plain.tokens)) >= len(set(free.tokens))


def test_weights_that_are_not_numbers_are_refused_and_the_old_ones_stay(
    make_engine: Callable[..., Engine], reference: CodeModel
) -> None:
    engine = make_engine()
    before = engine.generate(["def "], SamplingParams(max_tokens=4))
    weights = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    for name in ("embed.weight", next(one for one in weights if "norm" in one), list(weights)[-1]):
        for value in (float("nan"), float("inf")):
            damaged = {**weights, name: weights[name].clone()}
            damaged[name].view(-1)[3] = value
            with pytest.raises(DataError, match="NaN or infinite"):
                engine.swap(damaged)
    with pytest.raises(DataError, match="NaN or infinite"):
        Engine("tiny", engine.spec, damaged, engine.tokenizer, device="cpu")
    assert engine.weights_version == 0
    assert engine.generate(["def "], SamplingParams(max_tokens=4)) == before


def test_an_engine_and_its_checkpoint_do_not_import_what_only_training_needs() -> None:
    """They take seconds of every start."""
    names = ("torch._dynamo", "torch.distributed.tensor")
    load = (
        "from lakh.checkpoint.slices import slice_of; slice_of(torch.ones(2)); slice_of(torch.nn.Linear(2, 2).weight)"
    )
    code = f"import sys, torch, lakh.server.engine; {load}; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], timeout=120, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
