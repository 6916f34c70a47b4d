"""`lakh export`: write a checkpoint in a format that other tools load."""

from __future__ import annotations

import click

from lakh import storage
from lakh.cli.complete import complete_runs
from lakh.cli.output import CommandResult, console, print_result
from lakh.errors import UserError

__all__ = ["export"]

GGUF_FILE = "model-q8_0.gguf"


@click.command()
@click.argument("ckpt", shell_complete=complete_runs)
@click.option(
    "--format",
    "form",
    type=click.Choice(["hf", "gguf"]),
    default="hf",
    show_default=True,
    help="hf: Hugging Face directory; gguf: one file for llama.cpp, 8 bits a weight.",
)
@click.option("--out", required=True, metavar="DIR", help="Folder to write.")
@click.option("--force", is_flag=True, help="Write into a folder that is not empty.")
@print_result
def export(ckpt: str, form: str, out: str, force: bool) -> CommandResult:
    """Write a checkpoint in a format that other tools load.

    CKPT is a checkpoint folder, a run folder (its newest complete checkpoint), a Hugging Face directory or a GGUF file.
    --format hf writes what transformers, vLLM and SGLang load: config.json, safetensors and tokenizer files.
    --format gguf writes one file, DIR/model-q8_0.gguf, with the tokenizer inside.
    """
    from lakh.server.model import weights
    from lakh.workloads.code.formats import gguf, hf

    if storage.list_dir(out) and not force:
        raise UserError(out, "is not empty", "choose another folder, or use --force to write into it")
    with console().status(f"exporting {ckpt}"):
        model = weights.read(ckpt)
        sources = [storage.local_path(path).resolve() for path in (ckpt, model.source)]
        if storage.local_path(out).resolve() in sources:
            raise UserError(out, "is the folder to export", "choose another folder")
        if form == "gguf":
            files = [GGUF_FILE]
            gguf.save(storage.join(out, GGUF_FILE), model.name, model.spec, model.weights, model.tokenizer_json)
        else:
            files = hf.save(out, model.spec, model.weights, model.tokenizer_json)
    size_bytes = sum(storage.local_path(storage.join(out, name)).stat().st_size for name in files)
    parameters = model.spec.parameters
    data = {"format": form, "out": out, "parameters": parameters, "files": files, "bytes": size_bytes}
    text = f"{out}: {parameters:,} parameters, {len(files)} files, {size_bytes:,} bytes"
    return CommandResult(data, text)
