"""lakh completion: shell scripts that complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from lakh.cli.output import CommandResult, print_result

__all__ = ["completion"]


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@print_result
def completion(shell: str) -> CommandResult:
    """Print a shell completion script.

    For bash, add this line to ~/.bashrc: eval "$(lakh completion bash)"
    """
    from lakh.cli.main import cli

    complete = get_completion_class(shell)
    assert complete is not None  # click supports all three shells
    script = complete(cli, {}, "lakh", "_LAKH_COMPLETE").source()
    return CommandResult({"shell": shell, "script": script}, script)
