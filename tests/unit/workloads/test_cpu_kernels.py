"""The CPU kernels compute what the plain operations do, with their gradients, and are chosen only where they pay."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lakh.spec import Model, Training
from lakh.workloads.code import ops
from lakh.workloads.code.acceleration import choose_ops
from lakh.workloads.code.attention import Documents, sdpa_attention
from lakh.workloads.code.kernels import cpu

pytestmark = pytest.mark.slow

SPEC = Model(layers=1, width=32, heads=4, kv_heads=2, ffn=48, vocab=64, context=32)


def heads(rows: int, tokens: int, kv_heads: int, group: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys and values, B T H D."""
    generator = torch.Generator().manual_seed(tokens)
    numbers = (kv_heads * group, kv_heads, kv_heads)
    drawn = [torch.randn(rows, tokens, number, 8, generator=generator, dtype=dtype) for number in numbers]
    return [x.requires_grad_() for x in drawn]


def documents_of(rows: int, tokens: int, length: int) -> Documents:
    starts = sorted({*range(0, rows * tokens, length), *range(0, rows * tokens + 1, tokens)})
    return Documents.padded(torch.tensor(starts, dtype=torch.int32), length, tokens)


@settings(max_examples=30)
@given(
    rows=st.integers(1, 3),
    tokens=st.integers(1, 150),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    length=st.one_of(st.none(), st.integers(1, 90)),
)
def test_blocked_attention_equals_plain_attention(
    rows: int, tokens: int, kv_heads: int, group: int, length: int | None
) -> None:
    documents = None if length is None else documents_of(rows, tokens, length)
    parts = heads(rows, tokens, kv_heads, group, torch.float32)
    want, got = (kernel(*parts, documents) for kernel in (sdpa_attention, cpu.blocked_attention))
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)
    toward = torch.randn(want.shape, generator=torch.Generator().manual_seed(0))
    for a, b in zip(*(torch.autograd.grad(y, parts, toward) for y in (got, want)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_gradients_match_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "BLOCK", 3)
    packed = documents_of(2, 7, 4)
    for documents in (None, packed):
        parts = heads(2, 7, 2, 2, torch.float64)
        assert torch.autograd.gradcheck(lambda *x, d=documents: cpu.blocked_attention(*x, d), parts)
    assert torch.autograd.gradcheck(cpu.swiglu, torch.randn(3, 10, dtype=torch.float64, requires_grad=True))


def test_swiglu_equals_the_plain_form() -> None:
    x = 4 * torch.randn(5, 7, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(cpu.swiglu(x), ops.swiglu(x), atol=2e-6, rtol=1e-6)


def test_large_layers_and_half_precision_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(cpu, "sdpa_attention", lambda *parts: called.append(parts[0].dtype) or sdpa_attention(*parts))
    monkeypatch.setattr(cpu, "SAVED_BYTES", 16 * 16 // 2 * 4)
    cpu.blocked_attention(*heads(1, 16, 1, 1, torch.float32), None)
    assert called == []
    cpu.blocked_attention(*heads(1, 17, 1, 1, torch.float32), None)
    cpu.blocked_attention(*heads(1, 4, 1, 1, torch.bfloat16), None)
    assert called == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("machine", "options", "by_blocks"),
    [
        ("aarch64", {}, True),
        ("x86_64", {}, False),
        ("aarch64", {"attention": "torch"}, False),
        ("aarch64", {"recompute": "full"}, False),
        ("aarch64", {"kernels": False}, False),
    ],
)
def test_blocked_attention_is_chosen_where_it_is_faster(
    machine: str, options: dict[str, object], by_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    kernels = bool(options.pop("kernels", True))
    settings = Training(**options)  # type: ignore[arg-type]
    ops, _, found = choose_ops(SPEC, settings, kernels=kernels, bf16=False, device="cpu")
    choices = {choice.what: choice for choice in found}
    assert (ops.attention is cpu.blocked_attention) == by_blocks
    assert (choices["attention"].choice == "blocked") == by_blocks


FAULTS = """
import resource, sys, time
if sys.argv[1] == "keep":
    from lakh.trainer.tuning.memory import keep_freed_memory
    keep_freed_memory()
import torch
def use():
    [torch.ones(1 << 22) for _ in range(8)]
    time.sleep(0.05)  # the allocator hands back what has been free for 10 ms
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8): use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


CHECK_ALLOCATOR = """
import os, sys
import lakh.trainer.tuning.memory as memory
memory.keep_freed_memory = lambda: os._exit(3 if "torch" in sys.modules else 42)
from lakh.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("words", [["train", "recipes/laptop.py"], ["bench", "train"]])
def test_the_allocator_is_configured_before_torch_is_imported(words: list[str], tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "run")]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, "-c", CHECK_ALLOCATOR, *words, *out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **rank})
    assert done.returncode == 42, done.stderr


@pytest.mark.skipif(platform.machine() != "aarch64", reason="torch's allocator is mimalloc on ARM only")
@pytest.mark.slow
def test_freed_memory_is_reused() -> None:
    as_found = {name: value for name, value in os.environ.items() if name != "MIMALLOC_PURGE_DELAY"}

    def faults(how: str) -> int:
        command = [sys.executable, "-c", FAULTS, how]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=as_found)
        return int(done.stdout)

    plain = faults("plain")  # few even so where the system has pages of 2 MB
    if plain < 8:
        pytest.skip("torch's allocator on this machine keeps freed memory by itself")
    assert faults("keep") < plain / 4
