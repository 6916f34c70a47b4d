"""The pause of a run for a checkpoint: written in the background, and waited for, in alternation.

    python -m bench.train.checkpoint_stall [--width 512] [--turns 2]

A small model on this CPU, one thread, 12 steps, a checkpoint every 3; figures by the run's own events.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

from lakh import events
from lakh.spec import Checkpoints, Data, Model, Optimizer, Run, Training
from lakh.trainer.loop import train

TOKENS = Path(__file__).resolve().parents[2] / "tests" / "golden" / "tokens-1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--turns", type=int, default=2)
    asked = parser.parse_args()
    width = asked.width
    run = Run(
        name="stall",
        model=Model(layers=6, width=width, heads=8, kv_heads=8, ffn=11 * width // 4, vocab=24000, context=64),
        data=Data(tokens=str(TOKENS), sequence=16, batch=8, micro_batch=8),
        optim=Optimizer(lr=1e-3, warmup_steps=2),
        train=Training(steps=12, eval_every=0, eval_sequences=4, precision="f32", device="cpu", threads=1),
        checkpoint=Checkpoints(every=3, keep=1),
    )
    for _ in range(asked.turns):
        for name, background in (("waited for", "off"), ("in the background", "on")):
            saves = dataclasses.replace(run.checkpoint, background=background)  # type: ignore[arg-type]
            with tempfile.TemporaryDirectory() as folder:
                outcome = train(dataclasses.replace(run, checkpoint=saves), folder)
                found = events.read(folder)
            saved = [event for event in found if isinstance(event, events.CheckpointSaved)]
            steps = sorted(event.step_s for event in found if isinstance(event, events.StepDone))
            stood_s = [round(event.seconds, 2) for event in saved[:-1]]  # the last one is waited for in any case
            print(
                f"{name}: {saved[0].bytes / 1e6:.0f} MB, stood still {stood_s} s, median step "
                f"{steps[len(steps) // 2]:.2f} s, goodput {outcome.goodput['ratio']:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
