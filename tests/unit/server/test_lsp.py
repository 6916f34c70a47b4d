"""The language server: what it sends and shows, and a whole session with a scripted client over pipes."""

from __future__ import annotations

import asyncio
import io
import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.errors import UserError
from lakh.server.api.server import running
from lakh.server.backends.in_process import InProcessBackend
from lakh.server.engine import Engine
from lakh.server.lsp import protocol
from lakh.server.lsp.context import NEIGHBOUR_CHARS, request_body
from lakh.server.lsp.documents import OpenFiles, choose_encoding, offset_of
from lakh.server.lsp.server import LanguageServerOptions, serve_streams
from lakh.server.lsp.suggestion import close_brackets, remove_repeated_suffix, tidy
from lakh.server.request import parse

TIMEOUT_S = 120.0


# --- positions and edits ---


@given(text=st.text("aé🙂\n\r", max_size=30), data=st.data())
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
def test_every_offset_survives_as_a_position(text: str, encoding: str, data: st.DataObject) -> None:
    text = text.replace("\r", "")
    at = data.draw(st.integers(0, len(text)))
    line, start = text.count("\n", 0, at), text.rfind("\n", 0, at) + 1
    width = {"utf-8": 1, "utf-16": 2, "utf-32": 4}[encoding]
    units = len(text[start:at].encode(encoding + ("" if encoding == "utf-8" else "-le"))) // width
    assert offset_of(text, {"line": line, "character": units}, encoding) == at
    assert offset_of(text, {"line": line + 999, "character": 0}, encoding) == len(text)


def test_edits_are_applied_in_order() -> None:
    files = OpenFiles()
    files.open({"textDocument": {"uri": "file:///a.py", "languageId": "python", "text": "one\ntwo\n"}})

    def place(line: int, character: int) -> dict[str, int]:
        return {"line": line, "character": character}

    changes = [
        {"range": {"start": place(0, 3), "end": place(1, 0)}, "text": "; "},
        {"range": {"start": place(0, 0), "end": place(0, 3)}, "text": "1"},
    ]
    files.change({"textDocument": {"uri": "file:///a.py"}, "contentChanges": changes})
    assert files.by_uri["file:///a.py"].text == "1; two\n"
    files.change({"textDocument": {"uri": "file:///a.py"}, "contentChanges": [{"text": "new"}]})
    assert files.by_uri["file:///a.py"].text == "new"


def test_the_encoding_is_one_that_the_client_offers() -> None:
    assert choose_encoding(["utf-16", "utf-32"]) == "utf-32"
    assert choose_encoding(None) == choose_encoding([]) == choose_encoding("utf-8") == "utf-16"


# --- what is sent and shown ---


def test_neighbouring_files_are_sent_the_most_recent_last(tmp_path: Path) -> None:
    (tmp_path / "closed.py").write_text("CLOSED = 1\n")
    (tmp_path / "notes.txt").write_text("not code")
    files = OpenFiles()
    long = "".join(f"line {number}\n" for number in range(2000))
    for name, language, text in (("a.py", "python", long), ("b.py", "python", "B = 1\n"), ("c.md", "markdown", "c")):
        files.open({"textDocument": {"uri": (tmp_path / name).as_uri(), "languageId": language, "text": text}})
    uri = (tmp_path / "main.py").as_uri()
    start = "from closed import CLOSED\nx = "
    files.open({"textDocument": {"uri": uri, "languageId": "python", "text": f"{start}\ny = 2\n"}})
    edit = {"start": {"line": 1000, "character": 0}, "end": {"line": 1000, "character": 0}}
    files.change(
        {"textDocument": {"uri": (tmp_path / "a.py").as_uri()}, "contentChanges": [{"range": edit, "text": "HERE "}]}
    )
    body = request_body(files, files.by_uri[uri], len(start), max_tokens=8, automatic=True)
    assert (body["prompt"], body["suffix"], body["stop_rule"]) == (start, "\ny = 2\n", "block")
    names = [Path(file["filename"]).name for file in body["input_extra"]]
    assert names == ["b.py", "a.py", "closed.py"]  # what is imported is the most relevant
    around = body["input_extra"][1]["text"]
    assert "HERE line 1000" in around
    assert len(around) <= NEIGHBOUR_CHARS
    assert str(tmp_path.parent) not in json.dumps(body["input_extra"])


@pytest.mark.parametrize(("after", "suffix"), [("", ""), ("\n", ""), ("\n  \r\n", ""), ("\n)\n", "\n)\n")])
def test_the_end_of_a_file_is_sent_without_a_suffix(after: str, suffix: str) -> None:
    files = OpenFiles()
    files.open({"textDocument": {"uri": "file:///a.py", "languageId": "python", "text": f"x = {after}"}})
    body = request_body(files, files.by_uri["file:///a.py"], len("x = "), max_tokens=8, automatic=True)
    assert (body["prompt"], body["suffix"]) == ("x = ", suffix)


def test_a_file_of_the_same_path_in_another_editor_is_another_file() -> None:
    bodies = []
    for _ in range(2):
        files = OpenFiles()
        files.open({"textDocument": {"uri": "file:///a.py", "languageId": "python", "text": "x = "}})
        bodies += [request_body(files, files.by_uri["file:///a.py"], 4, max_tokens=8, automatic=True) for _ in range(2)]
    keys = [parse(body).supersede for body in bodies]
    assert keys[0] == keys[1] != keys[2] == keys[3]


@pytest.mark.parametrize(
    ("text", "after", "shown"),
    [
        ("left + right)", ")\n", "left + right"),  # the bracket is there already
        ("f(x))", ")\n", "f(x)"),
        ("f(x)", "\n", "f(x)"),
        ("1\n    return x", "\n    return x\n", "1"),  # the next line, written again
        ("print(x", "\n", "print(x)"),
        ("print(x", ")\n", "print(x"),  # the rest of the line closes it
        ("foo(a,", "\n", "foo(a,"),  # continues on the next line
        ("print('a(b'", "\n", "print('a(b')"),  # a bracket in a string is text
        ("   \n", "\n", ""),
        (")", ")\n", ""),
    ],
)
def test_repeated_text_is_removed_and_brackets_are_closed(text: str, after: str, shown: str) -> None:
    assert tidy(text, after, was_cut=False) == shown


def test_an_incomplete_last_line_is_not_shown() -> None:
    assert tidy("a = 1\nb = 2\nc = ", "\n", was_cut=True) == "a = 1\nb = 2"
    assert tidy("a = 1\nb = 2", "\n", was_cut=False) == "a = 1\nb = 2"
    assert tidy("a = 1", "\n", was_cut=True) == "a = 1"


@given(text=st.text("ab()[]{}'\n ", max_size=20), after=st.text("ab()[]\n ", max_size=10))
def test_a_suggestion_only_loses_its_end_and_gains_brackets(text: str, after: str) -> None:
    assert text.startswith(remove_repeated_suffix(text, after))
    closed = close_brackets(text, after)
    assert closed.startswith(text)
    assert set(closed[len(text) :]) <= set(")]}")


# --- a session ---


@contextmanager
def service(engine: Engine) -> Iterator[str]:
    """A completion service in a thread with its own event loop."""
    ready, address, stop = threading.Event(), [""], threading.Event()

    async def main() -> None:
        async with running(InProcessBackend(engine), "127.0.0.1", 0) as server:
            address[0] = server.url
            ready.set()
            await asyncio.to_thread(stop.wait, TIMEOUT_S)

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(TIMEOUT_S)
    try:
        yield address[0]
    finally:
        stop.set()
        thread.join(TIMEOUT_S)


class EditorClient:
    """A scripted LSP client: `lakh lsp` in a child process."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, "-m", "lakh", "lsp", "--url", url, "--max-tokens", "12", "--debounce-ms", "30"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._in, self._reader = self.process.stdin, protocol.RpcReader(self.process.stdout)  # type: ignore[arg-type]
        self._number = 0

    def send(self, method: str, params: Any = None, **more: Any) -> None:
        body = json.dumps({"jsonrpc": "2.0", "method": method, "params": params, **more}).encode()
        self.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)

    def write(self, data: bytes) -> None:
        self._in.write(data)
        self._in.flush()

    def request(self, method: str, params: Any = None) -> int:
        self._number += 1
        self.send(method, params, id=self._number)
        return self._number

    def read(self) -> dict[str, Any]:
        return self._reader.read()

    def call(self, method: str, params: Any = None) -> dict[str, Any]:
        number = self.request(method, params)
        while True:
            message = self.read()
            if message.get("id") == number:
                return message

    def initialize(self) -> dict[str, Any]:
        return dict(self.call("initialize", {"capabilities": {"general": {"positionEncodings": ["utf-16", "utf-32"]}}}))

    def close(self) -> tuple[int, str]:
        self._in.close()
        assert self.process.stderr is not None
        talk = self.process.stderr.read().decode()
        return self.process.wait(TIMEOUT_S), talk


def at(uri: str, line: int, character: int, kind: int = 1) -> dict[str, Any]:
    position = {"line": line, "character": character}
    return {"textDocument": {"uri": uri}, "position": position, "context": {"triggerKind": kind}}


@pytest.mark.slow
def test_a_session_suggests_cancels_and_reports(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(context=512)
    text, uri = "def add(left, right):\n    retu\n\nx = 1\n", "file:///work/añb/main.py"
    with service(engine) as url:
        client = EditorClient(url)
        assert client.call("textDocument/inlineCompletion", at(uri, 0, 0))["error"]["code"] == protocol.NOT_INITIALIZED
        found = client.initialize()["result"]["capabilities"]
        assert (found["inlineCompletionProvider"], found["positionEncoding"]) == (True, "utf-32")
        client.send("initialized", {})
        assert client.call("textDocument/inlineCompletion", at(uri, 0, 0))["error"]["code"] == protocol.INVALID_PARAMS
        client.send("textDocument/didOpen", {"textDocument": {"uri": uri, "languageId": "python", "text": text}})
        answer = client.call("textDocument/inlineCompletion", at(uri, 1, 8))["result"]
        again = client.call("textDocument/inlineCompletion", at(uri, 1, 8))["result"]
        assert answer == again
        assert isinstance(answer["items"], list)
        # Typing on: the older requests are cancelled, the last one is answered.
        numbers = [client.request("textDocument/inlineCompletion", at(uri, 1, 8, kind=2)) for _ in range(4)]
        answers = {message["id"]: message for message in (client.read() for _ in numbers)}
        assert [answers[number].get("error", {}).get("code") for number in numbers] == [protocol.CANCELLED] * 3 + [None]
        number = client.request("textDocument/inlineCompletion", at(uri, 1, 8, kind=2))
        client.send("$/cancelRequest", {"id": number})
        assert client.read()["error"]["code"] == protocol.CANCELLED
        assert client.call("workspace/executeCommand", {"command": "lakh.accepted"})["result"] is None
        assert client.call("textDocument/hover", {})["error"]["code"] == protocol.METHOD_NOT_FOUND
        client.send("textDocument/didClose", {"textDocument": {"uri": uri}})
        assert client.call("shutdown")["result"] is None
        client.send("exit")
        code, talk = client.close()
    assert (code, "Traceback" in talk) == (0, False)


@pytest.mark.slow
def test_a_service_that_does_not_run_is_reported_once_and_gives_no_suggestion() -> None:
    client = EditorClient("http://127.0.0.1:9")
    client.initialize()
    client.send("textDocument/didOpen", {"textDocument": {"uri": "file:///a.py", "languageId": "python", "text": "x"}})
    seen = []
    for _ in range(3):
        number = client.request("textDocument/inlineCompletion", at("file:///a.py", 0, 1))
        while True:
            message = client.read()
            if message.get("id") == number:
                break
            seen.append(message["params"]["message"])
        assert message["result"] == {"items": []}
    assert len(seen) == 1
    assert "lakh serve" in seen[0]
    code, talk = client.close()  # without shutdown
    assert (code, "Traceback" in talk) == (1, False)


@pytest.mark.slow
def test_random_messages_get_errors_and_random_bytes_end_the_server_with_a_message() -> None:
    rng = random.Random(3)
    client = EditorClient("http://127.0.0.1:9")
    client.initialize()
    methods = ["initialize", "textDocument/didOpen", "textDocument/didChange", "textDocument/inlineCompletion", "x/y"]
    methods += ["textDocument/didClose", "$/cancelRequest", "workspace/executeCommand"]
    values: list[Any] = [None, 1, -1, 1e300, "x", [], {}, {"uri": 3}, {"textDocument": {"uri": []}}, [[]], True]
    values += [{"textDocument": {"uri": "u", "text": 5}}, {"textDocument": {"uri": "u"}, "position": {"line": "x"}}]
    for _ in range(300):
        message = {"jsonrpc": "2.0", "method": rng.choice(methods), "params": rng.choice(values)}
        if rng.random() < 0.5:
            message["id"] = rng.choice([1, "a", None, 2.5, [], {}])
        body = json.dumps(message if rng.random() < 0.9 else rng.choice(values)).encode()
        if rng.random() < 0.1:
            body = bytes(rng.randrange(256) for _ in range(20))
        client.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
    found = client.call("x/after")
    assert found["error"]["code"] == protocol.METHOD_NOT_FOUND
    client.write(bytes(rng.randrange(256) for _ in range(50)) + b"\n\n")
    code, talk = client.close()
    assert (code, "Traceback" in talk, "language client" in talk) == (2, False, True)


def framed(*messages: bytes) -> bytes:
    return b"".join(b"Content-Length: %d\r\n\r\n%b" % (len(message), message) for message in messages)


def answers_to(data: bytes) -> bytes:
    out = io.BytesIO()
    serve_streams(LanguageServerOptions("http://127.0.0.1:9"), io.BytesIO(data), out)
    return out.getvalue()


INITIALIZE = b'{"id": 1, "method": "initialize", "params": {}}'


@pytest.mark.parametrize("number", [b"NaN", b"1e999", b"-Infinity"])
def test_an_id_that_json_does_not_have_gets_an_error_without_an_id(number: bytes) -> None:
    talk = answers_to(framed(INITIALIZE, b'{"id": %b, "method": "x/y"}' % number, b'{"id": 2, "method": "shutdown"}'))
    assert b'"id":null,"error":{"code":%d' % protocol.INVALID_REQUEST in talk
    assert b'{"jsonrpc":"2.0","id":2,"result":null}' in talk  # it serves on


@pytest.mark.parametrize("length", [b"1" * 5000, b"-4", b"9" * 19, "٣".encode()])
def test_an_impossible_length_is_named(length: bytes) -> None:
    with pytest.raises(UserError, match="language client"):
        answers_to(b"Content-Length: %b\r\n\r\n{}" % length)


@pytest.mark.parametrize("uri", ["http://[::1/x.py", "file://[/x.py", "file:///tmp/%00.py", "untitled:1", "", "\ud800"])
def test_a_file_of_any_name_can_be_completed(uri: str) -> None:
    files = OpenFiles()
    for name in (uri, "file:///a.py"):
        files.open({"textDocument": {"uri": name, "languageId": "python", "text": "import a\n"}})
    for one in files.by_uri.values():
        assert request_body(files, one, 9, max_tokens=8, automatic=True)["prompt"] == "import a\n"
