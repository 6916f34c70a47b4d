"""`lakh export`: write a checkpoint in a format that other tools load."""

from __future__ import annotations

import click

from lakh import storage
from lakh.cli.complete import complete_runs
from lakh.cli.output import CommandResult, console, print_result
from lakh.errors import UserError

__all__ = ["export"]

QUANTIZATIONS = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_1", "q4_0", "bf16", "f16", "f32")
"""gguf_types.FORMATS, which is not imported for --help."""


@click.command()
@click.argument("ckpt", shell_complete=complete_runs)
@click.option(
    "--format",
    "form",
    type=click.Choice(["hf", "gguf", "adapter"]),
    default="hf",
    show_default=True,
    help="hf: Hugging Face directory; gguf: one file for llama.cpp; adapter: LoRA weights alone.",
)
@click.option("--quant", type=click.Choice(QUANTIZATIONS), help="Type of the weights in a GGUF file; default q8_0.")
@click.option("--out", required=True, metavar="DIR", help="Folder to write.")
@click.option("--force", is_flag=True, help="Write into a folder that is not empty.")
@print_result
def export(ckpt: str, form: str, quant: str | None, out: str, force: bool) -> CommandResult:
    """Write a checkpoint in a format that other tools load.

    CKPT is a checkpoint folder, a run folder (its newest complete checkpoint), a Hugging Face directory or a GGUF file.
    --format hf writes what transformers, vLLM and SGLang load: config.json, safetensors and tokenizer files.
    --format gguf writes one file, DIR/model-QUANT.gguf, with the tokenizer inside; --quant q4_k_m takes 4.9 bits a
    weight, q8_0 8.5.
    --format adapter writes the adapters of lakh tune in the format of PEFT; hf and gguf merge them into the model.
    """
    from lakh.server.model import weights
    from lakh.workloads.code.architectures import require_finite
    from lakh.workloads.code.formats import gguf, hf

    if quant and form != "gguf":
        raise UserError(f"--quant {quant}", f"has no meaning with --format {form}", "use --format gguf")
    if storage.list_dir(out) and not force:
        raise UserError(out, "is not empty", "choose another folder, or use --force to write into it")
    if form == "adapter":
        return _export_adapter(ckpt, out)
    with console().status(f"exporting {ckpt}"):
        model = weights.read(ckpt)
        sources = [storage.real_path(path) for path in (ckpt, model.source)]
        if storage.real_path(out) in sources:
            raise UserError(out, "is the folder to export", "choose another folder")
        require_finite(model.source, model.weights)
        if form == "gguf":
            quant = quant or QUANTIZATIONS[0]
            files = [f"model-{quant}.gguf"]
            path = storage.join(out, files[0])
            gguf.save(path, model.name, model.spec, model.weights, model.tokenizer_json, quantization=quant)
        else:
            files = hf.save(out, model.spec, model.weights, model.tokenizer_json)
    size_bytes = sum(storage.local_path(storage.join(out, name)).stat().st_size for name in files)
    parameters = model.spec.parameters
    data = {"format": form, "out": out, "parameters": parameters, "files": files, "bytes": size_bytes}
    what = "1 file" if len(files) == 1 else f"{len(files)} files"
    text = f"{out}: {parameters:,} parameters, {what}, {size_bytes:,} bytes"
    return CommandResult(data, text)


def _export_adapter(ckpt: str, out: str) -> CommandResult:
    from lakh import checkpoint
    from lakh.workloads.code.formats import peft

    run, adapters = checkpoint.read_model(checkpoint.find(ckpt))
    if not run.adapter.rank:
        raise UserError(ckpt, "has no adapters: its run trained every weight", "use --format hf")
    files = peft.save(out, run.model, adapters, run.adapter, base=run.init_from)
    parameters = sum(tensor.numel() for tensor in adapters.values())
    size_bytes = sum(storage.local_path(storage.join(out, name)).stat().st_size for name in files)
    data = {"format": "adapter", "out": out, "parameters": parameters, "files": files, "bytes": size_bytes}
    return CommandResult(
        data, f"{out}: adapters of {parameters:,} parameters for {run.init_from}, {size_bytes:,} bytes"
    )
