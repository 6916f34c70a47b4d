"""What each codec costs in validation loss: a small code model, the same seed and data for every codec.

    python bench/comm_codecs.py [STEPS [PLOT.svg]]

Two replicas with batches of their own; their gradients are averaged as two hosts of c3 would: each encoded with the
native codec (with or without error feedback), decoded, added in the same order. Both replicas are played in one
process, which gives the numbers of two, since every rank decodes the same bytes. "slow tier only" has two ranks in
each of two hosts: they are added in float32 first, and only the two host sums are encoded. Prints a Markdown table;
the held-out loss on the way is drawn (needs matplotlib), beside that of float32.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch

from lakh.c3 import native
from lakh.spec.collectives import codec_bytes

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
POINTS = 20
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


def train(codec: str, feedback: bool, ranks: int, steps: int) -> list[tuple[int, float]]:
    """(step, held-out loss) on the way; the last one is that of the end."""
    torch.manual_seed(0)
    training, held_out = code()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    parameters = [p for p in model.parameters() if p.requires_grad]
    count = sum(p.numel() for p in parameters)
    residuals = [torch.zeros(count) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    curve = []
    for step in range(steps):
        sums = [torch.zeros(count) for _ in range(2)]  # of each host
        for rank in range(ranks):
            loss = loss_of(model, batch(training, generator, 2 * BATCH // ranks))
            gradients = torch.autograd.grad(loss, parameters)
            sums[rank * 2 // ranks] += torch.cat([g.reshape(-1) for g in gradients])
        seeds = (2 * step, 2 * step + 1)
        arrived = [
            total if codec == "none" else through(codec, total, residual if feedback else None, seed)
            for total, residual, seed in zip(sums, residuals, seeds, strict=True)
        ]
        average = (arrived[0] + arrived[1]) / ranks
        at = 0
        for parameter in parameters:
            parameter.grad = average[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
        optimizer.step()
        if (step + 1) % max(1, steps // POINTS) == 0 or step + 1 == steps:
            curve.append((step + 1, _held_out_loss(model, held_out)))
    return curve


def _held_out_loss(model: Model, held_out: torch.Tensor) -> float:
    with torch.no_grad():
        generator = torch.Generator().manual_seed(2)
        return sum(float(loss_of(model, batch(held_out, generator, 32))) for _ in range(8)) / 8


def draw(path: str, curves: dict[str, list[tuple[int, float]]]) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "lakh"  # the same picture, the same bytes
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(7, 7), sharex=True)
    for name, curve in curves.items():
        base = dict(curves["float32, 4 ranks" if name.endswith(("4 ranks", "slow tier only")) else "float32"])
        above.plot([step for step, _ in curve], [loss for _, loss in curve], label=name, linewidth=1)
        below.plot([step for step, _ in curve], [loss - base[step] for step, loss in curve], linewidth=1)
    above.set(ylabel="held-out loss, nats per byte")
    below.set(xlabel="step", ylabel="beside float32")
    above.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    torch.set_num_threads(1)
    size = sum(p.numel() for p in Model().parameters())
    print(f"{size:,} parameters, {steps} steps, {2 * BATCH} x {CONTEXT} bytes each\n")
    print("| gradients on the wire | bits per value | held-out loss, nats per byte | beside float32 |")
    print("|---|---|---|---|")
    base: dict[int, float] = {}
    curves: dict[str, list[tuple[int, float]]] = {}
    for name, codec, feedback, ranks in VARIANTS:
        curves[name] = train(codec, feedback, ranks, steps)
        loss = curves[name][-1][1]
        base.setdefault(ranks, loss)
        bits = 8 * codec_bytes(codec, 3200) / 3200
        print(f"| {name} | {bits:g} | {loss:.4f} | {loss - base[ranks]:+.4f} |", flush=True)
        if len(sys.argv) > 2 and len(curves) > 1:
            draw(sys.argv[2], curves)


if __name__ == "__main__":
    main()
