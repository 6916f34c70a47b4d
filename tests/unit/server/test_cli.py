"""lakh serve, lakh loadgen and lakh export from the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from bench.serve import ablation
from bench.serve.ablation import AblationRow

from lakh.cli.main import main
from lakh.server.engine import Engine, SamplingParams
from lakh.server.loadgen.report import LoadReport

TIMEOUT_S = 240  # a busy machine takes a minute to import what a server needs


def lakh(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_reports_ready_completes_requests_and_exits_with_0(model_dir: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "lakh", "serve", str(model_dir), "--http", "127.0.0.1:0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            ready = json.loads(process.stdout.readline())
            assert (ready["model"], ready["pid"]) == ("tiny", process.pid)
            body = json.dumps({"prompt": "def ", "max_tokens": 4, "temperature": 0}).encode()
            request = urllib.request.Request(f"{ready['url']}/v1/completions", data=body)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                answer = json.load(response)
            os.kill(process.pid, number)
            rest, talk = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    assert process.returncode == 0
    assert rest == ""  # the ready line is the only document
    assert f"curl -s {ready['url']}/v1/completions" in talk
    expected = Engine.load(str(model_dir)).generate(["def "], SamplingParams(max_tokens=4))[0]
    assert answer["choices"][0]["text"] == expected.text


@pytest.mark.slow
def test_serve_reads_its_keys_again_on_sighup_and_has_the_given_name(model_dir: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-key a\n")
    options = ["--http", "127.0.0.1:0", "--json", "--keys", str(keys), "--served-name", "code"]
    command = [sys.executable, "-m", "lakh", "serve", str(model_dir), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            ready = json.loads(process.stdout.readline())
            assert ready["model"] == "code"

            def status(key: str) -> int:
                request = urllib.request.Request(
                    f"{ready['url']}/v1/models", headers={"Authorization": f"Bearer {key}"}
                )
                try:
                    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                        assert json.load(response)["data"][0]["id"] == "code"
                        return int(response.status)
                except urllib.error.HTTPError as error:
                    return error.code

            assert [status("first-key"), status("second-key")] == [200, 401]
            keys.write_text("second-key a\n")
            os.kill(process.pid, signal.SIGHUP)
            assert any("1 keys" in line for line in iter(process.stderr.readline, ""))
            assert [status("first-key"), status("second-key")] == [401, 200]
            os.kill(process.pid, signal.SIGTERM)
            process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    assert process.returncode == 0


BOTH = [
    *(("--draft", "small", "--no-speculate"), ("--follow", "5", "--tensor", "2")),
    *(("--max-model-len", "64", "--tensor", "2"), ("--max-model-len", "64", "--follow", "5")),
]


@pytest.mark.parametrize("both", BOTH)
def test_conflicting_options_are_rejected(both: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert lakh("serve", "anything", "--http", ":0", *both) == 2
    assert "give only one of them" in capsys.readouterr().err


@pytest.mark.slow
def test_rows_measured_before_an_interrupt_are_shown_and_plotted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(model: str, rows: Sequence[AblationRow], *_: Any, **__: Any) -> Iterator[tuple[AblationRow, LoadReport]]:
        yield (
            rows[0],
            LoadReport(sent=2, ends=Counter(completed=2), latencies=[(0.0, 0.1, 0.2), (1.0, 0.1, 0.3)], wall_s=2),
        )
        raise KeyboardInterrupt  # while the next server starts

    monkeypatch.setattr(ablation, "run_ablation", rows)
    picture = tmp_path / "rows.png"
    assert lakh("loadgen", "model", "--before-after", "--plot", str(picture), "--json") == 75
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["interrupted"] is True
    assert [(row["row"], row["completed"]) for row in answer["rows"]] == [("nothing", 2)]
    assert picture.stat().st_size > 5000


def test_serve_explains_how_to_get_a_model_of_hugging_face(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.chdir(tmp_path)
    assert lakh("serve", "HuggingFaceTB/SmolLM2-135M", "--http", ":0") == 2
    assert "hf download HuggingFaceTB/SmolLM2-135M --local-dir SmolLM2-135M" in capsys.readouterr().err
    snapshot = tmp_path / "hub/models--HuggingFaceTB--SmolLM2-135M/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert lakh("serve", "HuggingFaceTB/SmolLM2-135M", "--http", ":0") == 2
    assert f"lakh serve {snapshot}" in capsys.readouterr().err.replace("\n", "")
    (tmp_path / "runs").mkdir()
    assert lakh("serve", "runs/wrong", "--http", ":0", "--engine", "thread") == 2
    assert "runs/wrong: no such file or folder" in capsys.readouterr().err  # a path, because its folder exists
    assert lakh("serve", "no/such/folder", "--http", ":0", "--engine", "thread") == 2
    assert "no such file or folder" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["8000", "host", "127.0.0.1:x", "127.0.0.1:99999", "http://a:1", "a:1/b"])
def test_serve_rejects_an_invalid_address(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert lakh("serve", "anything", "--http", address) == 2
    assert "HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["serve", "--http", ":0", "--engine", "thread"], ["export", "--out", "out"]])
def test_an_invalid_model_exits_with_2(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lakh(command[0], str(tmp_path), *command[1:], "--json") == 2
    printed = capsys.readouterr()
    assert "Hugging Face directory" in printed.err
    assert json.loads(printed.out)["error"]["exit_code"] == 2


def test_damaged_weights_exit_with_65(model_dir: Path) -> None:
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert lakh("serve", str(model_dir), "--http", ":0", "--engine", "thread") == 65


def test_an_exported_model_gives_the_same_completions(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert lakh("export", str(model_dir), "--format", "hf", "--out", str(out), "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert sorted(answer["files"]) == sorted(path.name for path in out.iterdir())
    assert answer["bytes"] == sum(path.stat().st_size for path in out.iterdir())
    left, right = Engine.load(str(model_dir)), Engine.load(str(out))
    assert answer["parameters"] == left.spec.parameters == right.spec.parameters
    assert left.generate(["def "], SamplingParams()) == right.generate(["def "], SamplingParams())


def test_export_needs_force_for_a_folder_that_is_not_empty(model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert lakh("export", str(model_dir), "--out", str(out)) == 2
    assert lakh("export", str(model_dir), "--out", str(out), "--force") == 0
    assert (out / "notes.txt").read_text() == "mine"
    assert lakh("export", str(model_dir), "--out", str(model_dir), "--force") == 2  # onto itself
    assert lakh("export", str(model_dir), "--out", str(out / "notes.txt")) == 2  # a file
    Engine.load(str(model_dir))
