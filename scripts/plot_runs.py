"""Loss curves of runs as one picture: training loss (a running mean) and held-out loss over tokens.

    python scripts/plot_runs.py OUT.svg RUN...          a RUN may be written as RUN=LABEL

Reads the runs' events and nothing else; needs matplotlib (the [plan] extra).
"""

from __future__ import annotations

import sys

import matplotlib as mpl

from lakh import events
from lakh.events import Evaluated, StepDone

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "lakh"  # the same picture, the same bytes

POINTS = 160


def running_mean(values: list[float], width: int) -> list[float]:
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [(sums[i + 1] - sums[max(0, i + 1 - width)]) / min(i + 1, width) for i in range(len(values))]


def main(out: str, *runs: str) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for number, word in enumerate(runs):
        run, _, label = word.partition("=")
        told = list(events.read(run, rank=0))
        steps = [event for event in told if isinstance(event, StepDone)]
        per_step = steps[0].tokens / steps[0].step
        every = max(1, len(steps) // POINTS)
        smooth = running_mean([event.loss for event in steps], 10)
        colour = f"C{number}"
        axes.plot(
            [event.tokens / 1e6 for event in steps][::every],
            smooth[::every],
            colour,
            lw=1,
            label=f"{label or run}, training",
        )
        held = [event for event in told if isinstance(event, Evaluated) and event.step > 0]
        axes.plot(
            [event.step * per_step / 1e6 for event in held],
            [event.loss for event in held],
            f"{colour}o--",
            ms=4,
            lw=0.8,
            label=f"{label or run}, held out",
        )
    axes.set_xlabel("million tokens")
    axes.set_ylabel("loss, nats a token")
    axes.set_ylim(top=min(axes.get_ylim()[1], 4.0))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
