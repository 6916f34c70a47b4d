"""lakh checkpoint: list, verify and remove the checkpoints of a run."""

from __future__ import annotations

import click

from lakh.cli.complete import complete_runs
from lakh.cli.groups import HintingGroup
from lakh.cli.output import CommandResult, print_result, styled, table
from lakh.errors import DataError, UserError
from lakh.storage import exists, is_complete, join, require_folder

__all__ = ["checkpoint"]


@click.group(cls=HintingGroup)
def checkpoint() -> None:
    """List, verify and remove the checkpoints of a run."""


@checkpoint.command("list")
@click.argument("run_dir", shell_complete=complete_runs)
@print_result
def list_(run_dir: str) -> CommandResult:
    """List the complete checkpoints of a run, oldest first."""
    _require_run(run_dir)
    from lakh.checkpoint import Manifest, list_complete

    rows: list[dict[str, object]] = []
    for step, folder in list_complete(run_dir):
        row: dict[str, object] = {
            "step": step,
            "mode": "",
            "ranks": None,
            "bytes": None,
            "folder": folder,
            "damaged": "",
        }
        try:
            manifest = Manifest.read(folder)
            row |= {"mode": manifest.mode, "ranks": manifest.world, "bytes": manifest.bytes}
        except DataError as error:  # keep listing the others
            row["damaged"] = error.found
        rows.append(row)
    shown = ["step", "mode", "ranks", "bytes", "folder", *(["damaged"] if any(row["damaged"] for row in rows) else [])]
    text = table(shown, [[row[name] for name in shown] for row in rows])
    return CommandResult({"checkpoints": rows}, text if rows else f"{run_dir}: no complete checkpoint")


@checkpoint.command()
@click.argument("path", shell_complete=complete_runs)
@print_result
def verify(path: str) -> CommandResult:
    """Compare every file of a checkpoint, or of all checkpoints of a run, with its hash.

    Of a single incremental checkpoint, also those that it is relative to.
    """
    from lakh.checkpoint import base_folder, list_complete, verify_chain
    from lakh.checkpoint import verify as check

    is_single = is_complete(path)
    folders = [path] if is_single else [folder for _, folder in list_complete(path)]
    if not folders:
        raise UserError(path, "holds no complete checkpoint", "give the folder of a run or of a checkpoint")
    rows = []
    for folder in folders:
        try:
            manifest = verify_chain(folder) if is_single else check(folder)
            base_folder(folder, manifest)
            found = f"{len(manifest.files)} files match"
            if manifest.base is not None:
                found += f"; relative to {manifest.base.folder}"
            if not manifest.can_resume:
                found += "; holds weights alone and cannot resume"
            if not manifest.is_hashed:
                found += "; the manifest has no hash (written by an earlier version)"
            rows.append({"folder": folder, "ok": True, "found": found})
        except DataError as error:
            rows.append({"folder": folder, "ok": False, "found": str(error)})
    ok = all(row["ok"] for row in rows)
    cells = [
        (row["folder"], styled("ok", "good") if row["ok"] else styled("damaged", "bad"), row["found"]) for row in rows
    ]
    text = table(["folder", "", "found"], cells)
    return CommandResult({"ok": ok, "checkpoints": rows}, text, exit_code=0 if ok else DataError.exit_code)


@checkpoint.command()
@click.argument("run_dir", shell_complete=complete_runs)
@click.option(
    "--keep", type=click.IntRange(min=1), default=3, show_default=True, help="Number of good checkpoints to keep."
)
@print_result
def gc(run_dir: str, keep: int) -> CommandResult:
    """Remove all but the newest good checkpoints, and leftovers of interrupted saves.

    Verifies checkpoints from the newest on; damaged ones do not count as kept.
    """
    _require_run(run_dir)
    from lakh.checkpoint import prune

    done = prune(run_dir, keep=keep)
    lines = ["removed:", *done.removed] if done.removed else ["nothing to remove"]
    lines += ["damaged, kept because they are newer than the oldest good one:", *done.damaged] if done.damaged else []
    return CommandResult({"removed": done.removed, "kept": done.kept, "damaged": done.damaged}, "\n".join(lines))


def _require_run(url: str) -> None:
    """A folder of something else has no checkpoints either, and the user means another one."""
    require_folder(url, "give the folder of a run")
    if not (exists(join(url, "run.toml")) or exists(join(url, "checkpoints"))):
        raise UserError(url, "is not the folder of a run", "give one that lakh train has made")
