"""lakh plan validate and calibrate: the planner's error on published measurements, and how it is fitted to them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from lakh.cli.output import CommandResult, console, print_result, table
from lakh.cli.plan import FILE

__all__ = ["calibrate", "validate"]

points_option = click.option("--points", required=True, type=FILE, help="CSV of published configurations and speeds.")
SCORES = ("mape", "median_ape", "p95_ape", "bias")
HEAD = ["rows", "MAPE", "median", "p95", "bias", "tau in clusters"]


@click.command()
@points_option
@click.option("--calibration", type=FILE, help="Calibration file  [default: the one that ships with lakh]")
@click.option("--unseen", "only_unseen", is_flag=True, help="Only configurations that no fit has seen.")
@click.option("--leave-one-out", is_flag=True, help="Also predict every model family by a fit without it (minutes).")
@click.option("--transfer", help="Also fit on the sources whose name begins with this, and test on all others.")
@click.option("--cross-validate", metavar="SOURCE", help="Also predict each row of a source by fits without that row.")
@click.option("--repeats", type=click.IntRange(1, 100), default=5, show_default=True, help="Of --cross-validate.")
@click.option("--worst", type=click.IntRange(min=0), default=0, help="Number of worst rows to list.")
@print_result
def validate(
    points: str, leave_one_out: bool, transfer: str | None, cross_validate: str | None, repeats: int, **report: Any
) -> CommandResult:
    """Measure the planner's error on published measurements."""
    from lakh.planner.calibration.fit import FIT_SETTINGS, load_calibrations
    from lakh.planner.calibration.measured_points import read_points
    from lakh.planner.validation import accuracy, cross_validation

    read = read_points(points)
    data = accuracy.accuracy_report(read, load_calibrations(report.pop("calibration")), **report)
    with console().status("fitting") as status:
        if leave_one_out:
            data["leave_one_family_out"] = {
                f"{name} ({kind})": asdict(score)
                for kind in FIT_SETTINGS
                if sum(point.kind == kind for point in read.kept) >= 10
                for name, score in accuracy.leave_one_family_out(read.kept, kind, status.update).items()
            }
        if transfer is not None:
            data["transfer"] = accuracy.transfer(read.kept, transfer)
        if cross_validate is not None:
            found = cross_validation.cross_validate(read.kept, cross_validate, repeats=repeats, progress=status.update)
            data["cross_validation"] = {
                "source": cross_validate, "folds": cross_validation.FOLDS, "repeats": repeats, **asdict(found)
            }  # fmt: skip
    return CommandResult(data, _page(data))


@click.command()
@points_option
@click.option("--out", required=True, type=FILE, help="Calibration file to write (TOML).")
@print_result
def calibrate(points: str, out: str) -> CommandResult:
    """Fit the planner to published measurements."""
    from pathlib import Path

    from lakh import storage
    from lakh.errors import UserError
    from lakh.planner.calibration.fit import HOLD_OUT_TENTHS, SALT, to_toml
    from lakh.planner.calibration.measured_points import read_points
    from lakh.planner.validation import accuracy

    read = read_points(points)
    with console().status("fitting") as status:
        found = accuracy.calibrate(read.kept, status.update)
    if not found:
        raise UserError(points, "has fewer than 3 rows of every GPU type", "give more measurements")
    held_out = f"{HOLD_OUT_TENTHS} of 10 configurations held out by salt {SALT!r}"
    storage.write_bytes(out, to_toml(found, f"{Path(points).name}: {len(read.kept)} rows; {held_out}.").encode())
    kinds = {
        kind: {"knobs": one.num_parameters, "fractions": asdict(one.efficiency), "codes": dict(one.program_factors),
               "heldout": dict(one.error)}
        for kind, one in found.items()
    }  # fmt: skip
    rows = [
        [kind, one.num_parameters, len(one.fitted), *(_share(n, one.error[n]) if one.error else "" for n in SCORES)]
        for kind, one in found.items()
    ]
    head = ["GPU type", "parameters", "configurations", "held-out MAPE", "median", "p95", "bias"]
    return CommandResult({"file": out, "kinds": kinds}, table(head, rows, f"wrote {out}"))


def _share(name: str, value: float) -> str:
    return f"{value:+.1%}" if name == "bias" else f"{value:.1%}"


def _scores(title: str, scores: dict[str, Any], first: str = "source (GPU type)") -> Any:
    rows = [
        [name, score["n"], *(_share(n, score[n]) for n in SCORES),
         "" if score["kendall_tau"] is None else f"{score['kendall_tau']:.2f}"]
        for name, score in scores.items()
    ]  # fmt: skip
    return table([first, *HEAD], rows, title)


def _page(data: dict[str, Any]) -> Any:
    from rich.console import Group

    pages = [_scores("All rows", {"all": data, **data["by_source"]})]
    if data["unseen"]:
        unseen = {"all": data["unseen"], **data["unseen"]["by_source"]}
        pages.append(_scores("Rows whose configuration no fit has seen", unseen))
    if "leave_one_family_out" in data:
        pages.append(_scores("Each family predicted by a fit without it", data["leave_one_family_out"]))
    if "transfer" in data:
        flat: dict[str, Any] = {}
        for kind, value in data["transfer"].items():
            flat |= {kind: value} if "n" in value else {f"{kind}: {name}": score for name, score in value.items()}
        pages.append(_scores("Fitted on one source, tested on the others, software factors at 1", flat))
    if "cross_validation" in data:
        pages += _cross_validation_pages(data["cross_validation"])
    if "worst" in data:
        rows = [[w["id"], w["source"], f"{w['error']:+.1%}", w["step_s"]] for w in data["worst"]]
        pages.append(table(["row", "source", "error", "measured s"], rows, "Worst rows"))
    if data["memory"]:
        names = ("mape", "median_ape", "bias")
        rows = [[source, m["n"], *(_share(n, m[n]) for n in names)] for source, m in data["memory"].items()]
        head = ["source", "rows", "MAPE", "median", "bias"]
        pages.append(table(head, rows, "Measured peak memory; nothing is fitted"))
    return Group(*pages, "\n".join(f"excluded, {why}: {n}" for why, n in data["left_out"].items()))


def _cross_validation_pages(data: dict[str, Any]) -> list[Any]:
    title = f"Each row by fits without it and its near duplicates: {data['folds']} folds, {data['repeats']} times"
    pages = [_scores(title, {data["source"]: data["score"]}, "source")]
    if data["pairs"]:
        pages.append(
            f"{data['groups']} groups of near duplicates, {data['pairs']} pairs of layouts, {len(data['wrong'])} in the"
            f" wrong order; tau {data['score']['kendall_tau']:.2f}, 95 % of resamples between {data['tau_low']:.2f}"
            f" and {data['tau_high']:.2f}"
        )
    if data["wrong"]:
        rows = [
            [w["faster"], w["slower"], f"{w['measured_gap']:.1%}", f"{w['predicted_gap']:+.1%}"] for w in data["wrong"]
        ]
        pages.append(table(["faster", "slower", "measured gap", "predicted gap"], rows, "Pairs in the wrong order"))
    return pages
