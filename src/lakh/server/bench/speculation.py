"""What guessing is worth: the same answers with it and without, on edits of real code, one request at a time.

A prompt holds a function of the standard library, then the same function with a name changed, up to somewhere in its
middle: what an editor asks when someone renames a thing and goes on. Every system continues the same prompts greedily
with the same weights. Time runs from a prompt's first new token to its last; of `repeats` alternating rounds the best
is reported for each. `equal_output` says whether all answers were those of the plain engine; in float32 they must be.

Systems: lakh (no guesses), lakh-ngram (looked up in the text so far), lakh-draft (a smaller model guesses), lakh-both
(whichever is expected to give more at a place). The engine decides by measured cost how many guesses pay, none
included: a speed-up near 1 with few guesses is that decision.
"""

from __future__ import annotations

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
SEEN_SHARE = 0.4  # of the changed text stands in the prompt


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
) -> list[dict[str, Any]]:
    """A row for each system, with the columns of `lakh bench decode` that apply, and what guessing did."""
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
        _continue(engines[name], prompts[:2], new)  # compiles; and the costs of steps get known
    best: dict[str, tuple[float, float]] = {}
    answers: dict[str, list[tuple[int, ...]]] = {}
    for number in range(repeats):
        for name, engine in engines.items():
            progress(f"{name}: round {number + 1} of {repeats}")
            answers[name], wall_s, cpu_s = _continue(engine, prompts, new)
            before = best.get(name, (wall_s, cpu_s))
            best[name] = (min(before[0], wall_s), min(before[1], cpu_s))
    return [_row(name, engines[name], best, answers, prompts, device) for name in engines]


def _continue(engine: Engine, prompts: list[tuple[int, ...]], new: int) -> tuple[list[tuple[int, ...]], float, float]:
    """The answers, and seconds (by the clock, of CPU) for each token after the first."""
    answers, wall_s, cpu_s, num_tokens = [], 0.0, 0.0, 0
    for prompt in prompts:
        row = engine.make_sequence(prompt, SamplingParams(max_tokens=new))
        row.eot = -1  # all make as many
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
        answers.append(tuple(row.tokens))
    return answers, wall_s / num_tokens, cpu_s / num_tokens


def _row(
    name: str,
    engine: Engine,
    best: dict[str, tuple[float, float]],
    answers: dict[str, list[tuple[int, ...]]],
    prompts: list[tuple[int, ...]],
    device: str,
) -> dict[str, Any]:
    counts = engine.counters
    wall_s, cpu_s = best[name]
    plain_wall_s, plain_cpu_s = best["lakh"]
    return {
        "system": name,
        "device": device,
        "params": engine.spec.parameters,
        "dtype": engine.network.precision,
        "batch": 1,
        "prompt": sum(len(prompt) for prompt in prompts) // len(prompts),
        "new": len(answers[name][0]),
        "tok_per_s": 1 / wall_s,
        "cpu_ms_per_token": cpu_s * 1e3,
        # On a CPU by its own time: other work on the machine disturbs the clock.
        "speed_up": plain_wall_s / wall_s if device == "cuda" else plain_cpu_s / cpu_s,
        "guesses": counts.draft_tokens,
        "draft_acceptance": counts.accepted_tokens / counts.draft_tokens if counts.draft_tokens else None,
        "equal_output": answers[name] == answers["lakh"],
    }
