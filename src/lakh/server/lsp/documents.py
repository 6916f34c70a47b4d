"""The editor's open files. Positions are lines and characters in the encoding that client and server agreed on."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from lakh.server.lsp.protocol import INVALID_PARAMS, RpcError
from lakh.server.retrieval.repository import Repository, root_of

__all__ = ["OpenFile", "OpenFiles", "choose_encoding", "offset_of", "path_of"]

ENCODINGS = ("utf-32", "utf-8", "utf-16")  # best first: characters are code points here


def choose_encoding(offered: object) -> str:
    """The position encoding, of those that the client offers; UTF-16 if it offers none."""
    names = offered if isinstance(offered, list) else []
    return next((name for name in ENCODINGS if name in names), "utf-16")


@dataclass
class OpenFile:
    uri: str
    language: str
    text: str
    edited: int
    """When it was edited last: higher is later."""
    edited_at: int = 0
    """Where, as an offset."""


class OpenFiles:
    def __init__(self) -> None:
        self.by_uri: dict[str, OpenFile] = {}
        self.encoding = "utf-16"
        self.editor = uuid.uuid4().hex
        """Names this editor to the service: the files of another one may have the same paths."""
        self._clock = itertools.count()
        self._repositories: dict[Path, Repository] = {}

    def open(self, params: Mapping[str, Any]) -> None:
        item = params["textDocument"]
        self.by_uri[item["uri"]] = OpenFile(item["uri"], item.get("languageId", ""), item["text"], next(self._clock))

    def change(self, params: Mapping[str, Any]) -> None:
        document = self.get(params)
        for change in params["contentChanges"]:
            if change.get("range") is None:
                document.text = change["text"]
                continue
            start, end = (offset_of(document.text, change["range"][at], self.encoding) for at in ("start", "end"))
            document.text = document.text[:start] + change["text"] + document.text[max(start, end) :]
            document.edited_at = start + len(change["text"])
        document.edited = next(self._clock)

    def close(self, params: Mapping[str, Any]) -> None:
        self.by_uri.pop(params["textDocument"]["uri"], None)

    def repository_of(self, file: Path) -> Repository:
        """The repository of a file, with the open files as they are now."""
        root = root_of(file)
        repository = self._repositories.setdefault(root, Repository(root))
        open_files = list(self.by_uri.values())
        repository.open_texts = {Path(path): one.text for one in open_files if (path := path_of(one.uri))}
        return repository

    def get(self, params: Mapping[str, Any]) -> OpenFile:
        uri = params["textDocument"]["uri"]
        if uri not in self.by_uri:
            raise RpcError(INVALID_PARAMS, f"{str(uri)[:200]} is not open")
        return self.by_uri[uri]


def offset_of(text: str, position: Mapping[str, Any], encoding: str) -> int:
    """The index in `text` of a position; beyond the end of a line or of the text it is that end."""
    line, character = int(position["line"]), int(position["character"])
    if line < 0 or character < 0:
        raise RpcError(INVALID_PARAMS, "a position is negative")
    start = 0
    for _ in range(line):
        start = text.find("\n", start) + 1
        if start == 0:
            return len(text)
    end = text.find("\n", start)
    content = text[start : len(text) if end < 0 else end].removesuffix("\r")
    return start + _index(content, character, encoding)


def _index(line: str, character: int, encoding: str) -> int:
    if encoding == "utf-32" or line.isascii():
        return min(character, len(line))
    units = 0
    for index, letter in enumerate(line):
        if units >= character:
            return index
        units += len(letter.encode(encoding + ("-le" if encoding == "utf-16" else ""), "surrogatepass"))
        if encoding == "utf-16":
            units -= len(letter.encode("utf-16-le", "surrogatepass")) // 2
    return len(line)


def path_of(uri: str) -> str | None:
    """The path of a file: URI; None for others, also for what is no URI."""
    try:
        parts = urlsplit(uri)
    except ValueError:
        return None
    return unquote(parts.path) if parts.scheme == "file" else None
