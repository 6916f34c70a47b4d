"""What rounding to 8 bits does to the gradient of a model, operand by operand, and by how much it slows Adam down.

    python -m bench.train.gradient_error [--shape demo] [--steps 300] [--batches 64] [--sequences 8] [--length 64]

A model learns the bytes of Python's standard library. Its weights are then kept, and the gradients of the same batches
are computed with each emulated recipe. A row is relative to the gradient g in the recipe of the training (`--exact`):

    error     the mean of |rounded g - g|^2 / |g|^2, of batches of 1, 2 and 4 times the size
    bias      the part of the mean error in the direction of the mean gradient, / |mean g|
    slower    how much less an update of Adam reduces the loss, in first order: the update is m / sqrt(v) with m the
              mean and v the mean square of the rounded gradients of batches, and the reduction is its product with the
              gradient of other batches

The batches are the same for all recipes, so that small differences show without many runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.train.byte_training import VOCAB, source_bytes, train_on_bytes
from bench.train.emulated_fp8 import EMULATED, emulated_linear
from bench.train.shapes import SHAPES, BenchShape, BenchSystem
from lakh.workloads.code.model import CodeModel

__all__ = ["GradientError", "gradient_errors"]

GROUPS = (1, 2, 4)
"""Batches that one gradient is the mean of."""
EPS = 1e-12


@dataclass(frozen=True)
class GradientError:
    recipe: str
    error: tuple[float, ...]
    """For each of GROUPS, as `slower`."""
    bias: float
    slower: tuple[float, ...]


def gradient_errors(
    model: CodeModel, shape: BenchShape, recipes: list[str], batches: int, exact_recipe: str | None = None
) -> Iterator[GradientError]:
    """`shape` is that of a batch. The memory of 4 x `batches` gradients is needed."""
    rows = _batches(shape, 2 * batches)
    exact = _gradients(model, exact_recipe, rows)
    ahead, exact = exact[:batches].mean(0), exact[batches:]
    mean = exact.mean(0)
    plain = [_reduction(exact, group, ahead) for group in GROUPS]
    for recipe in recipes:
        rounded = _gradients(model, recipe, rows[batches:])
        error = rounded - exact
        yield GradientError(
            recipe,
            tuple(_share(_means(error, group), _means(exact, group)) for group in GROUPS),
            float(error.mean(0) @ mean / (mean @ mean)),
            tuple(1 - _reduction(rounded, group, ahead) / before for group, before in zip(GROUPS, plain, strict=True)),
        )


def _means(gradients: Tensor, group: int) -> Tensor:
    return gradients.unflatten(0, (-1, group)).mean(1)


def _share(error: Tensor, exact: Tensor) -> float:
    return float((error.square().sum(1) / exact.square().sum(1)).mean())


def _reduction(gradients: Tensor, group: int, ahead: Tensor) -> float:
    """Of the loss by an update of Adam, in first order and for a learning rate of 1."""
    found = _means(gradients, group)
    return float((found.mean(0) / (found.square().mean(0).sqrt() + EPS)) @ ahead)


def _gradients(model: CodeModel, recipe: str | None, rows: Tensor) -> Tensor:
    """One gradient of all weights for each batch."""
    linear = F.linear if recipe is None else emulated_linear(recipe)
    model.set_ops(replace(model.ops, linear=linear))
    found = []
    for batch in rows:
        model.zero_grad()
        model(batch[:, :-1], targets_BT=batch[:, 1:]).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return torch.stack(found)


def _batches(shape: BenchShape, count: int) -> Tensor:
    """Sequences that no step of the training had, by chance of the seed."""
    data, _ = source_bytes()
    generator = torch.Generator().manual_seed(1 << 20)
    starts = torch.randint(0, len(data) - shape.sequence - 1, (count, shape.micro_batch), generator=generator)
    return data[starts[..., None] + torch.arange(shape.sequence + 1)].long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="demo", choices=SHAPES)
    parser.add_argument("--steps", type=int, default=300, help="of the training")
    parser.add_argument("--batches", type=int, default=64, help="whose gradients are compared, a multiple of 4")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recipes", default=",".join(EMULATED))
    parser.add_argument("--exact", choices=EMULATED, help="recipe of training and of g; float32 by default")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    model = replace(shape.model, vocab=VOCAB, tied=False)
    shape = replace(shape, model=model, sequence=options.length, micro_batch=options.sequences)
    plain = BenchSystem("f32", precision="f32", compile="none")
    exact = replace(plain, precision="emulated-fp8", recipe=options.exact) if options.exact else plain
    trained = train_on_bytes(
        shape, exact, options.steps, lr=options.lr, embedding_std=1.0, evaluated_as=plain, seed=options.seed
    )
    print(
        f"{shape.model.parameters:,} parameters, loss after {options.steps} steps {trained.losses[-1]:.3f}", flush=True
    )
    assert isinstance(trained.model, CodeModel)
    for row in gradient_errors(trained.model, shape, options.recipes.split(","), options.batches, options.exact):
        errors, slower = (" ".join(f"{x:8.3%}" for x in part) for part in (row.error, row.slower))
        print(f"{row.recipe:24} error {errors}  bias {row.bias:+.3%}  slower {slower}", flush=True)


if __name__ == "__main__":
    main()
