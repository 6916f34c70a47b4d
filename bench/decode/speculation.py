"""The value of speculative decoding: the same completions with and without it, on edits of real code.

A prompt holds a function of the standard library, then the beginning of the same function with a name changed, like an
editor's request while someone renames a variable. Every system continues the same prompts greedily with the same
weights, one request at a time. Time runs from a prompt's first new token to its last; the best of `repeats` alternating
rounds counts. `equal_output` is whether all completions equal those of the plain engine; in float32 they must.

Systems: lakh (no speculation), lakh-ngram (prompt lookup), lakh-draft (a draft model), lakh-both (whichever is expected
to give more). The engine decides by measured cost how many tokens to draft, possibly none: a speed-up near 1 with few
drafted tokens is that decision.
"""

from __future__ import annotations

import functools
import inspect
import json
import shutil
import string
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.harness import BenchRow, alternate, best
from lakh.server.engine import Engine, SamplingParams
from lakh.server.model import weights as model_weights
from lakh.tokens.tokenizer import Tokenizer

__all__ = ["bench_speculation", "edit_prompts"]

EDITS: list[tuple[Any, str, str]] = [
    (json.dumps, "indent", "spaces"),
    (textwrap.TextWrapper._wrap_chunks, "chunks", "pieces"),
    (shutil.copytree, "symlinks", "keep_links"),
    (inspect.getmro, "cls", "kind"),
    (string.Template.substitute, "mapping", "values"),
    (shutil.which, "path", "search"),
]
MAX_CHARS = 1600
SEEN_SHARE = 0.4  # of the changed text is in the prompt


def edit_prompts() -> list[str]:
    prompts = []
    for thing, old, new in EDITS:
        source = textwrap.dedent(inspect.getsource(thing))[:MAX_CHARS]
        edited = source.replace(old, new)
        shown = edited[: int(len(edited) * SEEN_SHARE)]
        prompts.append(f"# before\n{source}\n\n# after renaming {old} to {new}\n{shown[: shown.rfind(chr(10)) + 1]}")
    return prompts


def bench_speculation(
    folder: Path,
    *,
    draft: Path | None = None,
    new: int = 64,
    repeats: int = 2,
    progress: Callable[[str], None] = lambda what: None,
) -> list[BenchRow]:
    """A row for each system: the columns of `lakh bench decode` that apply, and the drafted tokens."""
    loaded = model_weights.read(folder)
    tokenizer = Tokenizer.load(loaded.tokenizer_json)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    prompts = [tuple(tokenizer.encode(text))[-(loaded.spec.context - new) :] for text in edit_prompts()]
    engines: dict[str, Engine] = {}
    for name in ("lakh", "lakh-ngram", *(["lakh-draft", "lakh-both"] if draft else [])):
        progress(f"{name}: loading")
        engines[name] = Engine(
            loaded.name,
            loaded.spec,
            loaded.weights,
            tokenizer,
            speculation="lookup" if name in ("lakh-ngram", "lakh-both") else "off",
            draft=model_weights.read(draft) if draft and name in ("lakh-draft", "lakh-both") else None,
        )
        engines[name].warm_up()
        _continue(engines[name], prompts[:2], new)  # compiles, and measures the cost of steps
    outputs: dict[str, list[tuple[int, ...]]] = {}

    def measure(name: str) -> tuple[float, float]:
        outputs[name], wall_s, cpu_s = _continue(engines[name], prompts, new)
        return wall_s, cpu_s

    rounds = alternate({name: functools.partial(measure, name) for name in engines}, repeats, progress=progress)
    times = {name: best(found.measured) for name, found in rounds.items()}
    return [_row(name, engines[name], times, outputs, prompts, device) for name in engines]


def _continue(engine: Engine, prompts: list[tuple[int, ...]], new: int) -> tuple[list[tuple[int, ...]], float, float]:
    """The completions, and wall and CPU seconds per token after the first."""
    outputs, wall_s, cpu_s, num_tokens = [], 0.0, 0.0, 0
    for prompt in prompts:
        row = engine.make_sequence(prompt, SamplingParams(max_tokens=new))
        row.end_ids = ()  # all generate the same number
        engine.submit(row)
        while not row.tokens:
            engine.step()
        first = len(row.tokens)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        while row.finish_reason is None:
            engine.step()
        wall_s += time.perf_counter() - began_s
        cpu_s += time.process_time() - began_cpu_s
        num_tokens += len(row.tokens) - first
        outputs.append(tuple(row.tokens))
    return outputs, wall_s / num_tokens, cpu_s / num_tokens


def _row(
    name: str,
    engine: Engine,
    times: dict[str, list[float]],
    outputs: dict[str, list[tuple[int, ...]]],
    prompts: list[tuple[int, ...]],
    device: str,
) -> BenchRow:
    counts = engine.counters
    wall_s, cpu_s = times[name]
    plain_wall_s, plain_cpu_s = times["lakh"]
    return {
        "system": name,
        "device": device,
        "params": engine.spec.parameters,
        "dtype": engine.network.precision,
        "batch": 1,
        "prompt": sum(len(prompt) for prompt in prompts) // len(prompts),
        "new": len(outputs[name][0]),
        "tok_per_s": 1 / wall_s,
        "cpu_ms_per_token": cpu_s * 1e3,
        # On a CPU by CPU time: other load on the machine disturbs the wall clock.
        "speed_up": plain_wall_s / wall_s if device == "cuda" else plain_cpu_s / cpu_s,
        "guesses": counts.draft_tokens,
        "draft_acceptance": counts.accepted_tokens / counts.draft_tokens if counts.draft_tokens else None,
        "equal_output": outputs[name] == outputs["lakh"],
    }
