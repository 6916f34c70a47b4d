"""lakh plan validate and calibrate: the planner's error on measurements, and how it is fitted to them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from lakh.cli.output import CommandResult, console, print_result, table
from lakh.cli.plan import FILE

__all__ = ["calibrate", "validate"]

points_option = click.option(
    "--points", type=FILE, help="CSV of published configurations and speeds  [default: the one that ships with lakh]"
)
SCORES = ("mape", "median_ape", "p95_ape", "bias")
HEAD = ["rows", "MAPE", "median", "p95", "bias", "tau in clusters"]


@click.command()
@points_option
@click.option("--calibration", type=FILE, help="Calibration file  [default: the one that ships with lakh]")
@click.option("--unseen", "only_unseen", is_flag=True, help="Only configurations that no fit has seen.")
@click.option("--leave-one-out", is_flag=True, help="Also predict every model family by a fit without it (minutes).")
@click.option("--transfer", help="Also fit on the sources whose name begins with this, and test on all others.")
@click.option(
    "--cross-validate",
    metavar="SOURCE",
    help="Also predict each row of a source, or of a part such as Blackwell or experts, by fits without that row.",
)
@click.option("--repeats", type=click.IntRange(1, 100), default=5, show_default=True, help="Of --cross-validate.")
@click.option("--worst", type=click.IntRange(min=0), default=0, help="Number of worst rows to list.")
@print_result
def validate(
    points: str | None,
    leave_one_out: bool,
    transfer: str | None,
    cross_validate: str | None,
    repeats: int,
    **report: Any,
) -> CommandResult:
    """Measure the planner's error on published measurements."""
    from lakh.planner.calibration.fit import FIT_SETTINGS, load_calibrations
    from lakh.planner.calibration.measured_points import SHIPPED_POINTS, read_points
    from lakh.planner.validation import accuracy, cross_validation
    from lakh.planner.validation.own_run_errors import own_run_errors
    from lakh.planner.validation.part_scores import part_scores

    read = read_points(points or SHIPPED_POINTS)
    calibrations = load_calibrations(report.pop("calibration"))
    asked: dict[str, Any] = {}  # before the report, so that an unknown source is an error at once
    with console().status("fitting") as status:
        if leave_one_out:
            asked["leave_one_family_out"] = {
                f"{name} ({kind})": asdict(score)
                for kind in FIT_SETTINGS
                if sum(point.kind == kind for point in read.kept) >= 10
                for name, score in accuracy.leave_one_family_out(read.kept, kind, status.update).items()
            }
        if transfer is not None:
            asked["transfer"] = accuracy.transfer(read.kept, transfer)
        if cross_validate is not None:
            found = cross_validation.cross_validate(read.kept, cross_validate, repeats=repeats, progress=status.update)
            asked["cross_validation"] = {
                "source": cross_validate, "folds": cross_validation.FOLDS, "repeats": repeats, **asdict(found)
            }  # fmt: skip
    data = accuracy.accuracy_report(read, calibrations, **report)
    data["parts"] = part_scores(read.kept, calibrations)
    data["own_runs"] = own_run_errors()
    data |= asked
    return CommandResult(data, _page(data))


@click.command()
@points_option
@click.option(
    "--from",
    "runs",
    multiple=True,
    type=click.Path(exists=True),
    help="Folder of a run of your own, or CSV of runs: fit the factor of lakh's trainer instead.",
)
@click.option("--out", required=True, type=FILE, help="File to write (TOML).")
@print_result
def calibrate(points: str | None, runs: tuple[str, ...], out: str) -> CommandResult:
    """Fit the planner to published measurements, or the factor of lakh's trainer to your own runs.

    `--from RUN` compares measured steps of a run with the planner; `lakh plan estimate --factors FILE` applies them.
    """
    from lakh.errors import UserError

    if points and runs:
        raise UserError("lakh plan calibrate", "got --points and --from", "give one of them")
    return _calibrate_to_runs(runs, out) if runs else _calibrate_to_points(points, out)


def _calibrate_to_runs(sources: tuple[str, ...], out: str) -> CommandResult:
    from lakh import storage
    from lakh.planner.calibration.own_runs import own_factors, read_runs
    from lakh.planner.calibration.program_factor import own_factors_to_toml

    runs = [run for source in sources for run in read_runs(source)]
    factors = own_factors(runs)
    storage.write_bytes(out, own_factors_to_toml(factors).encode())
    found = [
        {"run": run.name, "gpu": run.kind, "gpus": int(run.plan.gpus), "steps": run.steps, "measured_s": run.step_s,
         "predicted_s": float(run.predicted().total_s), "on_gpu": run.on_gpu,
         "error": factors[run.kind].on_gpu / run.on_gpu - 1}
        for run in runs
    ]  # fmt: skip
    rows = [
        [row["run"], row["gpu"], row["gpus"], f"{row['measured_s']:.4g}", f"{row['predicted_s']:.4g}",
         f"{row['on_gpu']:.3f}", f"{row['error']:+.1%}"]
        for row in found
    ]  # fmt: skip
    head = ["run", "GPU", "GPUs", "measured s", "without factor s", "factor", "error with the median factor"]
    return CommandResult({"file": out, "factors": {k: asdict(f) for k, f in factors.items()}, "runs": found},
                         table(head, rows, f"wrote {out}"))  # fmt: skip


def _calibrate_to_points(points: str | None, out: str) -> CommandResult:
    from pathlib import Path

    from lakh import storage
    from lakh.errors import UserError
    from lakh.planner.calibration.fit import HOLD_OUT_TENTHS, SALT, to_toml
    from lakh.planner.calibration.measured_points import SHIPPED_POINTS, read_points
    from lakh.planner.validation import accuracy

    points = points or str(SHIPPED_POINTS)
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
    if data["parts"]:
        pages.append(_parts_page(data["parts"]))
    if data["coverage"]:
        found = data["coverage"]
        rows = [["all", f"{found['all']:.1%}"], ["all, bars from the other configurations", f"{found['left_out']:.1%}"]]
        rows += [[name, f"{share:.1%}"] for part in ("by_gpu", "by_kind") for name, share in found[part].items()]
        pages.append(table(["unseen rows", "inside their error bar"], rows, f"Coverage; stated: {found['stated']:.0%}"))
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
    own = data["own_runs"]
    rows = [
        [row["run"], row["gpu"], f"{row['measured_s']:.4g}", f"{row['predicted_s']:.4g}", f"{row['error']:+.1%}",
         row["basis"]]
        for row in own["rows"]
    ]  # fmt: skip
    head = ["run of lakh's trainer", "GPU", "measured s", "predicted s", "error", "predicted with"]
    scores = (f"{basis}: {s['n']} runs, MAPE {s['mape']:.1%}" for basis, s in own["scores"].items())
    pages.append(table(head, rows, "; ".join(scores)))
    if data["memory"]:
        names = ("mape", "median_ape", "bias")
        rows = [[source, m["n"], *(_share(n, m[n]) for n in names)] for source, m in data["memory"].items()]
        head = ["source", "rows", "MAPE", "median", "bias"]
        pages.append(table(head, rows, "Measured peak memory; nothing is fitted"))
    return Group(*pages, "\n".join(f"excluded, {why}: {n}" for why, n in data["left_out"].items()))


def _parts_page(parts: dict[str, Any]) -> Any:
    rows = [
        [name, part["n"], _share("mape", part["mape"]), f"{part['mape_low']:.1%} to {part['mape_high']:.1%}",
         *(_share(n, part[n]) for n in ("median_ape", "bias")), f"{part['coverage']:.0%}", _rows(part["releases"]),
         _rows(part["floor"])]
        for name, part in parts.items()
    ]  # fmt: skip
    head = ["part", "unseen rows", "MAPE", "95 % of resamples", "median", "bias", "in error bar", "between releases"]
    title = (
        "Parts of the unseen rows; between releases: each row predicted by other releases of its configuration; floor:"
        " the best constant per configuration"
    )
    return table([*head, "floor"], rows, title)


def _rows(score: dict[str, Any] | None) -> str:
    return f"{score['mape']:.1%} ({score['n']} rows)" if score else ""


def _cross_validation_pages(data: dict[str, Any]) -> list[Any]:
    title = f"Each row by fits without it and its near duplicates: {data['folds']} folds, {data['repeats']} times"
    pages = [_scores(title, {data["source"]: data["score"]}, "source")]
    floor = f"; best constant per configuration: {_rows(data['floor'])}" if data["floor"] else ""
    pages.append(f"MAPE: 95 % of resamples between {data['mape_low']:.1%} and {data['mape_high']:.1%}{floor}")
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
