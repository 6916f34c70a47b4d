"""The harness: missing peers are found first, failures keep their rows, result files are complete."""

import json
import os
import sys
from pathlib import Path

import click
import pytest
from bench.harness import (
    Peer,
    SystemFailed,
    alternate,
    best,
    detect_peers,
    measure_process,
    medians,
    out_option,
    result,
)
from click.testing import CliRunner

from lakh.cli import main
from lakh.cli.output import CommandResult, print_result


def test_missing_peers_are_named_with_their_extra_and_left_out() -> None:
    printed: list[str] = []
    peers = [Peer("there", ("json",)), Peer("gone", ("no_such_module",), ("no-such-program",))]
    assert detect_peers(["lakh", "there", "gone"], peers, printed.append) == ["lakh", "there"]
    [line] = printed
    assert "gone is left out: no_such_module, no-such-program not found" in line
    assert "pip install 'lakh[bench]'" in line


def test_systems_alternate_and_a_failed_one_is_not_measured_again() -> None:
    order: list[str] = []

    def fail() -> float:
        order.append("bad")
        raise SystemFailed("no memory")

    found = alternate({"good": lambda: order.append("good") or 1.0, "bad": fail}, 2, warmup=1)
    assert order == ["good", "bad", "good", "good"]
    assert (found["good"].measured, found["bad"].failed) == ([1.0, 1.0], "no memory")


def test_best_and_median_are_taken_for_each_figure() -> None:
    rounds = [(3.0, 10.0), (1.0, 30.0), (2.0, 20.0)]
    assert best(rounds) == [1.0, 10.0]
    assert medians(rounds) == [2.0, 20.0]


def test_a_process_is_measured_with_its_children() -> None:
    code = "import os; data = bytearray(64 << 20); [sum(range(10**6)) for _ in range(20)]; print('done')"
    usage = measure_process(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"],
        timeout_s=60,
    )
    assert usage.cpu_s > 0.05
    assert usage.peak_rss_bytes > 64 << 20
    assert usage.stdout == "done\n"
    with pytest.raises(SystemFailed, match="took more than"):
        measure_process([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.2)


def test_a_result_file_says_what_was_run_where(tmp_path: Path) -> None:
    @click.command("demo")
    @click.option("--size", default=3)
    @click.option("--model", default="")
    @out_option
    @print_result
    def demo(size: int, model: str, out: str | None) -> CommandResult:
        rows = [{"system": "lakh", "speed": 12.3456}, {"system": "peer", "speed": None, "failed": "no memory"}]
        return result("demo", rows, out)

    arguments = ["--model", "/somewhere/private/m", "--out", str(tmp_path), "--json"]
    data = json.loads(CliRunner().invoke(demo, arguments).output)
    text = Path(data["file"]).read_text()
    assert "command: `demo --size 3 --model m`" in text
    assert "| lakh | 12.35 |  |" in text
    assert "| peer | None | no memory |" in text
    for field in ("cores", "load_1min", "commit", "dirty", "versions", "date"):
        assert f"- {field}: " in text
    assert (
        Path(data["file"]).name == f"demo_{data['machine']['cores']}x{os.uname().machine}_{data['machine']['date']}.md"
    )


def test_without_the_package_the_error_says_where_benchmarks_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lakh.cli.bench import bench

    monkeypatch.setattr(bench, "commands_table", {})
    with pytest.raises(SystemExit) as ended:
        main(["bench", "train"])
    assert ended.value.code == 2
    assert "clone the repository" in capsys.readouterr().err
