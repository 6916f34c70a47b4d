"""lakh serve: completions over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lakh.cli.complete import complete_runs
from lakh.cli.output import console
from lakh.cli.serve_options import ServeOptions, server_options
from lakh.errors import PeerLost, UserError

if TYPE_CHECKING:
    from lakh.server.backends.engine_process import EngineProcessBackend
    from lakh.server.backends.in_process import InProcessBackend

__all__ = ["serve"]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]*[A-Za-z0-9]")


@click.command(context_settings={"show_default": True})
@click.argument("model", shell_complete=complete_runs)
@server_options("127.0.0.1:8000")
@click.option(
    "--precision",
    type=click.Choice(["f32", "bf16", "int8"]),
    help="Precision of the weights; default f32 on a CPU, bf16 on a GPU. int8 is for CPUs.",
)
@click.option(
    "--speculate/--no-speculate",
    default=True,
    help="Speculative decoding with draft tokens from the prompt or a draft model, while it measurably pays off.",
)
@click.option("--draft", metavar="MODEL", help="A smaller model with the same tokenizer that proposes draft tokens.")
@click.option("--cache-tokens", type=click.IntRange(1), help="Size of the KV cache in tokens.")
@click.option("--max-waiting", type=click.IntRange(1), default=64, help="Maximum waiting requests; others get a 429.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads.")
@click.option("--served-name", metavar="NAME", help="The model's name in the API; default the name of its folder.")
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
@click.option("--json", "as_json", is_flag=True, help="When ready, print one JSON line: url, model, pid.")
def serve(
    model: str, options: ServeOptions, speculate: bool, max_waiting: int, engine_in: str, as_json: bool, **load: Any
) -> None:
    """Serve completions over HTTP.

    MODEL is a run folder, a checkpoint folder or a Hugging Face directory. Serves a page to try it at /, POST
    /v1/completions in OpenAI's and Tabby's form, /v1/fim/completions, /infill and /api/generate in those of Mistral,
    llama.cpp and Ollama, and GET /v1/models, /health, /ready and /metrics. SIGTERM or Ctrl-C stops it after the running
    requests; SIGHUP reads the API keys again.
    """
    if load["draft"] is not None and not speculate:
        raise UserError("--draft, --no-speculate", "a draft model needs speculation", "give only one of them")
    if load["follow_s"] is not None and load["tensor"] > 1:
        raise UserError("--follow, --tensor", "tensor-parallel weights cannot be replaced", "give only one of them")
    _explain_hub_id(model)
    talk = console()
    load |= {"path": model, "speculation": "lookup" if speculate else "off"}
    with talk.status(f"loading {model}"):
        backend = _backend(load, max_waiting, engine_in)

    def ready(url: str, grpc_at: str | None) -> None:
        body = json.dumps({"prompt": "def hello(", "max_tokens": 32, "temperature": 0})
        talk.print(f"serving {backend.description} at {url}")
        talk.print(f"try it in a browser: {url}/", soft_wrap=True)
        talk.print(f"or: curl -s {url}/v1/completions -d '{body}'", markup=False, soft_wrap=True)
        if grpc_at:
            talk.print(f"gRPC at {grpc_at}")
        if as_json:
            name = backend.models()[0].id
            click.echo(json.dumps({"url": url, "grpc": grpc_at, "model": name, "pid": os.getpid()}))

    options.serve(backend, talk, ready)
    if backend.died is not None:
        raise PeerLost("engine", backend.died, "start the server again; out of memory is a likely cause")
    talk.print("stopped")


def _explain_hub_id(model: str) -> None:
    """Raise a UserError that says how to get a model, if MODEL is the id of one on Hugging Face and no path here."""
    if not HUB_ID.fullmatch(model) or Path(model).exists():
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


def _backend(load: dict[str, Any], max_waiting: int, engine_in: str) -> EngineProcessBackend | InProcessBackend:
    if engine_in == "thread":
        from lakh.server.backends.engine_process_main import load_engine
        from lakh.server.backends.in_process import InProcessBackend

        return InProcessBackend(load_engine(load), max_waiting=max_waiting, on_death=_stop_server)
    from lakh.server.backends.engine_process import EngineProcessBackend

    return EngineProcessBackend(load, max_waiting=max_waiting, on_death=_stop_server)


def _stop_server() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
