"""lakh tag: names for a run, by which the dashboard finds it."""

from __future__ import annotations

import json

import click

from lakh.cli.complete import complete_runs
from lakh.cli.output import CommandResult, print_result

__all__ = ["tag"]


@click.command()
@click.argument("run_dir", shell_complete=complete_runs)
@click.argument("names", nargs=-1, metavar="[TAG]...")
@click.option("--remove", "removed", multiple=True, metavar="TAG", help="Take a tag away. Repeatable.")
@print_result
def tag(run_dir: str, names: tuple[str, ...], removed: tuple[str, ...]) -> CommandResult:
    """Give a run names to find it by, e.g. baseline or lr=3e-4.

    Without a TAG, prints those it has. The table of runs in lakh dashboard searches and filters by them.
    """
    from lakh import storage
    from lakh.dashboard.find import is_run
    from lakh.dashboard.run_files.tags import MAX_TAGS, TAGS_FILE, is_tag, read_tags
    from lakh.errors import UserError

    folder = storage.local_path(run_dir)
    if not is_run(folder):
        raise UserError(run_dir, "is not the folder of a run", "give one that lakh train has made")
    for name in names:
        if not is_tag(name):
            todo = "use at most 40 letters, digits and . : = / + - _, and begin with a letter or digit"
            raise UserError(f"tag {name[:60]!r}", "is not usable", todo)
    before = set(read_tags(folder))
    after = sorted((before | set(names)) - set(removed))
    if len(after) > MAX_TAGS:
        raise UserError(run_dir, f"would have {len(after)} tags", f"keep at most {MAX_TAGS}: lakh tag RUN --remove TAG")
    if names or removed:
        storage.write_bytes(folder / TAGS_FILE, json.dumps({"tags": after}).encode() + b"\n")
    return CommandResult({"run_dir": run_dir, "tags": after}, " ".join(after) or "no tags")
