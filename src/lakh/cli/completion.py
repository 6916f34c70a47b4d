"""lakh completion: shell scripts that complete commands, options and their values."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, get_completion_class

from lakh.cli.output import CommandResult, print_result

__all__ = ["completion"]

# click's script for bash passes the words as bash splits them, at ':' and '=' too, which names of recipes
# (sizes:code_1b) and of settings (--set optim.lr=) contain. This one splits at white space, and returns only what bash
# replaces: the part after the last of these characters.
BASH_SCRIPT = """\
%(complete_func)s() {
    local line="${COMP_LINE:0:$COMP_POINT}" words type value
    local incomplete="${line##* }" replaced="${COMP_WORDS[COMP_CWORD]}"
    [[ "$replaced" == [:=] ]] && replaced=""
    local kept="${incomplete%%"$replaced"}"
    read -r -a words <<< "$line"
    local index=$(( ${#words[@]} - 1 ))
    [[ -z "$incomplete" ]] && index=${#words[@]}
    while IFS=',' read -r type value; do
        case "$type" in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("${value#"$kept"}") ;;
        esac
    done <<< "$(env COMP_WORDS="$line" COMP_CWORD="$index" %(complete_var)s=bash_complete "$1")"
    [[ "${COMPREPLY[*]}" == *[=/] ]] && compopt -o nospace
    return 0
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class LakhBashComplete(BashComplete):
    source_template = BASH_SCRIPT


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@print_result
def completion(shell: str) -> CommandResult:
    """Print a shell completion script.

    It completes commands, options, and the names of recipes, runs, benchmarks and settings. For bash, add this line to
    ~/.bashrc: eval "$(lakh completion bash)"
    """
    from lakh.cli.main import cli

    complete = LakhBashComplete if shell == "bash" else get_completion_class(shell)
    assert complete is not None  # click supports all three shells
    script = complete(cli, {}, "lakh", "_LAKH_COMPLETE").source()
    return CommandResult({"shell": shell, "script": script}, script)
