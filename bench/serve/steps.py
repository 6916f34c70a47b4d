"""Host time of an engine step on a GPU, measured without one: the model's graphs are replaced by a known text.

    python -m bench.serve.steps [--live 6] [--requests 300] [--profile]

Runs the real engine, scheduler, speculation, sampler, detokenizer and the inputs of `PrefillGraphs` and `Decoder` on
CPU tensors. A step's graph only writes the tokens that follow in a text of the standard library, and its time is
subtracted. `--live` sequences of 1,000 to 1,900 cached prompt tokens always run, each for up to 32 tokens with a stop
string, drafts from prompt lookup. Prints the median step and the CPU time of a request in microseconds, the best of
several runs, and the parts of a step: medians of a second pass, because measuring costs time. Needs Triton, which the
modules of the GPU import, and no GPU.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.serve.overhead import sources, tiny_model
from lakh.server.engine import Engine, SamplingParams
from lakh.server.model.gpu import decode as decode_gpu
from lakh.server.model.gpu import prefill as prefill_gpu
from lakh.server.model.runner import StepLimits
from lakh.server.stopping import StopRule

NEW, LEAST, MOST = 32, 1000, 1900
REPEATED, CHANGED = 150, 0.07  # the text repeats this many tokens, of which this share differs: acceptance about 0.7
# Milliseconds of a step by its tokens, with 1.2B parameters on an H200 (bench/results/serve_NVIDIA-H200_2026-11-18.md):
# they decide how many draft tokens are proposed.
STEP_MS = {1: 0.68, 2: 1.11, 4: 1.19, 8: 1.33, 15: 1.63, 18: 1.81, 32: 2.0, 64: 2.56}
PARTS = {
    "admit": "scheduler.admit",
    "deadlines": "scheduler.abort_expired",
    "propose": "_proposer.propose",
    "schedule": "scheduler.schedule",
    "inputs, launch": "runner.launch",
    "start decode-ahead": "runner.decoder.multi_step",
    "finish_step": "scheduler.finish_step",
    "record step": "_proposer.record_step",
}


class KnownText:
    """In place of a model: the token after position p of every sequence is text[p + 1]."""

    def __init__(self, engine: Engine) -> None:
        ids, numbers = engine.prompts.encode("\n".join(sources())), random.Random(3)
        repeated = (ids[:REPEATED] * (engine.spec.context // REPEATED + 2))[: engine.spec.context + NEW]
        changed = [numbers.choice(ids) if numbers.random() < CHANGED else token for token in repeated]
        self.text = torch.tensor(changed, dtype=torch.int32)
        self.spent_s, self.scripted_s = 0.0, list[float]()
        self.num_ids = engine.tokenizer.vocab_size
        text = self

        class Decode(decode_gpu.Decoder):
            def _step(self, batch: Any, layers: Any = None, attention: Any = None) -> None:
                text.decode(batch)

        runner = engine.runner
        runner.prefill = prefill_gpu.PrefillGraphs(engine.network, engine.cache, use_graphs=False)
        runner.decoder = Decode(engine.network, engine.cache, use_graphs=False)
        runner.step_limits = StepLimits(prefill_gpu.BUCKETS[-1], 256)
        runner.warm_up()
        for bucket in runner.prefill._buckets.values():
            bucket.replay = partial(self.score, bucket)
        assert engine._proposer is not None
        for size, step_ms in STEP_MS.items():
            engine._proposer.record_step(size, step_ms / 1e3)
        engine._proposer._costs.record = lambda num_tokens, seconds: None  # type: ignore[method-assign]

    def score(self, bucket: Any) -> None:
        began_s = time.perf_counter()
        places = bucket["scored"].long()
        if not len(bucket.logits):
            bucket.logits = torch.zeros(len(places), self.num_ids)
        bucket.most_likely = self.text[(bucket["positions"][places] + 1).long()].long()
        bucket.logits.zero_()
        bucket.logits[torch.arange(len(places)), bucket.most_likely] = 1.0
        self._count(time.perf_counter() - began_s)

    def decode(self, batch: Any) -> None:
        began_s = time.perf_counter()
        batch.positions += 1
        batch.tokens[:] = self.text[batch.positions.long()]
        batch.history[batch.steps.long(), torch.arange(len(batch))] = batch.tokens
        batch.steps += 1
        if not len(batch.logits):
            batch.logits = torch.zeros(len(batch), self.num_ids)
        self._count(time.perf_counter() - began_s)

    def _count(self, seconds: float) -> None:
        self.spent_s += seconds
        self.scripted_s.append(seconds)


class Load:
    """Keeps `live` sequences running."""

    def __init__(self, engine: Engine, text: KnownText, live: int) -> None:
        self._engine, self._text, self._live = engine, text, live
        self._random = random.Random(7)
        self._seqs: list[Any] = []
        self.num_done = self.num_pieces = 0

    def run(self, num_requests: int) -> dict[str, float]:
        engine, text = self._engine, self._text
        self.num_done = self.num_pieces = num_steps = 0
        steps_s = []
        tokens = engine.counters.computed_tokens
        drafted, accepted = engine.counters.draft_tokens, engine.counters.accepted_tokens
        generated = engine.counters.generated_tokens
        text.scripted_s.clear()
        cpu_s = time.thread_time()
        while self.num_done < num_requests:
            while len(self._seqs) < self._live:
                self._seqs.append(self._submit())
            began_s, spent_s = time.perf_counter(), text.spent_s
            engine.step()
            for seq in self._seqs:
                self.num_pieces += seq.take_chunk() is not None
            steps_s.append(time.perf_counter() - began_s - (text.spent_s - spent_s))
            self.num_done += sum(seq.finish_reason is not None for seq in self._seqs)
            self._seqs = [seq for seq in self._seqs if seq.finish_reason is None]
        cpu_s = time.thread_time() - cpu_s - len(text.scripted_s) * statistics.median(text.scripted_s)
        num_steps = len(steps_s)
        return {
            "median_us_a_step": statistics.median(steps_s) * 1e6,
            "cpu_us_a_request": cpu_s / self.num_done * 1e6,
            "steps_a_request": num_steps / self.num_done,
            "pieces_a_request": self.num_pieces / self.num_done,
            "tokens_a_request": (engine.counters.generated_tokens - generated) / self.num_done,
            "tokens_a_step": (engine.counters.computed_tokens - tokens) / num_steps,
            "acceptance": (engine.counters.accepted_tokens - accepted) / max(engine.counters.draft_tokens - drafted, 1),
        }

    def _submit(self) -> Any:
        size = self._random.randrange(LEAST, MOST)
        prompt = tuple(self._text.text[:size].tolist())
        sampling = SamplingParams(max_tokens=NEW, stop=("\n\n\n\n",))
        seq = self._engine.make_sequence(
            prompt, sampling, deadline_s=self._engine.clock() + 60, stop_rules=(StopRule("dedent", 0),)
        )
        self._engine.submit(seq)
        return seq


def time_parts(engine: Engine, text: KnownText) -> dict[str, list[float]]:
    """Wraps the parts; their seconds without the graphs', call by call."""
    took: dict[str, list[float]] = defaultdict(list)

    def wrap(owner: Any, name: str, part: str) -> None:
        action: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            began_s, spent_s = time.perf_counter(), text.spent_s
            try:
                return action(*args, **options)
            finally:
                took[part].append(time.perf_counter() - began_s - (text.spent_s - spent_s))

        setattr(owner, name, timed)

    for part, path in PARTS.items():
        owner: Any = engine
        *steps, name = path.split(".")
        for step in steps:
            owner = getattr(owner, step)
        if not hasattr(owner, name):
            name = "forward"  # before `launch`
        wrap(owner, name, part)
    from lakh.server import engine as engine_module

    wrap(engine_module, "sample_batch", "sample, append")
    return took


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--live", type=int, default=6)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.load(str(tiny_model(Path(folder))), speculation="lookup")
    text = KnownText(engine)
    load = Load(engine, text, options.live)
    load.run(options.requests)
    gc.collect()
    gc.freeze()
    runs = [load.run(options.requests) for _ in range(options.repeats)]
    found: dict[str, Any] = {
        name: round(value, 2) for name, value in min(runs, key=lambda run: run["cpu_us_a_request"]).items()
    }
    if options.profile:
        profile = cProfile.Profile()
        profile.enable()
        load.run(options.requests)
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    took = time_parts(engine, text)
    steps_before = engine.counters.steps
    load.run(options.requests)
    num_steps = engine.counters.steps - steps_before
    found["parts_us_a_step"] = {
        part: round(statistics.median(each) * len(each) / num_steps * 1e6, 1) for part, each in took.items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
