"""lakh bench quantization: what each format of weights costs in bits per byte on held-out code, beside its size.

The model is written in each format as `lakh export --quant` does, read again as stored and scored by the engine's own
forward pass, with the activations rounded as in serving. With --llama-cpp, what llama-quantize writes is scored
by the same code, so that the two quantizers are compared on the same products. Use a model with weights of at least 16
bits: one that was quantized before is closer to some formats than to others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bench.harness import out_option, result
from lakh.cli.output import CommandResult, console, print_result
from lakh.errors import UserError

__all__ = ["quantization"]


@click.command("quantization")
@click.argument("model")
@click.option("--data", metavar="DIR", required=True, help="Held-out code: every .py file below is a text.")
@click.option("--formats", default="q8_0,q6_k,q5_k_m,q4_k_m,q4_1,q4_0", show_default=True, help="Comma-separated.")
@click.option("--texts", type=click.IntRange(1), default=8, show_default=True, help="Number of texts.")
@click.option("--tokens", type=click.IntRange(2), default=512, show_default=True, help="Tokens of each text.")
@click.option("--llama-cpp", metavar="DIR", help="Programs of a build of llama.cpp: also score its quantizer.")
@out_option
@print_result
def quantization(
    model: str, data: str, formats: str, texts: int, tokens: int, llama_cpp: str | None, out: str | None
) -> CommandResult:
    """Measure bits per byte of held-out code for each format of the weights."""
    from bench.decode.format_quality import measure
    from bench.decode.llama_cpp import require_build
    from lakh.server.model import weights as model_weights
    from lakh.workloads.code.formats import gguf_types

    names = [name.strip() for name in formats.split(",") if name.strip()]
    for name in names:
        if name not in gguf_types.FORMATS:
            raise UserError(f"--formats {name}", "no such format", f"choose from: {', '.join(gguf_types.FORMATS)}")
    found = [path.read_text(errors="replace") for path in sorted(Path(data).rglob("*.py"))]
    chosen = [text for text in found if len(text) >= 4 * tokens][:texts]
    if not chosen:
        raise UserError(f"--data {data}", f"has no .py file of {4 * tokens} characters", "name a folder of code")
    build = require_build(llama_cpp) if llama_cpp else None
    loaded = model_weights.read(model)
    rows: list[Any] = []
    with console().status("scoring") as status:
        rows.extend(measure(loaded, names, chosen, tokens, build, status.update))
    baseline = rows[0]["bits_per_byte"]
    for row in rows:
        if "bits_per_byte" in row:
            row["above_f32"] = row["bits_per_byte"] / baseline - 1
    return result("quantization", rows, out)
