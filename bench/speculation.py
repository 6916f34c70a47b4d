"""Does the draft pay? The same prompts with and without guesses: tokens a second, tokens kept, equal output.

    python bench/speculation.py TARGET DRAFT TEXTS [--prompts 12] [--tokens 64] [--precision f32]

Prompts are the beginnings (some 40 lines) of files in TEXTS that neither model has seen, one request at a time, greedy.
Each way is warmed up, then all ways take turns, prompt by prompt, so that a busy machine hurts them alike. Wall and
processor time are both printed; on a shared machine the second is the one to believe.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from pathlib import Path

import torch

from lakh.server.engine import Engine
from lakh.server.sampling import Sampling

LINES = 40


def prompts_of(folder: Path, count: int) -> list[str]:
    """The first lines of files that go on after them."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        if len(lines) >= 3 * LINES:
            found.append("".join(lines[: 2 * LINES][-LINES:]))
    step = max(1, len(found) // count)
    return found[::step][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure speculation with a pair of models.")
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("texts", type=Path)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--precision", choices=["f32", "bf16"], default=None)
    asked = parser.parse_args()
    prompts = prompts_of(asked.texts, asked.prompts)
    sampling = Sampling(max_tokens=asked.tokens, temperature=0.0)
    ways = {
        "plain": Engine.load(asked.target, precision=asked.precision),
        "lookup": Engine.load(asked.target, precision=asked.precision, speculation="lookup"),
        "draft": Engine.load(asked.target, precision=asked.precision, draft=asked.draft),
    }
    for engine in ways.values():
        engine.generate(prompts[:2], sampling)
    before = {name: (engine.counts.drafted_tokens, engine.counts.kept_tokens) for name, engine in ways.items()}
    wall_s: dict[str, list[float]] = {name: [] for name in ways}
    cpu_s: dict[str, list[float]] = {name: [] for name in ways}
    texts: dict[str, list[str]] = {name: [] for name in ways}
    tokens: dict[str, int] = dict.fromkeys(ways, 0)
    for prompt in prompts:
        for name, engine in ways.items():
            began_s, cpu_began_s = time.perf_counter(), time.process_time()
            done = engine.generate([prompt], sampling)[0]
            wall_s[name].append(time.perf_counter() - began_s)
            cpu_s[name].append(time.process_time() - cpu_began_s)
            texts[name].append(done.text)
            tokens[name] += len(engine.encode(done.text)) if done.text else 0
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    threads = torch.get_num_threads()
    print(f"{device}, {threads} threads, {asked.precision or 'default precision'}, torch {torch.__version__}")
    print(f"{len(prompts)} prompts of {LINES} lines, up to {asked.tokens} tokens each, greedy, one at a time\n")
    print("| way | tok/s | times plain | CPU s | times plain | guesses kept | equal output |")
    print("|---|---|---|---|---|---|---|")
    for name, engine in ways.items():
        drafted = engine.counts.drafted_tokens - before[name][0]
        kept = engine.counts.kept_tokens - before[name][1]
        wall, cpu = sum(wall_s[name]), sum(cpu_s[name])
        ratio = statistics.geometric_mean(a / b for a, b in zip(wall_s["plain"], wall_s[name], strict=True))
        cpu_ratio = sum(cpu_s["plain"]) / cpu
        same = sum(a == b for a, b in zip(texts["plain"], texts[name], strict=True))
        share = f"{kept / drafted:.0%} of {drafted}" if drafted else "-"
        print(
            f"| {name} | {tokens[name] / wall:,.1f} | {ratio:.2f} | {cpu:.1f} | {cpu_ratio:.2f} | {share} "
            f"| {same} of {len(prompts)} |"
        )


if __name__ == "__main__":
    main()
