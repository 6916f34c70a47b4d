"""The cost of each codec in validation loss: a small code model, the same seeds and data for every codec.

    python -m bench.comm.codecs train CURVES.json [--steps 1500] [--seed 0] [--only NAME]...
    python -m bench.comm.codecs show CURVES.json... [--plot PLOT.svg]   # one file a seed: a table and a picture

Two replicas with batches of their own; their gradients are averaged as two hosts of c3 would: each encoded with the
native codec (with or without error feedback), decoded, added in the same order. Both replicas are played in one
process, which gives the numbers of two, since every rank decodes the same bytes. "slow tier only" has two ranks in
each of two hosts: they are added in float32 first, and only the two host sums are encoded.

Noise: float32 with four ranks sees the same data as with two and differs in the order of additions alone; what is
smaller than that difference, or changes sign from seed to seed, is no cost of a codec. The plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
from pathlib import Path
from typing import Any

import torch

from lakh.c3 import native
from lakh.spec.schedule import codec_bytes

VARIANTS = [
    ("float32", "none", False, 2),
    ("bf16, stochastic", "bf16", False, 2),
    ("int8", "int8", False, 2),
    ("int8 + feedback", "int8", True, 2),
    ("int4", "int4", False, 2),
    ("int4 + feedback", "int4", True, 2),
    ("float32, 4 ranks", "none", False, 4),
    ("int4 + feedback, slow tier only", "int4", True, 4),
]
CONTEXT, BATCH, WIDTH, LAYERS = 64, 8, 96, 2
PEAK_LR, LAST_LR = 2e-3, 2e-4
POINTS = 15
"""Of each curve."""


class Model(torch.nn.Module):
    """Bytes in, next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(256, WIDTH)
        self.place = torch.nn.Embedding(CONTEXT, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.body = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, 256)
        self.register_buffer("mask", torch.nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        return self.head(self.body(x, mask=self.mask, is_causal=True))


def code() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of the standard library: a training and a held-out part."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:120]
    text = b"".join(path.read_bytes() for path in paths)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


def batch(data: torch.Tensor, generator: torch.Generator, rows: int = BATCH) -> torch.Tensor:
    starts = torch.randint(len(data) - CONTEXT - 1, (rows,), generator=generator)
    return torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()])


def loss_of(model: Model, rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def through(codec: str, values: torch.Tensor, residual: torch.Tensor | None, seed: int) -> torch.Tensor:
    """What arrives of `values`, by the native codec."""
    library = native.require_library()
    count = values.numel()
    wire = torch.empty(max(1, codec_bytes(codec, count)), dtype=torch.uint8)
    out = torch.empty(count)
    number = native.CODECS[codec]
    library.lakh_c3_encode(
        number, values.data_ptr(), count, seed, wire.data_ptr(), residual.data_ptr() if residual is not None else None
    )
    library.lakh_c3_decode(number, wire.data_ptr(), count, out.data_ptr(), 0)
    return out


def train(codec: str, feedback: bool, ranks: int, steps: int, seed: int) -> list[tuple[int, float]]:
    """(step, held-out loss) on the way; the last one is that of the end."""
    torch.manual_seed(seed)
    training, held_out = code()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), PEAK_LR)
    parameters = [p for p in model.parameters() if p.requires_grad]
    count = sum(p.numel() for p in parameters)
    residuals = [torch.zeros(count) for _ in range(2)]
    generator = torch.Generator().manual_seed(1000 + seed)
    curve = []
    for step in range(steps):
        sums = [torch.zeros(count) for _ in range(2)]  # of each host
        for rank in range(ranks):
            loss = loss_of(model, batch(training, generator, 2 * BATCH // ranks))
            gradients = torch.autograd.grad(loss, parameters)
            sums[rank * 2 // ranks] += torch.cat([g.reshape(-1) for g in gradients])
        seeds = (2 * step, 2 * step + 1)
        arrived = [
            total if codec == "none" else through(codec, total, residual if feedback else None, noise)
            for total, residual, noise in zip(sums, residuals, seeds, strict=True)
        ]
        average = (arrived[0] + arrived[1]) / ranks
        at = 0
        for parameter in parameters:
            parameter.grad = average[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
        optimizer.param_groups[0]["lr"] = PEAK_LR + (LAST_LR - PEAK_LR) * step / steps
        optimizer.step()
        if (step + 1) % max(1, steps // POINTS) == 0 or step + 1 == steps:
            curve.append((step + 1, _held_out_loss(model, held_out)))
    return curve


def _held_out_loss(model: Model, held_out: torch.Tensor) -> float:
    with torch.no_grad():
        generator = torch.Generator().manual_seed(2)
        return sum(float(loss_of(model, batch(held_out, generator, 32))) for _ in range(8)) / 8


def base_of(name: str) -> str:
    """Whose arithmetic a variant has, but for the codec."""
    return "float32, 4 ranks" if name.endswith("slow tier only") else "float32"


def draw(path: str, runs: list[dict[str, Any]]) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "lakh"  # the same picture, the same bytes
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(7.5, 8), sharex=True)
    for number, (name, *_) in enumerate(VARIANTS):
        for run in (run for run in runs if name in run["curves"]):
            curve, base = run["curves"][name], dict(run["curves"][base_of(name)])
            style: dict[str, Any] = {"color": f"C{number}", "linewidth": 1}
            steps = [step for step, _ in curve]
            above.plot(steps, [loss for _, loss in curve], label=name if run is runs[0] else None, **style)
            below.plot(steps, [loss - base[step] for step, loss in curve], marker=".", markersize=3, **style)
    above.set(
        ylabel="held-out loss, nats per byte",
        title=f"seeds {', '.join(str(run['seed']) for run in runs)}: one line each",
    )
    below.set(xlabel="step", ylabel="beside float32 of the same seed")
    below.axhline(0, color="black", linewidth=0.5)
    above.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def train_all(path: Path, steps: int, seed: int, only: list[str]) -> None:
    """All variants with one seed, or only those named; what the file holds already is not trained again."""
    torch.set_num_threads(1)
    run: dict[str, Any] = {"steps": steps, "seed": seed, "curves": {}}
    if path.exists():
        kept = json.loads(path.read_text())
        if (kept["steps"], kept["seed"]) != (steps, seed):
            raise SystemExit(f"{path}: holds seed {kept['seed']}, {kept['steps']} steps; name another file")
        run = kept
    for name, codec, feedback, ranks in VARIANTS:
        if name not in run["curves"] and (not only or name in only):
            run["curves"][name] = train(codec, feedback, ranks, steps, seed)
            path.write_text(json.dumps(run))
            print(f"seed {seed}, {name}: {run['curves'][name][-1][1]:.4f}", flush=True)


def show(runs: list[dict[str, Any]]) -> None:
    size = sum(p.numel() for p in Model().parameters())
    seeds = ", ".join(str(run["seed"]) for run in runs)
    print(f"{size:,} parameters, {runs[0]['steps']} steps of {2 * BATCH} x {CONTEXT} bytes, seeds {seeds}\n")
    print("Beside float32 of the same seed, one figure a seed: at the end, and over the whole curve.\n")
    print("| gradients on the wire | bits per value | held-out loss | at the end | over the curve |")
    print("|---|---|---|---|---|")
    for name, codec, _, _ in VARIANTS:
        pairs = [(run["curves"][name], run["curves"][base_of(name)]) for run in runs if name in run["curves"]]
        if not pairs:
            continue
        losses = [curve[-1][1] for curve, _ in pairs]
        beside = [[loss - at[1] for (_, loss), at in zip(curve, base, strict=True)] for curve, base in pairs]
        bits = 8 * codec_bytes(codec, 3200) / 3200
        end = ", ".join(f"{differences[-1]:+.4f}" for differences in beside)
        whole = ", ".join(f"{statistics.mean(differences):+.4f}" for differences in beside)
        print(f"| {name} | {bits:g} | {', '.join(f'{loss:.4f}' for loss in losses)} | {end} | {whole} |")
    floats = [run["curves"]["float32"][-1][1] for run in runs if "float32" in run["curves"]]
    if len(floats) > 1:
        print(f"\nfloat32 of each seed: {', '.join(f'{x:.4f}' for x in floats)} (s = {statistics.stdev(floats):.4f})")


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of each codec in validation loss.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("train")
    one.add_argument("curves", type=Path)
    one.add_argument("--steps", type=int, default=1500)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--only", action="append", default=[], choices=[name for name, *_ in VARIANTS])
    both = commands.add_parser("show")
    both.add_argument("curves", type=Path, nargs="+")
    both.add_argument("--plot", default="")
    given = parser.parse_args()
    if given.command == "train":
        train_all(given.curves, given.steps, given.seed, given.only)
        return
    runs = [json.loads(path.read_text()) for path in given.curves]
    show(runs)
    if given.plot:
        draw(given.plot, runs)


if __name__ == "__main__":
    main()
