"""The command lakh dashboard: saved, printed, served, and with invalid arguments."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lakh.cli import main

TIMEOUT_S = 60.0


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["dashboard", *arguments])
    return int(ended.value.code or 0)


@contextlib.contextmanager
def served(folder: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "lakh", "dashboard", str(folder), *(options or ("--http", "127.0.0.1:0"))]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"})
    try:
        assert process.stderr is not None
        found = re.search(r"http://\S+", process.stderr.readline())
        assert found
        yield found[0], process
    finally:
        process.kill()
        process.wait(TIMEOUT_S)
        if process.stderr is not None:
            process.stderr.close()


class NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def ask(url: str, *, redirect: bool = True, **headers: str) -> tuple[int, dict[str, str], bytes]:
    opener = urllib.request.build_opener(*(() if redirect else (NoRedirect,)))
    try:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def test_the_page_is_saved_and_the_data_printed(
    faulty_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(faulty_run.run_dir), "--out", str(tmp_path / "page.html"), "--json") == 0
    data = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert data["runs"][0]["step"] == 120
    assert '"step":120' in (tmp_path / "page.html").read_text()
    assert run(str(faulty_run.run_dir), "--once") == 0
    assert "done" in capsys.readouterr().out


def test_a_run_whose_events_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.toml").write_text("")
    (tmp_path / "broken" / "events").write_text("")
    assert run(str(tmp_path), "--once") == 0
    shown = capsys.readouterr()
    assert "unreadable" in shown.out
    assert f"warning: broken: cannot read {tmp_path}/broken/events: not a directory; check" in shown.err


def test_a_folder_without_permission_is_not_one_without_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scan = os.scandir

    def refuse(path: Any) -> Any:
        if Path(path) == tmp_path:  # as for other users than root
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert run(str(tmp_path), "--once") == 2
    assert f"{tmp_path}: permission denied; check its owner and mode" in capsys.readouterr().err


def test_errors_name_the_cause(tmp_path: Path, faulty_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, words in (
            ([str(tmp_path / "none"), "--once"], "no such folder"),
            ([str(tmp_path / "file")], "is a file"),
            ([str(tmp_path / "empty"), "--json"], "holds no runs"),
            (["nothing://bucket/runs", "--once"], "Protocol not known"),
            ([str(faulty_run.run_dir), "--http", "nonsense"], "HOST:PORT"),
            ([str(faulty_run.run_dir), "--http", f"127.0.0.1:{port}"], "the port is in use"),
        ):
            assert run(*arguments) == 2
            assert words in capsys.readouterr().err


def test_without_aiohttp_the_error_names_the_extra(
    faulty_run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    for name in [name for name in sys.modules if name.startswith("lakh.dashboard.server")]:
        monkeypatch.delitem(sys.modules, name)
    assert run(str(faulty_run.run_dir)) == 2
    assert "lakh[dashboard]" in capsys.readouterr().err
    assert run(str(faulty_run.run_dir), "--once") == 0


@pytest.mark.slow
def test_the_server_follows_a_run_and_stops_on_ctrl_c(faulty_run: Any) -> None:
    with served(faulty_run.run_dir) as (url, process):
        status, headers, body = ask(url)
        assert status == 200
        assert b"lakh dashboard" in body
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        faulty_run.begin(120)
        faulty_run.steps(121, 125)
        step = 0
        while step != 125:  # bounded by the timeout of the whole test
            status, headers, body = ask(url + "data.json?run=run&points=50")
            step = json.loads(body)["runs"][0]["step"]
        assert ask(url + "data.json?from=x")[0] == 400
        assert ask(url, Host="evil.example")[0] == 403
        assert ask(url + "../../etc/passwd")[0] == 404
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0


def test_an_empty_folder_can_be_served(tmp_path: Path) -> None:
    with served(tmp_path) as (url, _):
        assert json.loads(ask(url + "data.json")[2])["runs"] == []


def test_unchanged_data_gives_304(faulty_run: Any) -> None:
    """The second of two requests gives 304, unless the clock part of the tag changed in between."""
    with served(faulty_run.run_dir) as (url, _):
        for _ in range(20):
            tag = ask(url + "data.json")[1]["ETag"]
            if ask(url + "data.json", **{"If-None-Match": tag})[0] == 304:
                return
        pytest.fail("never unchanged")


def test_another_address_than_loopback_needs_the_token(faulty_run: Any, tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("0123456789abcdef0123\n")
    with served(faulty_run.run_dir, "--http", "0.0.0.0:0", "--token-file", str(secret)) as (shown, _):
        assert "0123456789" not in shown
        url = shown.replace("0.0.0.0", "127.0.0.1").partition("?")[0]
        status, headers, body = ask(url)
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert b"lakh dashboard" in body  # the command that prints the address
        assert ask(url + "data.json?token=wrong")[0] == 401
        assert ask(url + "data.json", Cookie="lakh_dashboard_token=wrong")[0] == 401
        assert ask(url + "data.json", Authorization="Bearer 0123456789abcdef0123")[0] == 200
        assert ask(url + "healthz")[::2] == (200, b"ok\n")
        status, headers, _ = ask(url + "?token=0123456789abcdef0123#runs", redirect=False)
        assert status == 303
        assert headers["Location"] == "/"
        assert {"HttpOnly", "SameSite=Strict"} <= set(headers["Set-Cookie"].split("; "))
        cookie = headers["Set-Cookie"].partition(";")[0]
        assert ask(url, Cookie=cookie)[0] == 200


def test_a_token_is_made_for_another_address_and_not_for_loopback(faulty_run: Any) -> None:
    with served(faulty_run.run_dir, "--http", "0.0.0.0:0") as (shown, _):
        url = shown.replace("0.0.0.0", "127.0.0.1")
        token = url.partition("?token=")[2]
        assert len(token) >= 24
        assert ask(url.partition("?")[0], Authorization=f"Bearer {token}")[0] == 200


@pytest.mark.parametrize("text", [None, "short", "with a space in the middle", "ключ-ключ-ключ-ключ"])
def test_a_bad_token_file_is_one_line(
    text: str | None, faulty_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "token"
    if text is not None:
        secret.write_text(text)
    assert run(str(faulty_run.run_dir), "--token-file", str(secret)) == 2
    assert capsys.readouterr().err.startswith("error: --token-file")
