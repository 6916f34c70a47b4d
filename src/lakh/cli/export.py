"""lakh export: a checkpoint in a format that other tools load."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from lakh import storage
from lakh.cli.output import CommandResult, console, print_result
from lakh.errors import UserError

__all__ = ["export"]

GGUF_FILE = "model-q8_0.gguf"


@click.command()
@click.argument("ckpt")
@click.option(
    "--format",
    "form",
    type=click.Choice(["hf", "gguf"]),
    default="hf",
    show_default=True,
    help="hf: Llama directory; gguf: one file for llama.cpp, 8 bits a weight.",
)
@click.option("--out", required=True, metavar="DIR", help="Where to write.")
@click.option("--force", is_flag=True, help="Write into a folder that is not empty.")
@print_result
def export(ckpt: str, form: str, out: str, force: bool) -> CommandResult:
    """Write a checkpoint in a format that other tools load.

    CKPT is a checkpoint's folder, a run's (its newest complete checkpoint), a Hugging Face directory or a GGUF
    file. The result of --format hf is what transformers, vLLM and SGLang load: config.json, safetensors and tokenizer
    files. That of --format gguf is one file, DIR/model-q8_0.gguf, with the tokenizer inside.
    """
    from lakh.server.model import weights
    from lakh.workloads.code.formats import gguf, gguf_save, hf

    if storage.list_dir(out) and not force:
        raise UserError(out, "is not empty", "choose another folder, or --force to write into it")
    with console().status(f"exporting {ckpt}"), tempfile.TemporaryDirectory(prefix="lakh-export-") as scratch:
        if storage.is_local(ckpt) and gguf.is_gguf(storage.local_path(ckpt)):
            found = gguf.load(storage.local_path(ckpt))
            tokenizer_json = Path(scratch) / "tokenizer.json"
            tokenizer_json.write_bytes(found.tokenizer_json)
            model = weights.LoadedModel(found.name, ckpt, found.spec, found.weights, tokenizer_json)
        else:
            model = weights.read(ckpt)
        sources = [storage.local_path(path).resolve() for path in (ckpt, model.source)]
        if storage.local_path(out).resolve() in sources:
            raise UserError(out, "is the folder that is exported", "choose another folder")
        if form == "gguf":
            files = [GGUF_FILE]
            gguf_save.save(storage.join(out, GGUF_FILE), model.name, model.spec, model.weights, model.tokenizer_json)
        else:
            files = hf.save(out, model.spec, model.weights, model.tokenizer_json)
    size_bytes = sum(storage.local_path(storage.join(out, name)).stat().st_size for name in files)
    data = {
        "format": form,
        "out": out,
        "parameters": model.spec.parameters,
        "files": files,
        "bytes": size_bytes,
    }
    text = f"{out}: {model.spec.parameters:,} parameters, {len(files)} files, {size_bytes:,} bytes"
    return CommandResult(data, text)
