"""Infill prompts, stop rules, dialects, API keys and simulated typing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.errors import UserError
from lakh.server.api.api_keys import ApiKeys
from lakh.server.api.dialects import DialectResponse
from lakh.server.api.dialects.llama_cpp import LLAMA_CPP
from lakh.server.api.dialects.mistral import MISTRAL
from lakh.server.engine import Engine, SamplingParams
from lakh.server.loadgen.report import percentiles
from lakh.server.loadgen.typing import arrivals_s, read_source_files, typing_requests
from lakh.server.model.block_pool import BLOCK_TOKENS
from lakh.server.prompts import fim
from lakh.server.request import RequestError, parse
from lakh.server.stopping import StopRule

# --- prompts ---


def prefilled(engine: Engine, order: fim.Order) -> int:
    """Tokens computed for the prompts of a user who types a line, character by character."""
    before, typed, after = "def add(left, right):\n", "    return left + right", "\nclass Size:\n    pass\n" * 2
    total = 0
    for end in range(len(typed) + 1):
        ids = engine.prompts.infill(before + typed[:end], after, 1, order)
        row = engine.make_sequence(ids, SamplingParams(max_tokens=1))
        engine.submit(row)
        while row.finish_reason is None:
            engine.step()
        total += len(ids) - row.num_cached
    return total


def test_typing_in_spm_order_computes_less_than_a_third_of_psm(make_engine: Callable[..., Engine]) -> None:
    spm, psm = (prefilled(make_engine(context=512), order) for order in ("spm", "psm"))
    assert spm <= 0.3 * psm


@given(length=st.integers(1, 5000), room=st.integers(100, 4000))
def test_the_start_of_a_cut_prefix_moves_only_in_steps(length: int, room: int) -> None:
    step = fim.quantum(4096)
    assert step % BLOCK_TOKENS == 0
    ids = tuple(range(length))
    kept = fim.cut_before(ids, room, step)
    assert len(kept) <= room or len(ids) <= room
    assert kept == ids[length - len(kept) :]
    if len(kept) < length and room > step:
        assert kept[0] % step == 0


def test_spm_puts_the_prefix_last(engine: Engine) -> None:
    special, encode = engine.tokenizer.special, engine.tokenizer.encode
    assert engine.prompts.infill("def ", "\n", 8, "spm") == (
        special("<|fim_prefix|>"),
        special("<|fim_suffix|>"),
        *encode("\n"),
        special("<|fim_middle|>"),
        *encode("def "),
    )


# --- stop rules ---


@pytest.mark.parametrize(
    ("kind", "indent", "text", "shown"),
    [
        ("line", 0, "a + b\nmore", "a + b"),
        ("line", 0, "whole", "whole"),
        ("block", 4, "x = 1\n    y = 2\nz = 3", "x = 1\n    y = 2"),
        ("block", 0, "x = 1\n\ny = 2", "x = 1"),
        ("block", 4, "if a:\n        b\n    c\n  d", "if a:\n        b\n    c"),
        ("block", 4, "x\n\ty", "x\n\ty"),
        ("block", 0, "x = 1\r\ny = 2\r\n\r\nz", "x = 1\r\ny = 2"),
        ("line", 0, "a + b\r\nmore", "a + b"),
        ("dedent", 4, "x\n\n  \n    y\n\nz", "x\n\n  \n    y"),
        ("dedent", 4, "x\r\n\r\n    y\r\nz", "x\r\n\r\n    y"),
        ("dedent", 0, "x\n\ny\n", "x\n\ny"),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_stop_rule_is_independent_of_how_the_text_is_split(
    kind: str, indent: int, text: str, shown: str, size: int
) -> None:
    rule = StopRule(kind, indent)
    pieces = [rule.push(text[at : at + size]) for at in range(0, len(text), size)]
    assert "".join(pieces) == shown
    assert rule.found == (shown != text.rstrip())  # only white space is held back at the end


# --- dialects and keys ---


def test_llama_cpp_fields_become_openai_fields() -> None:
    body = {"input_prefix": "def f(", "input_suffix": "\n", "n_predict": 5, "seed": -1, "t_max_predict_ms": 500}
    request = parse(LLAMA_CPP.to_openai(body))
    assert (request.prompts, request.suffix, request.sampling.max_tokens) == (("def f(",), "\n", 5)
    assert (request.sampling.seed, request.generation_s, request.sampling.temperature) == (None, 0.5, 0.8)
    assert parse({"prompt": "x", "model": ""}).model is None
    assert request.timeout_s is None  # llama.cpp does not count the time in the queue and of the prompt
    assert parse(LLAMA_CPP.to_openai({**body, "n_predict": 0})).sampling.max_tokens == 1  # to warm the cache
    with pytest.raises(RequestError, match="input_prefix"):
        LLAMA_CPP.to_openai({"input_prefix": 3})
    choice = {"index": 0, "text": "x", "logprobs": None, "finish_reason": "stop"}
    usage = {"completion_tokens": 1, "prompt_tokens": 4, "prompt_tokens_details": {"cached_tokens": 3}}
    answer = LLAMA_CPP.render(DialectResponse({"model": "m"}, [choice], usage, is_delta=False))
    assert (answer["content"], answer["stop"], answer["tokens_predicted"]) == ("x", True, 1)


def test_mistral_fields_become_openai_fields() -> None:
    assert parse(MISTRAL.to_openai({"prompt": "a", "suffix": "b", "random_seed": 7})).sampling.seed == 7
    choice = {"index": 0, "text": "x", "logprobs": None, "finish_reason": None}
    piece = MISTRAL.render(DialectResponse({"model": "m"}, [choice], None, is_delta=True))
    assert piece["choices"][0]["delta"]["content"] == "x"
    assert piece["object"] == "chat.completion.chunk"


def test_keys_identify_their_tenant(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nsecret-one a\n\nsecret-two b\n")
    keys = ApiKeys.load(str(path))
    found = [keys.tenant(key) for key in ("secret-one", "secret-two", "secret-thr", "", "\udcff")]
    assert found == ["a", "b", None, None, None]
    for text in ("", "short a", "only-a-key", "one two three\n"):
        path.write_text(text)
        with pytest.raises(UserError, match="KEY TENANT"):
            ApiKeys.load(str(path))
    with pytest.raises(UserError, match="cannot be read"):
        ApiKeys.load(str(tmp_path / "nothing"))


# --- simulated typing ---


def test_a_typing_user_retypes_the_file_and_repeats_with_the_seed(tmp_path: Path) -> None:
    text = "".join(f"def function_{number}(argument):\n    return argument + {number}\n" for number in range(80))
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "short.py").write_text("x = 1\n")
    files = read_source_files(tmp_path)
    assert [name for name, _ in files] == ["a.py"]
    typing_user, again = typing_requests(3, files, random.Random(1)), typing_requests(3, files, random.Random(1))
    asks = [next(typing_user) for _ in range(200)]
    assert asks == [next(again) for _ in range(200)]
    for ask in asks:
        assert text.startswith(ask.prefix)
        assert text.endswith(ask.suffix)
    grew = [
        later.prefix.startswith(ask.prefix) and later.suffix == ask.suffix for ask, later in itertools.pairwise(asks)
    ]
    assert sum(grew) > 150
    with pytest.raises(UserError, match="no Python file"):
        read_source_files(tmp_path / "nowhere")


def test_the_number_of_arrivals_follows_the_rate() -> None:
    times = list(arrivals_s(50.0, 100.0, random.Random(2)))
    assert abs(len(times) - 5000) < 5 * 5000**0.5  # five standard deviations of a Poisson count
    assert times == sorted(times)
    assert percentiles([]) == {"p50": None, "p95": None, "p99": None}
    assert percentiles([0.001 * n for n in range(1, 101)])["p50"] == pytest.approx(51.0)
