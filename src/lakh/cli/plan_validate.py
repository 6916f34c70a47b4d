"""lakh plan validate and calibrate: the planner's error on published measurements, and how it is fitted to them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from lakh.cli.output import CommandResult, console, print_result, table

__all__ = ["calibrate", "validate"]

points_option = click.option(
    "--points", required=True, type=click.Path(dir_okay=False), help="CSV of published configurations and speeds."
)
COLUMNS = ["n", "mape", "median_ape", "p95_ape", "bias", "kendall_tau"]


@click.command()
@points_option
@click.option(
    "--calibration", type=click.Path(dir_okay=False), help="Calibration file  [default: the one that ships with lakh]"
)
@click.option("--unseen", "only_unseen", is_flag=True, help="Only configurations that no fit has seen.")
@click.option("--leave-one-out", is_flag=True, help="Also predict every model family by a fit without it (minutes).")
@click.option("--transfer", help="Also fit on the sources whose name begins with this, and test on all others.")
@click.option(
    "--cross-validate", "crossed", metavar="SOURCE", help="Also predict each row of a source by fits without that row."
)
@click.option("--repeats", type=click.IntRange(1, 100), default=5, show_default=True, help="Of --cross-validate.")
@click.option("--worst", type=click.IntRange(min=0), default=0, help="Number of worst rows to list.")
@print_result
def validate(
    points: str,
    calibration: str | None,
    only_unseen: bool,
    leave_one_out: bool,
    transfer: str | None,
    crossed: str | None,
    repeats: int,
    worst: int,
) -> CommandResult:
    """The planner's error on published measurements."""
    from lakh.planner.calibration.fit import FIT_SETTINGS, load_calibrations
    from lakh.planner.calibration.measured_points import read_points
    from lakh.planner.validation import accuracy

    read = read_points(points)
    everything = read.kept
    data = accuracy.accuracy_report(read, load_calibrations(calibration), only_unseen=only_unseen, worst=worst)
    if leave_one_out:
        data["leave_one_family_out"] = {}
        with console().status("fitting") as status:
            for kind in [k for k in FIT_SETTINGS if sum(p.kind == k for p in everything) >= 10]:
                scores = accuracy.leave_one_family_out(everything, kind, lambda name: status.update(f"without {name}"))
                data["leave_one_family_out"] |= {f"{n} ({kind})": s for n, s in _plain(scores).items()}
    if transfer is not None:
        data["transfer"] = _plain_nested(accuracy.transfer(everything, transfer))
    if crossed is not None:
        from lakh.planner.validation.cross_validation import FOLDS, cross_validate

        with console().status("fitting") as status:
            crossed_result = cross_validate(everything, crossed, repeats=repeats, progress=status.update)
        data["cross_validation"] = {"source": crossed, "folds": FOLDS, "repeats": repeats, **asdict(crossed_result)}
    return CommandResult(data, _page(data))


@click.command()
@points_option
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="Calibration file to write (TOML).")
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
    note = (
        f"{Path(points).name}: {len(read.kept)} rows; {HOLD_OUT_TENTHS} of 10 configurations held out by salt {SALT!r}."
    )
    storage.write_bytes(out, to_toml(found, note).encode())
    data = {
        "file": out,
        "kinds": {
            kind: {
                "knobs": one.num_parameters,
                "fractions": asdict(one.efficiency),
                "codes": dict(one.program_factors),
                "heldout": dict(one.error),
            }
            for kind, one in found.items()
        },
    }
    rows = [
        [
            kind,
            one.num_parameters,
            len(one.fitted),
            *(f"{one.error[n]:.1%}" if n in one.error else "" for n in COLUMNS[1:5]),
        ]
        for kind, one in found.items()
    ]
    head = ["GPU type", "parameters", "configurations", "held-out MAPE", "median", "p95", "bias"]
    return CommandResult(data, table(head, rows, f"wrote {out}"))


def _plain(scores: dict[str, Any]) -> dict[str, Any]:
    return {name: asdict(score) for name, score in scores.items()}


def _plain_nested(scores: dict[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) if isinstance(value, dict) else asdict(value) for name, value in scores.items()}


def _line(name: str, score: dict[str, Any]) -> list[Any]:
    tau = score["kendall_tau"]
    shares = [f"{score[n]:+.1%}" if n == "bias" else f"{score[n]:.1%}" for n in COLUMNS[1:5]]
    return [name, score["n"], *shares, "" if tau is None else f"{tau:.2f}"]


def _crossed(data: dict[str, Any]) -> list[Any]:
    title = f"Each row by fits without it and its near duplicates: {data['folds']} folds, {data['repeats']} times"
    head = ["source", "rows", "MAPE", "median", "p95", "bias", "tau in clusters"]
    pages = [table(head, [_line(data["source"], data["score"])], title)]
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


def _page(data: dict[str, Any]) -> Any:
    from rich.console import Group

    head = ["source (GPU type)", "rows", "MAPE", "median", "p95", "bias", "tau in clusters"]
    pages = [table(head, [_line("all", data), *(_line(n, s) for n, s in data["by_source"].items())], "All rows")]
    if data["unseen"]:
        rows = [_line("all", data["unseen"]), *(_line(n, s) for n, s in data["unseen"]["by_source"].items())]
        pages.append(table(head, rows, "Rows whose configuration no fit has seen"))
    if "leave_one_family_out" in data:
        rows = [_line(n, s) for n, s in data["leave_one_family_out"].items()]
        pages.append(table(head, rows, "Each family predicted by a fit without it"))
    if "transfer" in data:
        rows = []
        for kind, value in data["transfer"].items():
            rows += [_line(kind, value)] if "n" in value else [_line(f"{kind}: {n}", s) for n, s in value.items()]
        pages.append(table(head, rows, "Fitted on one source, tested on the others, software factors at 1"))
    if "cross_validation" in data:
        pages += _crossed(data["cross_validation"])
    if "worst" in data:
        rows = [[w["id"], w["source"], f"{w['error']:+.1%}", w["step_s"]] for w in data["worst"]]
        pages.append(table(["row", "source", "error", "measured s"], rows, "Worst rows"))
    if data["memory"]:
        rows = [
            [n, m["n"], f"{m['mape']:.1%}", f"{m['median_ape']:.1%}", f"{m['bias']:+.1%}"]
            for n, m in data["memory"].items()
        ]
        pages.append(
            table(["source", "rows", "MAPE", "median", "bias"], rows, "Measured peak memory; nothing is fitted")
        )
    lines = [f"excluded, {why}: {n}" for why, n in data["left_out"].items()]
    return Group(*pages, "\n".join(lines))
