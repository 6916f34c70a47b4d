"""lakh demo: runs every stage of lakh on one machine, by its own commands.

DIR/stages.json keeps the result of each stage. A later call reuses stages whose command is the same and whose output
still exists, and training resumes from its last checkpoint, so an interrupted demo continues.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from lakh import api, errors, storage
from lakh.cli.interrupts import Terminated
from lakh.cli.output import CommandResult, console, print_result, table
from lakh.errors import Interrupted, LakhError

__all__ = ["demo"]

INTERRUPT_GRACE_S = 130.0  # a little more than the launcher's limit for a last checkpoint
PROMPT = "class Reader:\n    def __init__(self, "
RESULTS, OLD_RESULTS = "stages.json", "story.json"


@dataclass(frozen=True)
class DemoStage:
    name: str
    command: tuple[str, ...]
    output: str  # a file or folder that exists when the stage is done
    summary: Callable[[dict[str, Any]], str]
    optional: bool = False  # skipped on a machine without a sandbox


@click.command()
@click.option("--dir", "folder", default="demo", show_default=True, help="Folder for all outputs.")
@click.option("--steps", type=click.IntRange(min=20), default=220, show_default=True, help="Training steps.")
@click.option("--nproc", type=click.IntRange(min=1), default=2, show_default=True, help="Training processes.")
@click.option(
    "--source",
    "sources",
    multiple=True,
    default=("installed:stdlib", "installed:packages"),
    show_default=True,
    help="Raw code, as for lakh corpus build. Repeatable.",
)
@click.option(
    "--max-bytes-per-repo", default=1_500_000, show_default=True, help="Maximum bytes of code from each package."
)
@print_result
def demo(folder: str, steps: int, nproc: int, sources: tuple[str, ...], max_bytes_per_repo: int) -> CommandResult:
    """Run every stage on this machine, from raw code to a served completion.

    Builds a corpus from the Python standard library and the permissively licensed packages installed here, trains a
    tokenizer and a model of a few million parameters, kills one of the training processes on the way, then evaluates,
    exports and serves the model.
    """
    began = time.monotonic()
    results = DemoResults(Path(folder))
    for stage in _stages(folder, steps, nproc, sources, max_bytes_per_repo):
        results.run(stage)
    results.serve(f"{folder}/export")
    seconds = time.monotonic() - began
    data = {"dir": folder, "seconds": seconds, "stages": results.entries}
    next_commands = [
        f"lakh dashboard {folder}/run",
        f"lakh serve {folder}/run",
        f"lakh resume {folder}/run --nproc 2 --set train.steps=1000",
        "lakh corpus build own:YOUR/CODE --out corpus",
    ]
    return CommandResult(data, lambda: _report(results.entries, seconds), next_commands=next_commands)


def _stages(
    folder: str, steps: int, nproc: int, sources: tuple[str, ...], max_bytes_per_repo: int
) -> Iterator[DemoStage]:
    corpus, tokenizer, tokens, run = (f"{folder}/{name}" for name in ("corpus", "tokenizer", "tokens", "run"))
    yield DemoStage(
        "corpus",
        (
            *("corpus", "build", *sources, "--out", corpus),
            *("--max-bytes-per-repo", str(max_bytes_per_repo), "--force"),
        ),
        f"{corpus}/{storage.MANIFEST}",
        lambda r: (
            f"{r['read']:,} files read, {r['kept']:,} kept ({r['bytes_out'] / 1e6:.1f} MB); dropped "
            + (", ".join(f"{n:,} {reason}" for reason, n in Counter(r["dropped"]).most_common(3)) or "none")
        ),
    )
    yield DemoStage(
        "tokenizer",
        ("tokens", "train", corpus, "--out", tokenizer, "--vocab", "4096", "--force"),
        f"{tokenizer}/{storage.MANIFEST}",
        lambda r: f"{r['vocab']:,} tokens, with fill-in-the-middle markers",
    )
    yield DemoStage(
        "tokens",
        ("tokens", "pack", corpus, "--tokenizer", tokenizer, "--out", tokens, "--heldout", "0.05", "--force"),
        f"{tokens}/{storage.MANIFEST}",
        lambda r: f"{r['splits']['train']['tokens']:,} to train on, {r['splits']['heldout']['tokens']:,} held out",
    )
    if storage.list_dir(f"{run}/checkpoints"):
        train: tuple[str, ...] = ("resume", run, "--nproc", str(nproc), "--set", f"train.steps={steps}")
    else:
        victim = nproc - 1
        train = ("train", "laptop", "--out", run, "--nproc", str(nproc), "--set", f"data.tokens={tokens}")
        train += ("--set", f"train.steps={steps}", "--fault", f"kill(rank={victim}, step={steps * 2 // 5})")
        if nproc > 1:  # full replicas over c3: the others continue without the killed one
            train += ("--set", "train.backend=c3", "--set", f"mesh.dp_replicate={nproc}")
    yield DemoStage(
        "train", train, f"{run}/checkpoints/step-{steps:08d}/{storage.MANIFEST}", lambda r: _trained(run, r)
    )
    yield DemoStage(
        "sandbox",
        ("eval", "score", "--canonical", "--task", "humaneval"),
        folder,
        lambda r: f"HumanEval's own solutions pass {r['passed']}/{r['total']} in {r['sandbox']}",
        optional=True,
    )
    yield DemoStage(
        "eval",
        ("eval", run, "--task", "humaneval", "--max-tokens", "96", "--out", f"{run}/evals/humaneval"),
        f"{run}/evals/humaneval",
        lambda r: f"the model's own pass@1 on HumanEval: {r['pass_at_k']['1']:.1%} ({r['passed']}/{r['total']})",
        optional=True,
    )
    yield DemoStage(
        "export",
        ("export", run, "--format", "hf", "--out", f"{folder}/export", "--force"),
        f"{folder}/export/config.json",
        lambda r: f"{r['parameters']:,} parameters for transformers, vLLM, SGLang: {r['bytes'] / 1e6:.0f} MB",
    )


class DemoResults:
    """The results of the stages, saved after every stage."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / RESULTS
        self.entries: list[dict[str, Any]] = []
        self.known: dict[str, dict[str, Any]] = {}
        for file in (folder / OLD_RESULTS, self.file):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                self.known |= {entry["name"]: entry for entry in json.loads(file.read_text())}

    def run(self, stage: DemoStage) -> None:
        known = self.known.get(stage.name)
        same = known and (known["command"] == list(stage.command) or stage.name == "train")
        # A stage runs again if an earlier one did: its input has changed.
        fresh = any(not entry["reused"] for entry in self.entries)
        if known and same and not fresh and storage.exists(stage.output) and not known.get("not_run"):
            self._add({**known, "reused": True})
            return
        _say_command(stage.name, stage.command)
        began = time.monotonic()
        entry: dict[str, Any] = {"name": stage.name, "command": list(stage.command), "output": stage.output}
        try:
            entry["result"] = _lakh(stage.command)
            entry["summary"] = stage.summary(entry["result"])
        except LakhError as error:
            if not stage.optional or error.exit_code != errors.UserError.exit_code:
                raise
            entry |= {"not_run": str(error), "summary": f"not run: {error}"}
        entry |= {"seconds": time.monotonic() - began, "reused": False}
        _say(f"  {entry['summary']}")
        self._add(entry)

    def serve(self, model: str) -> None:
        command = ("serve", model, "--http", "127.0.0.1:0", "--json")
        _say_command("serve", command)
        began = time.monotonic()
        with api.serve(model) as server:
            # Not greedy: so small a model soon repeats itself.
            completion = server.complete(PROMPT, max_tokens=48, temperature=0.5, seed=1)
        entry = {
            "name": "serve",
            "command": list(command),
            "output": f"{server.url}, stopped",
            "summary": f"one completion of {len(completion)} characters, shown above",
            "seconds": time.monotonic() - began,
            "result": {"prompt": PROMPT, "completion": completion},
            "reused": True,  # takes a second: always runs, and makes no later stage stale
        }
        self._add(entry)
        _say((PROMPT, "dim"), completion)

    def _add(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)
        storage.write_bytes(self.file, json.dumps(self.entries, indent=1).encode())


def _say(*parts: str | tuple[str, str]) -> None:
    """Print parts, each a text or (text, style), without wrapping: commands can be copied."""
    from rich.text import Text

    console().print(Text.assemble(*parts), soft_wrap=True)


def _say_command(name: str, command: tuple[str, ...]) -> None:
    _say("\n", (name, "bold"), f"  $ lakh {shlex.join(command)}")


def _lakh(command: tuple[str, ...]) -> dict[str, Any]:
    """Run a lakh command and return its JSON document; its messages go to stderr."""
    process = subprocess.Popen([sys.executable, "-m", "lakh", *command, "--json"], stdout=subprocess.PIPE, text=True)
    try:
        out, _ = process.communicate()
    except KeyboardInterrupt as stop:  # the terminal interrupted the command as well: let it save a checkpoint
        if isinstance(stop, Terminated):
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(INTERRUPT_GRACE_S)
        process.kill()
        raise Interrupted(
            "lakh demo", f"interrupted in: lakh {command[0]}", "run lakh demo again to continue"
        ) from None
    lines = out.strip().splitlines()
    document: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if process.returncode == 0:
        return document
    if "where" in document.get("error", {}):
        error = document["error"]
        raise errors.from_dict({**error, "where": f"lakh demo, in lakh {command[0]}: {error['where']}"})
    raise LakhError(f"lakh {command[0]}", f"ended with exit code {process.returncode}", "see above")


def _trained(run_dir: str, result: dict[str, Any]) -> str:
    from lakh import events

    found: dict[str, list[Any]] = {kind: [] for kind in events.Event.kinds}
    for event in events.read(run_dir):
        found[event.kind].append(event)
    first, last = found["evaluated"][0].loss, found["evaluated"][-1].loss
    parameters = found["run_started"][0].parameters
    text = f"{parameters:,} parameters, {result['tokens']:,} tokens: held-out loss {first:.2f} -> {last:.2f}"
    for fault in found["fault_injected"][:1]:
        if found["ranks_lost"]:
            loss = found["ranks_lost"][0]
            text += f"; {fault.fault} survived without a restart: {loss.left} of {loss.left + len(loss.lost)} ranks "
            text += f"continued at step {loss.step} after {loss.seconds:.1f} s"
        elif found["restarted"]:
            resumed = [event.step for event in found["run_started"] if event.attempt > 0]
            at = f", resumed from step {resumed[-1]}" if resumed else ""
            text += f"; {fault.fault} survived ({found['restarted'][0].reason}{at})"
    return text


def _report(entries: list[dict[str, Any]], seconds: float) -> Any:
    rows = []
    for entry in entries:
        before = " before" if entry["reused"] and entry["name"] != "serve" else ""
        place = entry["output"].removesuffix(f"/{storage.MANIFEST}").removesuffix("/config.json")
        rows.append((entry["name"], f"{entry['seconds']:.1f} s{before}", entry["summary"], place))
    return table(["stage", "took", "what happened", "where"], rows, title=f"lakh demo, {seconds:.0f} s")
