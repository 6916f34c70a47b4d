"""Two results side by side: is the difference significant?

Problems are paired. With one sample per problem on both sides the test is McNemar's, exact: of the problems on which
the two disagree, how likely is a split at least this uneven if both sides win equally often. With several samples it is
a sign-flip test on the differences per problem. The interval of the difference is a bootstrap over pairs. Bits per byte
are compared likewise, with documents in place of problems.

Pure functions over result documents; randomness has a fixed seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lakh import storage
from lakh.errors import UserError
from lakh.evals.scoring.score import bootstrap_interval

__all__ = ["ResultComparison", "compare", "read_result"]

RESAMPLES = 10_000
ALPHA = 0.05


@dataclass(frozen=True, slots=True)
class ResultComparison:
    task: str
    metric: str
    """"pass@1" or "bits per byte"."""
    problems: int
    """Problems or documents that both have."""
    left: float
    right: float
    difference: float
    """right - left, of the metric over what both have."""
    interval: tuple[float, float]
    p_value: float
    test: str
    gained: tuple[str, ...]
    """Problems or documents on which the right is better."""
    lost: tuple[str, ...]
    settings: tuple[tuple[str, Any, Any], ...]
    """Parts of the protocol that differ: key, left, right."""
    verdict: str


def read_result(path: str) -> dict[str, Any]:
    """A result.json, or the folder that holds it."""
    file = path if path.endswith(".json") else storage.join(path, "result.json")
    todo = "give a folder that `lakh eval --out` wrote"
    try:
        document = json.loads(storage.read_bytes(file))
    except ValueError:
        raise UserError(file, "is not JSON", todo) from None
    if not _is_result(document):
        raise UserError(file, "is not a result of an evaluation", todo)
    return dict(document)


def _is_result(document: Any) -> bool:
    try:
        if "document_scores" in document:
            sound = [
                type(row["name"]) is str and row["bits"] >= 0 < row["bytes"] for row in document["document_scores"]
            ]
        else:
            rows = document["problem_scores"]
            sound = [type(row["task_id"]) is str and 0 <= row["num_passed"] <= row["num_samples"] > 0 for row in rows]
        return all(sound) and type(document["settings"]["data_sha256"]) is type(document["task"]) is str
    except (TypeError, KeyError):
        return False


def compare(left: Mapping[str, Any], right: Mapping[str, Any]) -> ResultComparison:
    if left["task"] != right["task"]:
        raise UserError("diff", f"one is {left['task']} and one {right['task']}", "compare results of one task")
    if left["settings"]["data_sha256"] != right["settings"]["data_sha256"]:
        raise UserError("diff", "the two used different data under the same name", "score both with the same --data")
    if "document_scores" in left and "document_scores" in right:
        return _compare_bits(left, right)
    a, b = _pass_rates(left), _pass_rates(right)
    shared = [key for key in a if key in b]
    if not shared:
        raise UserError("diff", "the two have no problem in common", "score the same problems on both sides")
    differences = [b[key][0] - a[key][0] for key in shared]
    if all(a[key][1] == b[key][1] == 1 for key in shared):
        won, lost = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
        p_value, test = mcnemar(won, lost), "McNemar, exact, two-sided"
    else:
        p_value, test = sign_flip(differences), f"sign flips per problem ({RESAMPLES} draws), two-sided"
    return ResultComparison(
        task=left["task"],
        metric="pass@1",
        problems=len(shared),
        left=sum(a[key][0] for key in shared) / len(shared),
        right=sum(b[key][0] for key in shared) / len(shared),
        difference=sum(differences) / len(differences),
        interval=bootstrap_interval(differences),
        p_value=p_value,
        test=test,
        gained=tuple(key for key, d in zip(shared, differences, strict=True) if d > 0),
        lost=tuple(key for key, d in zip(shared, differences, strict=True) if d < 0),
        settings=tuple(_differing(left["settings"], right["settings"])),
        verdict=_verdict(sum(differences), p_value),
    )


def _compare_bits(left: Mapping[str, Any], right: Mapping[str, Any]) -> ResultComparison:
    """Both sides have the same documents, because their data has the same hash."""
    names = [row["name"] for row in left["document_scores"]]
    sizes = [row["bytes"] for row in left["document_scores"]]
    a, b = ([row["bits"] for row in result["document_scores"]] for result in (left, right))
    saved = [before - after for before, after in zip(a, b, strict=True)]
    p_value = sign_flip(saved)
    low, high = bootstrap_interval(saved, sizes)
    return ResultComparison(
        task=left["task"],
        metric="bits per byte",
        problems=len(names),
        left=sum(a) / sum(sizes),
        right=sum(b) / sum(sizes),
        difference=-sum(saved) / sum(sizes),
        interval=(-high, -low),
        p_value=p_value,
        test=f"sign flips per document ({RESAMPLES} draws), two-sided",
        gained=tuple(name for name, d in zip(names, saved, strict=True) if d > 0),
        lost=tuple(name for name, d in zip(names, saved, strict=True) if d < 0),
        settings=tuple(_differing(left["settings"], right["settings"])),
        verdict=_verdict(sum(saved), p_value),
    )


def _verdict(gain_of_right: float, p_value: float) -> str:
    better = "right is better" if gain_of_right > 0 else "left is better"
    return f"{better if p_value < ALPHA else 'no difference shown'} (p = {p_value:.4g})"


def mcnemar(won: int, lost: int) -> float:
    """Two-sided exact p-value: won + lost throws of a fair coin split at least this unevenly."""
    total = won + lost
    if total == 0:
        return 1.0
    tail = sum(math.comb(total, i) for i in range(min(won, lost) + 1))
    return min(1.0, 2 * tail / 2**total)


def sign_flip(differences: Sequence[float]) -> float:
    """How often the mean is at least this far from zero when each difference has a random sign."""
    import numpy as np

    values = np.asarray([d for d in differences if d], dtype=np.float64)
    if not len(values):
        return 1.0
    generator = np.random.default_rng(0)
    seen = abs(values.sum())
    beyond = 0
    for _ in range(10):
        signs = generator.choice((-1.0, 1.0), (RESAMPLES // 10, len(values)))
        beyond += int((abs(signs @ values) >= seen - 1e-12).sum())
    return (beyond + 1) / (RESAMPLES + 1)


def _pass_rates(result: Mapping[str, Any]) -> dict[str, tuple[float, int]]:
    rows = result["problem_scores"]
    return {row["task_id"]: (row["num_passed"] / row["num_samples"], row["num_samples"]) for row in rows}


def _differing(left: dict[str, Any], right: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    # Of the calibration only the limits matter, which are compared.
    keys = [key for key in left | right if key not in ("samples_sha256", "source", "calibration")]
    return [(key, left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)]
