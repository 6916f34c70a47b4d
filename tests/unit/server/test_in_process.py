"""The in-process backend: what a long text costs, and requests that wait for an encoder thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
import torch

from lakh.compute_threads import ComputeThreads, CoreTimes
from lakh.errors import PeerLost
from lakh.server import engine as engine_module
from lakh.server.api.request_handler import to_request_error
from lakh.server.api.server import running
from lakh.server.backend import Backend, CompletionDelta, Usage
from lakh.server.backends import engine_thread
from lakh.server.backends.encoder_threads import NUM_THREADS
from lakh.server.backends.in_process import MAX_NEW_CHARS, InProcessBackend
from lakh.server.backends.request_sequences import make_sequences
from lakh.server.engine import Engine, SamplingParams
from lakh.server.fairness import Share
from lakh.server.prompts.encoder import MAX_CHARS_PER_TOKEN
from lakh.server.prompts.incremental_tokenizer import FEW_CHARS
from lakh.server.request import RequestError, parse

TIMEOUT_S = 30.0


def test_texts_that_wait_for_an_encoder_thread_count_as_waiting(engine: Engine) -> None:
    prompt, suffix = "def add(", "x" * (MAX_NEW_CHARS + 1)  # cut to the context when it is tokenized

    async def scenario() -> None:
        backend, permit = InProcessBackend(engine, max_waiting=2), threading.Event()
        for number in range(NUM_THREADS):  # all encoder threads are busy
            backend.encoders.submit(Share(str(number), ""), lambda: permit.wait(TIMEOUT_S))

        async def ask(number: int) -> list[object]:
            request = parse({"prompt": prompt + str(number), "suffix": suffix, "max_tokens": 2})
            return [item async for item in backend.complete(request)]

        waiting = [asyncio.create_task(ask(number)) for number in range(2)]
        while backend.num_waiting < 2:
            await asyncio.sleep(0.001)
        with pytest.raises(RequestError) as caught:
            await ask(2)
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        permit.set()
        for answer in await asyncio.gather(*waiting):
            assert isinstance(answer[-1], Usage)
        assert backend.num_waiting == 0
        await backend.close()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


def test_no_update_is_lost_where_they_are_sent_while_a_gpu_computes(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    sampling = [SamplingParams(max_tokens=4 + 5 * number) for number in range(5)]
    prompts = [f"def f{number}(" for number in range(5)]
    expected = [one.text for one in engine.generate(prompts, sampling)]
    engine.is_asynchronous = True

    async def scenario() -> None:
        backend = InProcessBackend(engine)

        async def ask(number: int) -> list[Any]:
            request = parse({"prompt": prompts[number], "max_tokens": sampling[number].max_tokens, "temperature": 0})
            return [item async for item in backend.complete(request)]

        for asked in ([0], range(5)):  # alone: the last update has no step after it
            for number, items in zip(asked, await asyncio.gather(*map(ask, asked)), strict=True):
                *deltas, usage = items
                assert "".join(delta.text for delta in deltas) == expected[number]
                assert usage.completion_tokens == sum(len(delta.tokens) for delta in deltas)
        await backend.close()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


def test_readiness_follows_the_engines_steps(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "STALLED_S", 0.05)
    engine, permit = make_engine(), threading.Event()
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: permit.wait(TIMEOUT_S) and step())

    async def scenario() -> None:
        async with running(InProcessBackend(engine), "127.0.0.1", 0) as server, aiohttp.ClientSession() as session:

            async def status(path: str) -> tuple[int, str]:
                async with session.get(server.url + path) as response:
                    return response.status, (await response.json())["status"]

            asking = asyncio.create_task(_text(server.handler.backend))
            while (await status("/ready"))[0] == 200:
                await asyncio.sleep(0.01)
            assert "in one step" in (await status("/ready"))[1]
            assert (await status("/health"))[0] == 200  # a step may be slow: no reason to kill the process
            permit.set()
            await asking
            assert await status("/ready") == (200, "ok")

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


def test_an_engine_that_lost_a_process_is_neither_ready_nor_alive(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, deaths = make_engine(), threading.Event()

    def step() -> None:
        raise PeerLost("tensor parallel", "a process is lost", "start the server again")

    monkeypatch.setattr(engine, "step", step)

    async def scenario() -> None:
        backend = InProcessBackend(engine, on_death=deaths.set)
        for _ in range(2):  # the request that finds out, and a later one
            with pytest.raises(PeerLost) as caught:
                await _text(backend)
            assert to_request_error(caught.value).status == 503
        assert await asyncio.to_thread(deaths.wait, TIMEOUT_S)
        assert (backend.models(), backend.health().is_alive) == ([], False)
        assert "a process is lost" in str(backend.died)
        await backend.close()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


async def _text(backend: Backend) -> str:
    request = parse({"prompt": "def add(", "max_tokens": 2, "temperature": 0})
    return "".join([item.text async for item in backend.complete(request) if isinstance(item, CompletionDelta)])


class RecordingTokenizer:
    """Counts the characters that are encoded while the interpreter is held (encode) and released (encode_batch)."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.num_held, self.num_released = inner, 0, 0

    def encode(self, text: str) -> list[int]:
        self.num_held += len(text)
        return list(self._inner.encode(text))

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        self.num_released += sum(map(len, texts))
        return [list(ids) for ids in self._inner.encode_batch(texts)]


@pytest.fixture
def recording(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> RecordingTokenizer:
    incremental = engine.prompts._incremental
    recorder = RecordingTokenizer(incremental._tokenizer)
    monkeypatch.setattr(incremental, "_tokenizer", recorder)
    return recorder


@pytest.mark.parametrize("can_split", [True, False])
@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x = 1; " * 557_143, "suffix": "\n"},  # 3.9 MB in one line
        {"prompt": "x", "suffix": "y" * 1_000_000},
        {"prompt": "z" * 1_000_000, "suffix": ""},
    ],
)
def test_a_megabyte_is_cut_to_the_context_before_it_is_tokenized(
    engine: Engine,
    recording: RecordingTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    body: dict[str, Any],
    can_split: bool,
) -> None:
    monkeypatch.setattr(engine.prompts._incremental, "_can_split", can_split)
    (seq,) = make_sequences(engine, parse({**body, "max_tokens": 4}, f"{can_split}"), 0.0)
    assert 4 < len(seq.prompt) <= engine.spec.context - 4
    assert recording.num_held <= 2 * FEW_CHARS  # prefix and suffix: the engine's thread waits for no more than this
    assert recording.num_released <= 2 * engine.spec.context * MAX_CHARS_PER_TOKEN


def test_a_megabyte_without_a_suffix_is_refused_before_it_is_tokenized(
    engine: Engine, recording: RecordingTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.prompts._incremental, "_longest", None)  # tokens may stand for any text
    with pytest.raises(RequestError) as caught:
        make_sequences(engine, parse({"prompt": "x = 1; " * 200_000}), 0.0)
    assert caught.value.code == "context_length_exceeded"
    assert recording.num_held == recording.num_released == 0


def test_the_end_of_a_long_file_is_completed_and_its_start_moves_in_steps(engine: Engine) -> None:
    text = "".join(f"x{number} = {number}\n" for number in range(500))

    def ids(prompt: str, **fields: Any) -> tuple[int, ...]:
        return make_sequences(engine, parse({"prompt": prompt, "max_tokens": 4, **fields}), 0.0)[0].prompt

    assert ids(text[:20], suffix="") == ids(text[:20])  # nothing follows the cursor: a plain prompt
    end = ids(text, suffix="")
    assert end == tuple(engine.tokenizer.encode(text))[-len(end) :]
    starts = {ids(text[:size], suffix="")[:8] for size in range(3000, 3040)}
    assert len(starts) <= 5  # a cut that moved with every keystroke would miss the prefix cache each time
    with pytest.raises(RequestError, match="more than the context"):
        ids(text)


def test_other_files_come_first_and_never_crowd_out_the_cursor(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    separator = tokenizer.special("<|file_sep|>")
    files = [{"filename": "a.py", "text": "left"}, {"filename": "b.py", "text": "def add"}]

    def ids(**fields: Any) -> tuple[int, ...]:
        return make_sequences(engine, parse({"prompt": "x = ", "max_tokens": 4, **fields}), 0.0)[0].prompt

    context = (separator, *tokenizer.encode("a.py\nleft"), separator, *tokenizer.encode("b.py\ndef add"), separator)
    assert ids(input_extra=files) == context + ids()
    assert ids(input_extra=files, suffix="\n") == context + ids(suffix="\n")
    for size in range(40, 100):  # also where the files leave no token to a file that is nearly empty
        assert ids(prompt="", suffix="\n", input_extra=[{"text": "z" * size}])[-4:] == ids(prompt="", suffix="\n")
    alone = ids(input_extra=[files[1]])
    assert ids(input_extra=[{"text": "z" * 10_000}, files[1]]) == alone  # the last ones matter most
    long = {"prompt": "y = 1\n" * 400, "suffix": "z = 2\n" * 400}
    for order in ("psm", "spm"):
        found = ids(**long, input_extra=[*files, {"text": "q" * 100_000}], order=order)
        assert len(found) <= engine.spec.context - 4
        assert tokenizer.decode(found).count("y = 1") > 3


def test_special_tokens_in_a_prompt_are_read_on_request_only(engine: Engine) -> None:
    special, encode = engine.tokenizer.special, engine.tokenizer.encode

    def ids(text: str, **fields: Any) -> tuple[int, ...]:
        return make_sequences(engine, parse({"prompt": text, "max_tokens": 4, **fields}), 0.0)[0].prompt

    written = "<|fim_prefix|>a<fim_suffix>b<|fim_middle|>"
    expected = (special("<|fim_prefix|>"), *encode("a"), special("<|fim_suffix|>"), *encode("b"))
    assert ids(written, parse_special=True) == (*expected, special("<|fim_middle|>"))
    assert ids(written) == tuple(encode(written))
    assert ids("a", suffix="b") == ids(written, parse_special=True)
    for also in ({"suffix": "x"}, {"heal": True}, {"input_extra": [{"text": "x"}]}):
        with pytest.raises(RequestError, match="parse_special"):
            parse({"prompt": written, "parse_special": True, **also})


def test_the_engine_uses_fewer_threads_beside_busy_processes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds in which one of two threads waits, because another process uses one of two cores."""
    times = [CoreTimes(0.0, 0.0, 0.0, 0.0, 0.0), CoreTimes(2.0, 1.0, 2.0, 4.0, 0.0)]
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    engine.share_cores()
    assert chosen == []  # a fixed number
    threads = ComputeThreads(2, read=lambda: times[0] if len(times) == 1 else times.pop(0), clock=lambda: 2.0)
    monkeypatch.setattr(engine, "compute_threads", threads)
    engine.share_cores()
    assert chosen == [1]


def test_swaps_under_load_fail_nothing_and_every_text_is_of_one_version(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "FINISH_S", TIMEOUT_S)  # a slow machine finishes a text in more than a second
    engine = make_engine()
    prompts = [f"def f{number}(" for number in range(6)]
    sampling = SamplingParams(max_tokens=40)
    versions = [make_engine(seed=seed) for seed in (1, 2)]
    expected = [[one.text for one in version.generate(prompts, sampling)] for version in versions]
    assert all(old != new for old, new in zip(*expected, strict=True))

    async def scenario() -> None:
        backend, is_over = InProcessBackend(engine), threading.Event()

        async def type_on(number: int) -> set[str]:
            found = set()
            while not is_over.is_set():
                request = parse({"prompt": prompts[number], "max_tokens": 40, "temperature": 0})
                *deltas, _ = [item async for item in backend.complete(request)]
                text = "".join(delta.text for delta in deltas)
                assert text in (expected[0][number], expected[1][number])
                found.add(text)
            return found

        users = [asyncio.create_task(type_on(number)) for number in range(len(prompts))]
        for swap in range(5):
            while engine.num_running < len(prompts) - 2:
                await asyncio.sleep(0.001)
            await asyncio.to_thread(engine.swap, make_engine(seed=2 - swap % 2).network)
        is_over.set()
        found = await asyncio.gather(*users)
        assert any(len(texts) == 2 for texts in found)
        assert engine.weights_version == 5
        assert engine.counters.preempted_seqs == 0  # all finished before each swap
        await backend.close()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


def test_the_completion_of_a_file_ends_before_the_next_file(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    next_file, letter = tokenizer.special("<|file_sep|>"), tokenizer.encode("d")[0]

    def reason(**fields: Any) -> tuple[str, str | None]:
        seq = make_sequences(engine, parse({"prompt": "x = ", "max_tokens": 4, **fields}), 0.0)[0]
        for token in (letter, next_file, letter):
            seq.append(token)
        return seq.take_text(), seq.finish_reason

    raw = "<|fim_prefix|>x = <|fim_suffix|>\n<|fim_middle|>"
    for fields in (
        {"suffix": "\n"},
        {"suffix": ""},
        {"input_extra": [{"text": "y"}]},
        {"prompt": raw, "parse_special": True},
    ):
        assert reason(**fields) == ("d", "stop"), fields
    assert reason() == ("dd", None)  # a plain prompt may go on with other files
