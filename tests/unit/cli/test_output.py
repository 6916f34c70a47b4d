"""Tables and text output in windows of any width."""

import click
import pytest
from click.testing import CliRunner
from rich.console import Group
from rich.text import Text

from lakh.cli.output import CommandResult, print_result, table


def shown(answer: CommandResult) -> str:
    @click.command()
    @print_result
    def command() -> CommandResult:
        return answer

    return CliRunner().invoke(command, []).output


def test_a_no_wrap_line_is_complete_in_a_narrow_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    protocol = " | ".join(f"setting{number}={number}" for number in range(40))
    text = Group(table(["a"], [["b"]]), Text(protocol, no_wrap=True, overflow="ignore"))
    assert protocol in shown(CommandResult({}, text)).splitlines()


def test_nested_values_are_formatted() -> None:
    goodput = {"total_s": 60.10233, "classes_s": {"productive": 53.9, "lost": 0.0}}
    printed = " ".join(
        shown(CommandResult({}, table(["what", "value"], [("goodput", goodput), ("steps", [1, 2])]))).split()
    )
    assert "goodput total_s 60.1, classes_s (productive 53.9, lost 0)" in printed
    assert "steps 1, 2" in printed


def test_numbers_and_short_cells_never_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    row = ["a-run-with-quite-a-long-name", "running", 100_000, 409_512.4, 1.6384]
    printed = shown(CommandResult({}, table(["run", "state", "step", "tokens/s", "loss"], [row])))
    assert {"running", "100,000", "409,512", "1.638"} <= set(printed.split())


@pytest.mark.parametrize("columns", [25, 50])
def test_numbers_keep_their_digits_in_a_narrow_window(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    figures = [1_234_567, 89_012, 409_512.4, 1.6384, "12.5%"]
    printed = shown(CommandResult({}, table(["step", "batch", "tokens/s", "loss", "goodput"], [figures]))).split()
    assert printed[:5] == ["step", "batch", "tokens/s", "loss", "goodput"]
    assert printed[-5:] == ["1,234,567", "89,012", "409,512", "1.638", "12.5%"]


@pytest.mark.parametrize(
    ("columns", "system"), [(40, ["transfor"]), (90, ["transfor"]), (120, ["transformers-static"])]
)
def test_a_wrapping_column_keeps_a_minimum_width(
    columns: int, system: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    fields = ["system", "params", "tok_per_s", "cpu_ms_per_token", "ttft_ms", "bandwidth_fraction", "new", "prompt"]
    printed = shown(
        CommandResult({}, table(fields, [["transformers-static", 1_245_022_208, 286.8, 3.49, 24.6, 0.158, 1, 2]]))
    )
    (line,) = [line.split() for line in printed.splitlines() if "1,245,022,208" in line]
    assert line == [*system, "1,245,022,208", "286.8", "3.49", "24.6", "0.158", "1", "2"]


def test_a_field_name_wraps_only_at_underscores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    printed = shown(CommandResult({}, table(["bandwidth_fraction", "a heading of words"], [[0.5, 1.5]])))
    lines = [line.split() for line in printed.splitlines() if line.strip()]
    assert lines[:2] == [["bandwidth"], ["fraction", "a", "heading", "of", "words"]]
