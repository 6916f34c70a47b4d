"""lakh serve: completions over HTTP."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lakh.cli.complete import complete_runs
from lakh.cli.output import console
from lakh.cli.serve_models import EngineFactory, load_router, named_adapters, named_models
from lakh.cli.serve_options import ServeOptions, read_key, server_options
from lakh.errors import PeerLost, UserError

if TYPE_CHECKING:
    from lakh.server.backends.model_router import EngineBackend, ModelRouter

__all__ = ["serve"]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]*[A-Za-z0-9]")


@click.command(context_settings={"show_default": True})
@click.argument("models", nargs=-1, required=True, metavar="MODEL...", shell_complete=complete_runs)
@server_options("127.0.0.1:8000")
@click.option(
    "--precision",
    type=click.Choice(["f32", "bf16", "fp8", "int8", "int4"]),
    help="Precision of the weights; default bf16 on a GPU, f32 on a CPU, or as stored in a quantized GGUF file. "
    "fp8 is for GPUs, int8 for CPUs.",
)
@click.option(
    "--speculate/--no-speculate",
    default=True,
    help="Speculative decoding with draft tokens from the prompt or a draft model, while it measurably pays off.",
)
@click.option("--draft", metavar="MODEL", help="A smaller model with the same tokenizer that proposes draft tokens.")
@click.option(
    "--max-model-len",
    type=click.IntRange(2),
    help="Longest prompt with its completion, in tokens; default and at most the model's context. The cache holds at "
    "least that.",
)
@click.option("--cache-tokens", type=click.IntRange(1), help="Size of the KV cache in tokens.")
@click.option(
    "--kv-cache-dtype",
    "kv_dtype",
    type=click.Choice(["auto", "int8"]),
    default="auto",
    help="Type of the KV cache; int8 holds nearly four times as many tokens as float32 on a CPU, and 1.9 times "
    "as many as bf16 on a GPU.",
)
@click.option("--max-waiting", type=click.IntRange(1), default=64, help="Maximum waiting requests; others get a 429.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads; default: all cores, fewer beside busy processes.")
@click.option("--served-name", metavar="NAME", help="The model's name in the API; default the name of its folder.")
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="NAME=FOLDER",
    help="A LoRA adapter of the first MODEL, served under its own name; may be given several times.",
)
@click.option(
    "--operator-key-file",
    type=click.Path(),
    help="File with the key for loading and unloading models and adapters while serving; without it nobody can.",
)
@click.option("--tensor", type=click.IntRange(1), default=1, help="Tensor-parallel processes on this machine.")
@click.option(
    "--follow",
    "follow_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0.1),
    help="Poll the run this often for newer checkpoints, and serve them.",
)
@click.option(
    "--engine",
    "engine_in",
    type=click.Choice(["process", "thread"]),
    default="process",
    help="Run the engine in its own process, or in a thread of the server.",
)
@click.option("--json", "as_json", is_flag=True, help="When ready, print one JSON line: url, model, models, pid.")
def serve(
    models: tuple[str, ...],
    options: ServeOptions,
    speculate: bool,
    max_waiting: int,
    engine_in: str,
    adapters: tuple[str, ...],
    operator_key_file: str | None,
    served_name: str | None,
    as_json: bool,
    **load: Any,
) -> None:
    """Serve completions over HTTP.

    MODEL is a run folder, a checkpoint folder, a Hugging Face directory or a GGUF file; NAME=MODEL sets its name. Each
    of several models has an engine of its own; a request's "model" selects one, by default the first.

    Serves a page to try it at /, POST /v1/completions in OpenAI's and Tabby's form, /v1/fim/completions, /infill and
    /api/generate in those of Mistral, llama.cpp and Ollama, and GET /v1/models, /health, /ready and /metrics. SIGTERM
    or Ctrl-C stops it after the running requests; SIGHUP reads the API keys again.
    """
    if load["draft"] is not None and not speculate:
        raise UserError("--draft, --no-speculate", "a draft model needs speculation", "give only one of them")
    if load["follow_s"] is not None and load["tensor"] > 1:
        raise UserError("--follow, --tensor", "tensor-parallel weights cannot be replaced", "give only one of them")
    if load["max_model_len"] is not None and (load["follow_s"] is not None or load["tensor"] > 1):
        raise UserError("--max-model-len", "cannot be combined with --follow or --tensor", "give only one of them")
    if adapters and (load["follow_s"] is not None or load["tensor"] > 1):
        todo = "merge the adapter into the model: lakh export"
        raise UserError("--adapter", "cannot be combined with --follow or --tensor", todo)
    given, by_adapter = named_models(models, served_name), named_adapters(adapters)
    if len(given) > 1 and load["draft"] is not None:
        raise UserError("--draft", "is for one model", "start a server of its own for the model with a draft")
    operator_key = None if operator_key_file is None else read_key(operator_key_file)
    for model in given:
        _explain_model_name(model.path)
    talk = console()
    factory = EngineFactory(load | {"speculation": "lookup" if speculate else "off"}, max_waiting, engine_in)
    backend: EngineBackend | ModelRouter
    with talk.status(f"loading {', '.join(model.path for model in given)}"):
        if len(given) == 1 and operator_key is None:
            backend = factory.make(given[0], by_adapter)
        else:
            backend = router = load_router(factory, given, by_adapter)
            if operator_key is not None:
                options.allow_operator(operator_key, router)

    def ready(url: str, grpc_at: str | None) -> None:
        body = json.dumps({"prompt": "def hello(", "max_tokens": 32, "temperature": 0})
        talk.print(f"serving {backend.description} at {url}")
        talk.print(f"try it in a browser: {url}/", soft_wrap=True)
        talk.print(f"or: curl -s {url}/v1/completions -d '{body}'", markup=False, soft_wrap=True)
        if grpc_at:
            talk.print(f"gRPC at {grpc_at}")
        if as_json:
            names = [card.id for card in backend.models()]
            found = {"url": url, "grpc": grpc_at, "model": names[0], "models": names, "pid": os.getpid()}
            click.echo(json.dumps(found))

    options.serve(backend, talk, ready)
    if backend.died is not None:
        raise PeerLost("engine", backend.died, "start the server again; out of memory is a likely cause")
    talk.print("stopped")


def _explain_model_name(model: str) -> None:
    """Raise a UserError that says how to get a model, if MODEL is no path here but the name of a pretrained one."""
    if Path(model).exists():
        return
    from lakh.workloads.code.pretrained import PRETRAINED

    known = model.removesuffix(".gguf")
    if known in PRETRAINED:
        todo = f"download it: lakh models get {known}; then: lakh serve {known}.gguf"
        raise UserError(model, "is no file here; it is the name of a pretrained model", todo)
    if not HUB_ID.fullmatch(model) or Path(model).parent.exists():  # a wrong path, if its folder exists
        return
    name = model.rpartition("/")[2]
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    snapshots = sorted((home / "hub" / f"models--{model.replace('/', '--')}" / "snapshots").glob("*/config.json"))
    found = "is no folder here; it looks like the id of a model on Hugging Face"
    if snapshots:
        raise UserError(model, f"{found} that was downloaded before", f"use: lakh serve {snapshots[-1].parent}")
    todo = (
        f"download it, then serve the folder: pip install huggingface_hub && hf download {model} --local-dir {name} "
        f"&& lakh serve {name}"
    )
    raise UserError(model, found, todo)
