"""The language server: `textDocument/inlineCompletion` (LSP 3.18) answered by a completion service.

An automatic request waits DEBOUNCE_S, so that fast typing sends nothing; a newer request of the same file, an edit or
`$/cancelRequest` cancels it, here and in the service. If the service does not answer, the editor gets no suggestion and
one message a minute. What was shown and accepted is reported to POST /v1/feedback.

A thread reads messages; one event loop handles them. Ends with `exit`, or when the editor closes its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import aiohttp

from lakh import __version__
from lakh.errors import UserError
from lakh.server.lsp import protocol
from lakh.server.lsp.context import request_body
from lakh.server.lsp.documents import OpenFile, OpenFiles, choose_encoding, offset_of
from lakh.server.lsp.protocol import RpcError, RpcReader, RpcWriter
from lakh.server.lsp.suggestion import tidy

__all__ = ["LanguageServer", "LanguageServerOptions", "serve_streams"]

log = logging.getLogger(__name__)

ACCEPTED = "lakh.accepted"
AUTOMATIC = 2  # InlineCompletionTriggerKind
INCREMENTAL = 2  # TextDocumentSyncKind
WARNING = 2  # MessageType
WARN_EVERY_S = 60.0
CLOSE_S = 2.0


@dataclass(frozen=True)
class LanguageServerOptions:
    url: str
    """Of the completion service."""
    key: str = ""
    max_tokens: int = 64
    debounce_s: float = 0.075
    timeout_s: float = 5.0


class LanguageServer:
    def __init__(self, options: LanguageServerOptions, reader: RpcReader, writer: RpcWriter) -> None:
        self._options, self._reader, self._writer = options, reader, writer
        self._documents = OpenFiles()
        self._is_initialized = self._is_shut_down = False
        self._tasks: dict[Any, asyncio.Task[None]] = {}
        self._by_uri: dict[str, Any] = {}
        self._warned_s = -WARN_EVERY_S
        self._session: aiohttp.ClientSession | None = None

    async def serve(self) -> int:
        """Until the editor ends it; returns the exit code that LSP prescribes. Raises a UserError if the other side is
        no language client.
        """
        messages: asyncio.Queue[Any] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        # A daemon: it may wait for input that never comes.
        threading.Thread(target=self._read, args=(loop, messages), name="lakh-lsp-reader", daemon=True).start()
        headers = {"Authorization": f"Bearer {self._options.key}"} if self._options.key else {}
        timeout = aiohttp.ClientTimeout(total=self._options.timeout_s)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as self._session:
            try:
                while True:
                    message = await messages.get()
                    if isinstance(message, RpcError):
                        self._respond_error(None, message)
                    elif isinstance(message, EOFError | dict) and _is_exit(message):
                        return 0 if self._is_shut_down else 1
                    elif isinstance(message, Exception):
                        raise message
                    else:
                        self._handle(message)
            finally:
                for task in self._tasks.values():
                    task.cancel()
                with contextlib.suppress(BrokenPipeError):  # the editor may be gone
                    await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _read(self, loop: asyncio.AbstractEventLoop, messages: asyncio.Queue[Any]) -> None:
        """Messages, RpcErrors for those that cannot be read, and the exception that ends the connection."""
        while True:
            found: Any
            try:
                found = self._reader.read()
                is_last = _is_exit(found)
            except RpcError as error:
                found, is_last = error, False
            except (EOFError, UserError, OSError, ValueError) as error:
                found, is_last = error, True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(messages.put_nowait, found)
            if is_last:
                return

    # --- messages ---

    def _handle(self, message: Mapping[str, Any]) -> None:
        method, number = message.get("method"), message.get("id")
        is_request = "id" in message
        if not isinstance(method, str):
            if is_request and "result" not in message and "error" not in message:
                self._respond_error(number, RpcError(protocol.INVALID_REQUEST, "the message has no method"))
            return  # a response: we send no requests
        try:
            if isinstance(number, dict | list) or (isinstance(number, float) and not math.isfinite(number)):
                number = None
                raise RpcError(protocol.INVALID_REQUEST, "the id is not a number or a string")
            params = message.get("params")
            result = self._dispatch(method, params if isinstance(params, Mapping) else {}, number)
        except RpcError as error:
            if is_request:
                self._respond_error(number, error)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            if is_request:
                self._respond_error(number, RpcError(protocol.INVALID_PARAMS, f"{method[:80]}: {error!r}"[:200]))
        else:
            if is_request and result is not _LATER:
                self._writer.write({"id": number, "result": result})

    def _dispatch(self, method: str, params: Mapping[str, Any], number: Any) -> Any:
        if method == "initialize":
            return self._initialize(params)
        if not self._is_initialized:
            raise RpcError(protocol.NOT_INITIALIZED, "the first request must be initialize")
        if self._is_shut_down:
            raise RpcError(protocol.INVALID_REQUEST, "the server was shut down")
        documents = self._documents
        match method:
            case "shutdown":
                self._is_shut_down = True
            case "textDocument/didOpen":
                documents.open(params)
            case "textDocument/didChange":
                documents.change(params)
                self._cancel(self._by_uri.get(params["textDocument"]["uri"]))
            case "textDocument/didClose":
                documents.close(params)
                self._cancel(self._by_uri.get(params["textDocument"]["uri"]))
            case "$/cancelRequest":
                self._cancel(params.get("id"))
            case "textDocument/inlineCompletion":
                return self._start_completion(params, number)
            case "workspace/executeCommand":
                if params["command"] != ACCEPTED:
                    raise RpcError(protocol.INVALID_PARAMS, "the command is unknown")
                self._start_report("accepted")
            case _:
                if not method.startswith("$/") and number is not None:
                    raise RpcError(protocol.METHOD_NOT_FOUND, f"{method[:80]} is not supported")
        return None

    def _initialize(self, params: Mapping[str, Any]) -> dict[str, Any]:
        capabilities = params.get("capabilities")
        general = capabilities.get("general") if isinstance(capabilities, Mapping) else None
        offered = general.get("positionEncodings") if isinstance(general, Mapping) else None
        self._documents.encoding = choose_encoding(offered)
        self._is_initialized = True
        return {
            "capabilities": {
                "positionEncoding": self._documents.encoding,
                "textDocumentSync": {"openClose": True, "change": INCREMENTAL},
                "inlineCompletionProvider": True,
                "executeCommandProvider": {"commands": [ACCEPTED]},
            },
            "serverInfo": {"name": "lakh", "version": __version__},
        }

    # --- completions ---

    def _start_completion(self, params: Mapping[str, Any], number: Any) -> Any:
        document = self._documents.get(params)
        at = offset_of(document.text, params["position"], self._documents.encoding)
        context = params.get("context")
        automatic = isinstance(context, Mapping) and context.get("triggerKind") == AUTOMATIC
        if number is None:
            return None  # a notification has no answer
        self._cancel(self._by_uri.get(document.uri))
        self._by_uri[document.uri] = number
        self._run(number, self._complete(number, document, at, automatic=automatic))
        return _LATER

    async def _complete(self, number: Any, document: OpenFile, at: int, *, automatic: bool) -> None:
        """An edit of the document cancels this."""
        options, after = self._options, document.text[at:]
        await asyncio.sleep(options.debounce_s if automatic else 0.0)
        # In a thread: it reads files.
        body = await asyncio.to_thread(
            request_body, self._documents, document, at, max_tokens=options.max_tokens, automatic=automatic
        )
        text = await self._ask(body, after)
        command = {"title": "accepted", "command": ACCEPTED}
        items = [{"insertText": text, "command": command}] if text else []
        self._writer.write({"id": number, "result": {"items": items}})
        if items:
            self._start_report("shown")

    async def _ask(self, body: dict[str, Any], after: str) -> str:
        """The service's suggestion; "" if it has none or does not answer."""
        assert self._session is not None
        try:
            async with self._session.post(f"{self._options.url}/v1/completions", json=body) as response:
                answer = await response.json(content_type=None)
            if response.status != 200:
                if response.status != 409:  # superseded by a newer request
                    self._warn(str(answer["error"]["message"])[:300])
                return ""
            choice = answer["choices"][0]
            return tidy(str(choice["text"]), after, was_cut=choice["finish_reason"] in ("length", "abort"))
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
            self._warn(f"{self._options.url} gives no completions ({type(error).__name__}); is lakh serve running?")
            return ""

    def _start_report(self, event: str) -> None:
        self._run(_Report(event), self._report(event))

    async def _report(self, event: str) -> None:
        assert self._session is not None
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.post(f"{self._options.url}/v1/feedback", json={"event": event}) as response:
                await response.read()

    def _warn(self, message: str) -> None:
        now_s = time.monotonic()
        if now_s - self._warned_s >= WARN_EVERY_S:
            self._warned_s = now_s
            params = {"type": WARNING, "message": f"lakh: {message}"}
            self._writer.write({"method": "window/showMessage", "params": params})

    def _run(self, key: Any, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks[key] = task
        task.add_done_callback(lambda done: self._finished(key, done))

    def _finished(self, key: Any, task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
        is_request = not isinstance(key, _Report)
        if task.cancelled():
            if is_request:  # also one that was cancelled before it began
                self._respond_error(key, RpcError(protocol.CANCELLED, "cancelled"))
        elif task.exception() is not None:
            log.error("a request failed", exc_info=task.exception())
            if is_request:
                self._respond_error(key, RpcError(protocol.INTERNAL_ERROR, "internal error"))

    def _cancel(self, number: Any) -> None:
        with contextlib.suppress(TypeError):  # an id that cannot be one
            task = self._tasks.get(number)
            if task is not None:
                task.cancel()

    def _respond_error(self, number: Any, error: RpcError) -> None:
        self._writer.write({"id": number, "error": {"code": error.code, "message": str(error)}})


def _is_exit(message: EOFError | dict[str, Any]) -> bool:
    return isinstance(message, EOFError) or message.get("method") == "exit"


@dataclass(eq=False)
class _Report:
    """The key of a task that reports to the service and answers no request."""

    event: str


_LATER = object()  # the result of a request whose answer follows


def serve_streams(options: LanguageServerOptions, stdin: BinaryIO, stdout: BinaryIO) -> int:
    """Serve one editor over a pair of streams; returns the exit code."""
    try:
        return asyncio.run(LanguageServer(options, RpcReader(stdin), RpcWriter(stdout)).serve())
    except BrokenPipeError:  # the editor closed its end
        return 1
