"""The table of commands, and the translation of errors into messages and exit codes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from lakh import __version__, storage
from lakh.cli.extras import sufficient_extra
from lakh.cli.groups import LazyGroup
from lakh.cli.interrupts import Terminated, raise_on_interrupt
from lakh.cli.output import print_error
from lakh.compute_threads import others_are_busy
from lakh.errors import Interrupted, LakhError, MissingExtra, UserError

__all__ = ["COMMANDS", "cli", "main"]

# name -> (where it is, short help). The help stands here so that `lakh --help` imports no command; a test compares it
# with the commands' own help.
COMMANDS = {
    "demo": ("lakh.cli.demo:demo", "Run every stage on this machine, from raw code to a served completion."),
    "corpus": ("lakh.cli.corpus:corpus", "Raw code to clean Parquet."),
    "tokens": ("lakh.cli.tokens:tokens", "Train a tokenizer, pack a corpus into token shards."),
    "recipes": ("lakh.cli.recipes:recipes", "List the recipes that come with lakh."),
    "train": ("lakh.cli.train:train", "Train a run, on this machine or as one rank of many."),
    "resume": ("lakh.cli.train:resume", "Continue a run from its newest complete checkpoint."),
    "join": ("lakh.cli.train:join", "Add ranks to a run that trains on this machine."),
    "tune": (
        "lakh.cli.tune:tune",
        "Fine-tune a model on your own code, on questions with answers, or on pairs of answers.",
    ),
    "checkpoint": ("lakh.cli.checkpoint:checkpoint", "List, verify and remove the checkpoints of a run."),
    "health": ("lakh.cli.health:health", "Check this node's hardware, and decide whether it may go on."),
    "export": ("lakh.cli.export:export", "Write a checkpoint in a format that other tools load."),
    "models": (
        "lakh.cli.models:models",
        "List the model architectures and pretrained models, or download a pretrained one.",
    ),
    "eval": ("lakh.cli.eval:evaluate", "Score a model, or samples, on code benchmarks in a sandbox."),
    "serve": ("lakh.cli.serve:serve", "Serve completions over HTTP."),
    "gateway": ("lakh.cli.gateway:gateway", "Put several engines behind one address."),
    "lsp": ("lakh.cli.lsp:lsp", "Run a language server with inline completions for an editor."),
    "plan": ("lakh.cli.plan:plan", "Estimate cost, speed and memory of a run before it starts."),
    "dlrm": ("lakh.cli.dlrm:dlrm", "Plan and train recommendation models with sharded embedding tables."),
    "loadgen": ("lakh.cli.loadgen:loadgen", "Send a completion service the load of typing users, and measure it."),
    "bench": ("lakh.cli.bench:bench", "Compare the speed of lakh with its peers, in the same run."),
    "dashboard": ("lakh.cli.dashboard:dashboard", "Show the progress of runs, live, in a browser."),
    "tag": ("lakh.cli.tag:tag", "Give a run names to find it by, e.g. baseline or lr=3e-4."),
    "config": ("lakh.cli.config:config", "Show, compare and check the settings of runs."),
    "doctor": ("lakh.cli.doctor:doctor", "Check this machine: what is installed, and what each missing part disables."),
    "completion": ("lakh.cli.completion:completion", "Print a shell completion script."),
}

ALIASES = {"room": "dashboard"}  # old names, not listed in the help


class Root(LazyGroup):
    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except BrokenPipeError as error:  # click assumes that stdout was closed, as by `head`
            if _stdout_is_closed():
                raise
            raise RuntimeError("a pipe to another process broke") from error


def _stdout_is_closed() -> bool:
    """Whether the process that read our output has ended."""
    poll = select.poll()
    poll.register(1, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


@click.group(
    cls=Root, commands_table=COMMANDS, aliases=ALIASES, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="lakh")
def cli() -> None:
    """Train code language models from one laptop to one lakh (100,000) GPUs, with one tool."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with the code of its outcome."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # OpenMP threads that wait would spin and take the core from the thread they wait for: beside a busy process a step
    # takes up to ten times as long. torch reads this when it is imported; processes that a command starts inherit it.
    # In benchmarks on an idle machine a peer must run as it would by itself.
    if arguments[:1] != ["bench"] or others_are_busy():
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may not be valid text
    sys.exit(_run(arguments))


def _run(arguments: list[str]) -> int:
    command = " ".join(["lakh", *arguments[:1]])
    try:
        _reject_empty(arguments)
        with raise_on_interrupt():
            result = cli.main(arguments, prog_name="lakh", standalone_mode=False)
    except MissingExtra as error:
        where, package, extra = error.args
        extra = sufficient_extra(arguments[0], package.replace("-", "_")) or extra
        return _report(MissingExtra(where, package, extra), arguments)
    except LakhError as error:
        return _report(error, arguments)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.ClickException as error:
        return _report(_usage_error(error, command), arguments)
    except (KeyboardInterrupt, click.Abort) as error:
        is_asked = isinstance(error.__cause__ or error, Terminated)  # click raises Abort from it
        todo = "run the same command again: what it had finished and kept is reused"
        return _report(Interrupted(command, "stopped by SIGTERM" if is_asked else "interrupted", todo), arguments)
    except SystemExit as error:
        if "_LAKH_COMPLETE" in os.environ or _stdout_is_closed():  # click's
            return 0
        todo = "remove that call; a recipe or a hook returns, or raises an error"
        return _report(UserError(command, f"code that it ran called sys.exit({error.code!r})", todo), arguments)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        extra = sufficient_extra(arguments[0], module)
        if extra is None:
            raise
        return _report(MissingExtra(command, module, extra), arguments)
    except OSError as error:
        explained = _explain_os_error(error)
        return _report(explained, arguments) if explained else _bug(arguments)
    except Exception:  # noqa: BLE001 - the outermost frame: anything else is a bug
        return _bug(arguments)
    return result if isinstance(result, int) else 0


def _usage_error(error: click.ClickException, command: str) -> UserError:
    """click's message in the form of lakh's own errors."""
    context = getattr(error, "ctx", None)
    where = context.command_path if context else command
    found, _, advice = error.format_message().replace("\n", " ").rstrip(".").partition(". ")
    advice = advice.strip("()")  # (Did you mean one of: '--a', '--b'?)
    found, advice = (text[:1].lower() + text[1:] for text in (found, advice))
    return UserError(where, found, f"{advice} {where} --help lists what it takes".lstrip())


def _reject_empty(arguments: list[str]) -> None:
    """An empty argument would mean the current folder; usually it is an unset shell variable."""
    if "" in arguments:
        before = arguments[: arguments.index("")]
        where = " ".join(["lakh", *before])
        raise UserError(where, "the next argument is empty", "give it a value; perhaps a shell variable is not set")


def _explain_os_error(error: OSError) -> LakhError | None:
    """A full or read-only disk, permissions, limits: not a bug. A missing file may be one."""
    try:
        os.getcwd()  # noqa: PTH109 - relative paths need it
    except OSError:
        return UserError("the working folder", "does not exist any more", "change to another folder")
    if isinstance(error, FileNotFoundError | FileExistsError | NotADirectoryError | IsADirectoryError):
        return None
    return storage.explain(error, "lakh")


def _bug(arguments: list[str]) -> int:
    traceback.print_exc()
    print_error("this is a bug in lakh; please report it with the lines above")
    _json_error({"kind": "Bug", "found": traceback.format_exc(limit=-1).strip(), "exit_code": 1}, arguments)
    return 1


def _report(error: LakhError, arguments: list[str]) -> int:
    print_error(error)
    _json_error(error.as_dict(), arguments)
    return error.exit_code


def _json_error(error: dict[str, str | int], arguments: list[str]) -> None:
    if "--json" in arguments:
        with contextlib.suppress(OSError):  # stdout itself may be what failed
            click.echo(json.dumps({"error": error}))
