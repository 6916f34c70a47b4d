"""Models behind a URL: requests, retries and errors."""

from __future__ import annotations

import datetime
import email.utils
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from lakh.errors import PeerLost, UserError
from lakh.evals.generation import endpoint
from lakh.evals.generation.endpoint import EndpointClient, InfillPrompt
from lakh.evals.sandbox import Sandbox
from lakh.evals.task import Task
from lakh.evals.tasks import TASKS
from lakh.server.engine import SamplingParams

SAMPLING = SamplingParams(max_tokens=9, temperature=0.5, top_p=0.9, seed=3, stop=("\ndef",))


class Model(ThreadingHTTPServer):
    """A server with both APIs; `say` returns (status, text) for the body of a request."""

    def __init__(self, say: Callable[[dict[str, Any]], tuple[int, str]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.say, self.asked, self.keys = say, [], []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Model

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "some-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.server.keys.append(self.headers.get("Authorization"))
        status, text = self.server.say(body)
        choice = {"message": {"content": text}} if "messages" in body else {"text": text}
        self._answer(status, {"choices": [choice | {"finish_reason": "stop"}], "usage": {"prompt_tokens": 5}})

    def _answer(self, status: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Callable[..., Model]]:
    servers = []

    def start(say: Callable[[dict[str, Any]], tuple[int, str]]) -> Model:
        server = Model(say)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_WAIT_S", 0.001)


@pytest.mark.slow
def test_completions_are_in_the_order_of_the_prompts(
    serve: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    server = serve(lambda body: (200, f"after {body['prompt']}"))
    heard: list[int] = []
    prompts = [f"p{i}" for i in range(40)]
    completions = EndpointClient(server.url).generate(prompts, [SAMPLING] * len(prompts), progress=heard.append)
    assert [completion.text for completion in completions] == [f"after p{i}" for i in range(40)]
    assert heard == list(range(1, 41))
    assert server.asked[0] | {"prompt": ""} == {
        "model": "some-model", "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["\ndef"],
        "prompt": "",
    }  # fmt: skip
    assert set(server.keys) == {"Bearer secret"}


def test_infilling_sends_a_suffix_and_chat_sends_a_message(serve: Callable[..., Model]) -> None:
    server = serve(lambda body: (200, "x"))
    EndpointClient(f"{server.url}/v1/").generate([InfillPrompt("before", "after")], [SAMPLING])
    assert (server.asked[0]["prompt"], server.asked[0]["suffix"]) == ("before", "after")
    EndpointClient(server.url, chat=True, served_name="other").generate(["def f():"], [SAMPLING])
    assert server.asked[1]["model"] == "other"
    assert "def f():" in server.asked[1]["messages"][0]["content"]


def test_a_request_to_a_busy_server_is_repeated(serve: Callable[..., Model]) -> None:
    answers = iter([(503, ""), (429, ""), (200, "at last")])
    server = serve(lambda body: next(answers))
    assert EndpointClient(server.url).generate(["p"], [SAMPLING])[0].text == "at last"


def test_a_failing_server_raises_peer_lost_and_a_rejected_request_user_error(serve: Callable[..., Model]) -> None:
    with pytest.raises(PeerLost, match=r"answers 500.*tried 5 times"):
        EndpointClient(serve(lambda body: (500, "")).url).generate(["p"], [SAMPLING])
    with pytest.raises(UserError, match="answers 401"):
        EndpointClient(serve(lambda body: (401, "")).url).generate(["p"], [SAMPLING])
    with pytest.raises(PeerLost, match="does not answer"):
        EndpointClient("http://127.0.0.1:9").generate(["p"], [SAMPLING])


def test_a_model_behind_a_url_is_scored(
    sandbox: Sandbox,
    serve: Callable[..., Model],
    toy_task: Task,
    monkeypatch: pytest.MonkeyPatch,
    lakh: Callable[..., tuple[int, str, str]],
    last_line: Callable[[str], dict[str, Any]],
) -> None:
    monkeypatch.setitem(TASKS, "toy", lambda data: toy_task)
    server = serve(lambda body: (200, "    return x + 1\ndef more():"))
    code, out, _ = lakh("eval", server.url, "--task", "toy", "--json")
    assert code == 0
    found = last_line(out)
    assert (found["passed"], found["total"]) == (1, 3)
    assert found["settings"]["form"] == "completions"
    chat = serve(lambda body: (200, "Here:\n```python\ndef add(x):\n    return x + 2\n```\n"))
    code, out, _ = lakh("eval", chat.url, "--task", "toy", "--chat", "--json")
    assert (code, last_line(out)["passed"]) == (0, 1)
    code, _, err = lakh("eval", "http://127.0.0.1:9", "--task", "toy")
    assert code == 75
    assert "does not answer" in err


def test_a_rejected_request_is_an_empty_completion_and_the_others_go_on(
    serve: Callable[..., Model], caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(lambda body: (400, "") if body["prompt"] == "long" else (200, "fine"))
    found = EndpointClient(server.url).generate(["a", "long", "b"], [SAMPLING] * 3)
    assert [completion.text for completion in found] == ["fine", "", "fine"]
    assert "1 of 3 requests were rejected" in caplog.text


def test_the_server_says_when_to_come_back(serve: Callable[..., Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """More often than an error would be tried again."""
    refused: list[int] = []

    def say(body: dict[str, Any]) -> tuple[int, str]:
        refused.append(1)
        return (429, "") if len(refused) <= 12 else (200, "fine")

    monkeypatch.setattr(endpoint, "_retry_after_s", lambda header: 0.001)
    (found,) = EndpointClient(serve(say).url).generate(["a"], [SAMPLING])
    assert (found.text, len(refused)) == ("fine", 13)


@pytest.mark.parametrize(("header", "seconds"), [("7", 7.0), ("0", 0.1), (None, None), ("Wed, 21 Oct 2026", None)])
def test_retry_after_in_seconds(header: str | None, seconds: float | None) -> None:
    assert endpoint._retry_after_s(header) == seconds


def test_retry_after_as_a_date() -> None:
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=100)
    seconds = endpoint._retry_after_s(email.utils.format_datetime(soon, usegmt=True))
    assert seconds is not None
    assert 1 < seconds <= 100
    assert endpoint._retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0.1


def test_too_many_requests_without_a_time_are_repeated_for_longer(serve: Callable[..., Model]) -> None:
    refused: list[int] = []

    def say(body: dict[str, Any]) -> tuple[int, str]:
        refused.append(1)
        return (429, "") if len(refused) <= 10 else (200, "fine")

    (found,) = EndpointClient(serve(say).url).generate(["a"], [SAMPLING])
    assert (found.text, len(refused)) == ("fine", 11)


def test_models_that_want_max_completion_tokens_get_it(serve: Callable[..., Model]) -> None:
    def say(body: dict[str, Any]) -> tuple[int, str]:
        return (200, "fine") if "max_completion_tokens" in body else (400, "use max_completion_tokens")

    server = serve(say)
    assert EndpointClient(server.url, chat=True).generate(["a"], [SAMPLING])[0].text == "fine"
    assert "max_tokens" not in server.asked[-1]
