"""What commands print for people: a few rows, the next command, one form of errors."""

import io
import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from lakh.cli import main
from lakh.cli.eval_show import show
from lakh.cli.format import bytes_text, count_text, seconds_text
from lakh.cli.main import COMMANDS
from lakh.cli.output import CommandResult, console, fact_rows, print_result, styled, table, verbose_option
from lakh.cli.progress import show_training
from lakh.cli.train import _as_result

TRAINED = {
    "steps": 12,
    "tokens": 3072,
    "loss": 7.365,
    "val_loss": 7.521,
    "stream_sha256": "cee92f63",
    "goodput": {"total_s": 100.0, "ratio": 0.88, "classes_s": {"productive": 88.0, "other": 12.0}},
    "sent_bytes": {},
    "checkpoint": "runs/mine/checkpoints/step-00000012",
    "attempts": 2,
    "run_dir": "runs/mine",
}
SCORED = {
    "task": "humaneval",
    "passed": 3,
    "total": 164,
    "pass_at_k": {"1": 3 / 164},
    "intervals": {"1": [0.004, 0.05]},
    "kinds": {"passed": 3, "failed": 160, "timeout": 1, "not_run": 0},
    "sandbox": "bubblewrap",
    "protocol": 'task="humaneval" | data_sha256="b796127e"',
    "seconds": 12.3,
}


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def printed(result: CommandResult, *options: str) -> tuple[list[str], str]:
    """The rows on stdout, and stderr."""
    import click

    @click.command()
    @verbose_option
    @print_result
    def command() -> CommandResult:
        return result

    done = CliRunner().invoke(command, list(options))
    return [line.strip() for line in done.stdout.splitlines() if line.strip()], done.stderr


def test_config_check_shows_a_few_rows_and_the_next_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "check", "laptop", "--set", "train.steps=50") == 0
    out, err = capsys.readouterr()
    rows = out.strip().splitlines()
    assert 5 <= len(rows) <= 8
    assert "2.36 million parameters" in out
    assert "sha256" not in out
    assert err.strip() == "Next: lakh train laptop --set train.steps=50 --dry-run"
    assert run("config", "check", "laptop", "-v") == 0
    assert "sha256" in capsys.readouterr().out


def test_a_dry_run_shows_a_few_rows_and_the_command_to_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert run("train", "laptop", "--nproc", "2", "--dry-run", "--out", "runs/my run") == 0
    out, err = capsys.readouterr()
    assert 5 <= len(out.strip().splitlines()) <= 9  # with its title
    assert "bottleneck" in out
    assert err.strip() == "Next: lakh train laptop --nproc 2 --out 'runs/my run'"


def test_a_training_result_has_no_hashes_and_no_dictionaries() -> None:
    rows, err = printed(_as_result(TRAINED))
    assert rows == [
        "trained        12 steps, 3,072 tokens",
        "loss           7.365",
        "held-out loss  7.521",
        "goodput        88% of 100 s productive",
        "restarts       1",
        "checkpoint     runs/mine/checkpoints/step-00000012",
    ]
    assert "Next: lakh serve runs/mine" in err
    detailed, _ = printed(_as_result(TRAINED), "-v")
    assert any("cee92f63" in row for row in detailed)
    document, err = printed(_as_result(TRAINED), "--json")
    assert json.loads(document[-1]) == TRAINED
    assert err == ""


def test_the_result_of_one_rank_of_many_has_no_goodput() -> None:
    rank = {**TRAINED, "goodput": {}, "val_loss": None, "loss": None}
    rows, err = printed(_as_result({key: value for key, value in rank.items() if key not in ("attempts", "run_dir")}))
    assert [row.split()[0] for row in rows] == ["trained", "checkpoint"]
    assert err == ""


def test_a_score_hides_its_protocol_until_asked() -> None:
    rows, _ = printed(show([SCORED]))
    assert rows[1:4] == [
        "passed      3 of 164",
        "pass@1      1.8%  (95 % interval: 0.4% to 5.0%)",
        "not passed  160 failed, 1 timeout",
    ]
    assert not any("sha256" in row for row in rows)
    assert any("data_sha256" in row for row in printed(show([SCORED]), "-v")[0])


def test_the_last_progress_line_shows_the_last_held_out_loss(tmp_path: Path) -> None:
    now_s = time.time() + 1.0  # the bar ignores events from before it began
    (tmp_path / "events").mkdir()
    step = {"lr": 0.1, "grad_norm": 1.0, "tokens": 8, "tokens_per_s": 9.0, "step_s": 1.0, "data_wait_s": 0.0}
    records = [
        {"kind": "step_done", "step": 6, "loss": 8.0, **step},
        {"kind": "evaluated", "step": 6, "loss": 7.914, "sequences": 4, "seconds": 1.0},
        {"kind": "step_done", "step": 12, "loss": 7.5, **step},
        {"kind": "evaluated", "step": 12, "loss": 7.521, "sequences": 4, "seconds": 1.0},
    ]
    lines = [json.dumps({"time_s": now_s + number, "rank": 0, **record}) for number, record in enumerate(records)]
    (tmp_path / "events" / "rank-00000.jsonl").write_text("\n".join(lines) + "\n")
    screen = Console(file=io.StringIO(), width=100)
    show_training(screen, str(tmp_path), 12, ended=lambda: True)
    shown = screen.file.getvalue().strip().splitlines()
    assert "12/12 loss 7.500" in shown[-1]
    assert "held-out loss 7.521" in shown[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "laptop", "--nporc", "2"), "error: lakh train: no such option '--nporc'; did you mean '--nproc'? "),
        (("train", "laptop", "--nproc", "0"), "error: lakh train: invalid value for '--nproc': 0 is not in the range "),
        (("train",), "error: lakh train: missing argument 'RUN'; lakh train --help lists what it takes"),
        (("eval", "runs/mine"), "error: lakh eval model: missing option '--task'; "),
        (("tarin",), "error: lakh: no such command 'tarin'; did you mean 'train'?"),
        (("config", "check", "nowhere.toml"), "error: nowhere.toml: no such file"),
    ],
)
def test_every_error_is_one_line_of_the_same_form(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(message)


def test_an_error_of_usage_is_printed_as_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "laptop", "--nporc", "2", "--json") == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["kind"], error["where"]) == ("UserError", "lakh train")


def test_recipes_are_listed_by_the_name_that_train_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("recipes", "--json") == 0
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)["recipes"]}
    assert found["laptop"]["parameters"] == 2_361_024
    assert "sizes:code_1b" in found
    assert all(row["description"] for row in found.values())
    assert run("config", "check", "sizes:code_1b") == 0


def test_the_former_name_of_the_task_option_still_works(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("--task", "--tasks"):
        assert run("eval", "nowhere", word, "humaneval,humaneval") == 2
        assert "error: --task humaneval,humaneval: names no task, or one of them twice" in capsys.readouterr().err


def test_good_and_missing_have_colours_on_a_terminal() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    screen.print(table(["", ""], [["torch", styled("missing", "missing")], ["python", styled("ok", "good")]]))
    screen.print(fact_rows([("settings", styled("ok", "good")), ("nothing", None)]))
    shown = screen.file.getvalue()
    assert "\x1b[33mmissing" in shown
    assert shown.count("\x1b[32mok") == 2
    assert "nothing" not in shown
    assert console().stderr


def test_amounts_in_words() -> None:
    assert [count_text(n) for n in (999_999, 2_361_024, 6.9e10, 1.4e12)] == [
        "999,999", "2.36 million", "69 billion", "1.4 trillion",
    ]  # fmt: skip
    assert [bytes_text(n) for n in (12, 4_096, 37_776_384, 8.3e9)] == ["12 bytes", "4.1 kB", "37.8 MB", "8.3 GB"]
    assert [seconds_text(s) for s in (0.194, 45.2, 125, 7_500, 90_000, 200_000)] == [
        "0.19 s", "45 s", "2 min 5 s", "2 h 5 min", "25 h", "2 days 8 h",
    ]  # fmt: skip


def test_every_command_of_the_table_is_in_the_reference() -> None:
    reference = (Path(__file__).parents[3] / "docs" / "reference" / "commands.md").read_text()
    assert [name for name in COMMANDS if f"lakh {name}" not in reference] == []
