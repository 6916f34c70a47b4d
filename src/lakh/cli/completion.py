"""lakh completion: shell scripts that complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from lakh.cli.face import Answer, answers

__all__ = ["completion"]


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@answers
def completion(shell: str) -> Answer:
    """Print the script that completes lakh's words in a shell.

    For bash, put this into ~/.bashrc: eval "$(lakh completion bash)"
    """
    from lakh.cli.main import cli

    complete = get_completion_class(shell)
    assert complete is not None  # the three names above are click's own
    script = complete(cli, {}, "lakh", "_LAKH_COMPLETE").source()
    return Answer({"shell": shell, "script": script}, script)
