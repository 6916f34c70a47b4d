"""Every claim of the seed article is recomputed; formulas are arithmetic and nothing else."""

from pathlib import Path

import pytest

from lakh.errors import ConfigError
from lakh.planner.validation.claims_audit import audit, evaluate, load_claims

RIGHT = {
    "1": 5.88e23, "2": 3.88e20, "3": 1514, "4": 1.52, "5": 7.6 / 24, "6": 989.4, "7": 0.216, "8": 100.8e6, "9": 83.3e6,
    "10": 4e9, "11": 0.980, "12": 40, "13": 64, "14": 6.3, "15": 1.4e12, "16": 47.4, "17": 55.7e3, "18": 0.70,
    "19": 1 / 3, "20": 1120, "21": 3418, "22": 85000, "llama3-gpu-share": 35.3, "llama3-gpu-total": 64.0,
}  # fmt: skip
HOLDS = {"1", "15", "22"}
IMPOSSIBLE = {"11", "12", "17", "20"}


def test_all_rows_of_the_seed_article_have_their_right_value_and_verdict() -> None:
    found = {check.id: check for check in audit(load_claims())}
    assert set(found) == set(RIGHT)
    for name, right in RIGHT.items():
        assert found[name].right == pytest.approx(right, rel=0.006), name
        expected = "holds" if name in HOLDS else "impossible" if name in IMPOSSIBLE else "off by"
        assert found[name].verdict.startswith(expected), name
        assert found[name].reason
        assert found[name].source
    assert found["2"].verdict == "off by 997x"
    assert found["16"].verdict == "off by 1/3.95"


def write(tmp_path: Path, formula: str, stated: float = 2.0, extra: str = "") -> Path:
    file = tmp_path / "claims.toml"
    file.write_text(
        f'title = "t"\n[constants]\nx = 4\n[[claims]]\nid = "a"\nclaim = "c"\nstated = {stated}\n'
        f'formula = "{formula}"\nsource = "s"\n{extra}'
    )
    return file


@pytest.mark.parametrize(
    ("formula", "stated", "verdict"),
    [
        ("x / 2", 2.0, "holds"),
        ("x", 2.0, "off by 1/2"),
        ("x / 4", 3.0, "off by 3x"),
        ("0 * x", 3.0, "off"),
        ("-x", 4.0, "off"),
    ],
)
def test_a_claim_is_marked_by_its_distance(formula: str, stated: float, verdict: str, tmp_path: Path) -> None:
    (found,) = audit(load_claims(write(tmp_path, formula, stated)))
    assert found.verdict == verdict


@pytest.mark.parametrize(
    "formula",
    ["__import__('os')", "x.real", "[1][0]", "lambda: 1", "y + 1", "1 +", "1 / 0", "9**9**9**9", "sqrt(-1)", "'a'",
     "True", "(-8) ** 0.5", "min()", "x if x else 1"],
)  # fmt: skip
def test_formulas_that_are_not_arithmetic_are_refused(formula: str) -> None:
    with pytest.raises(ConfigError, match="claim a"):
        evaluate(formula, {"x": 4.0}, "claim a")


def test_duplicate_claim_ids_are_refused(tmp_path: Path) -> None:
    again = '[[claims]]\nid = "a"\nclaim = "c"\nstated = 1\nformula = "1"\nsource = "s"\n'
    with pytest.raises(ConfigError, match="appears twice"):
        load_claims(write(tmp_path, "x", extra=again))
