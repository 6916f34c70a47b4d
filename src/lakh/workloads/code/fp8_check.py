"""Checks that the products of a model's blocks can be computed in 8 bits (`train.fp8`), without a GPU at hand."""

from __future__ import annotations

from lakh.errors import UserError
from lakh.spec.model import Model
from lakh.spec.run import Run, Training

__all__ = ["FP8_BLOCK", "bf16_layers", "check_fp8", "check_fp8_of_cluster"]

FP8_BLOCK = 128
"""Numbers that share a scale with the recipe blockwise."""
OFF = "set train.fp8 = false"


def bf16_layers(spec: Model, settings: Training) -> frozenset[int]:
    """The first and last layers, whose products stay in bf16."""
    first, last = settings.num_layers_at_start_in_bf16, settings.num_layers_at_end_in_bf16
    if first + last >= spec.layers:
        where = "train.num_layers_at_start_in_bf16"
        found = f"{first} first and {last} last layers in bf16 leave none of {spec.layers} for fp8"
        raise UserError(where, found, f"choose fewer, or {OFF}")
    return frozenset([*range(first), *range(spec.layers - last, spec.layers)])


def check_fp8(spec: Model, settings: Training, tensor_parallel: int, *, bf16: bool) -> None:
    """What the recipe needs of the model and of its precision."""
    bf16_layers(spec, settings)
    recipe = settings.fp8_recipe
    if recipe != "tensorwise" and not bf16:
        found = f"{recipe} products have bf16 results, and train.precision is f32"
        raise UserError("train.fp8_recipe", found, f"set train.precision = bf16, or {OFF}")
    multiple = FP8_BLOCK if recipe == "blockwise" else 16
    sizes = (spec.width, spec.ffn // tensor_parallel, spec.kv_heads * spec.head_dim // tensor_parallel)
    if any(size % multiple for size in sizes):
        found = f"width, ffn and key heads of a rank must be multiples of {multiple}; they are {sizes}"
        raise UserError("train.fp8", found, OFF)


def check_fp8_of_cluster(run: Run, tensor_parallel: int) -> None:
    """What the recipe needs of the run, and of the GPUs that its cluster describes."""
    gpu = run.cluster.gpu
    if run.train.device == "cpu":
        raise UserError("train.fp8", "needs a GPU, and train.device is cpu", OFF)
    if "fp8" not in gpu.precisions:
        found = f"needs a GPU with fp8, and cluster.gpu.kind is {gpu.kind}"
        raise UserError("train.fp8", found, f"{OFF}, or describe the GPUs of the run in cluster")
    check_fp8(run.model, run.train, tensor_parallel, bf16=run.train.precision != "f32")
