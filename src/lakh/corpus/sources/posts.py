"""Questions and answers of a Stack Exchange dump (Posts.xml): one document per question with its answers.

A dump lists posts by number, so an answer may be millions of rows after its question. Posts pass through an SQLite file
on disk, indexed by question, so memory stays flat. A question without an answer is dropped; answers are sorted by
score. Bodies become Markdown with code blocks.

Dumps are CC BY-SA: the licence of each post is its ContentLicense field.
"""

from __future__ import annotations

import itertools
import sqlite3
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

from lakh import storage
from lakh.corpus.sources.listing import RawDocument
from lakh.corpus.sources.markup import to_markdown

__all__ = ["read_posts"]

QUESTION, ANSWER = "1", "2"
MIN_SCORE = 0
LICENCES = {"CC BY-SA 2.5": "CC-BY-SA-2.5", "CC BY-SA 3.0": "CC-BY-SA-3.0", "CC BY-SA 4.0": "CC-BY-SA-4.0"}


def read_posts(url: str, repo: str) -> Iterator[RawDocument]:
    """One Markdown document per answered question."""
    with tempfile.TemporaryDirectory(prefix="lakh-posts-") as folder:
        # A scratch file, removed with its folder.
        database = sqlite3.connect(str(Path(folder) / "posts.sqlite"))
        database.execute("PRAGMA synchronous = OFF")
        database.execute(
            "CREATE TABLE posts (question INT, kind INT, score INT, id INT, title TEXT, body TEXT, licence TEXT)"
        )
        try:
            yield from _load(url, repo, database)
            database.execute("CREATE INDEX by_question ON posts (question, kind, score DESC, id)")
            yield from _documents(repo, database)
        finally:
            database.close()


def _load(url: str, repo: str, database: sqlite3.Connection) -> Iterator[RawDocument]:
    """Fill the table; yields the rows that cannot be read."""
    try:
        with storage.open_read(url) as file:
            # expat does not expand external entities and limits internal ones.
            parser = ET.iterparse(file, events=("start", "end"))
            _, root = next(parser)
            for event, row in parser:
                if event != "end" or row.tag != "row":
                    continue
                kind = row.get("PostTypeId")
                if kind in (QUESTION, ANSWER):
                    number = row.get("Id", "")
                    question = number if kind == QUESTION else row.get("ParentId", "")
                    if number.isdigit() and question.isdigit():
                        score = row.get("Score", "0")
                        licence = LICENCES.get(row.get("ContentLicense", ""), "")
                        values = (int(question), int(kind), _int(score), int(number), row.get("Title", ""))
                        database.execute(
                            "INSERT INTO posts VALUES (?,?,?,?,?,?,?)", (*values, row.get("Body", ""), licence)
                        )
                    else:
                        yield RawDocument(
                            repo, f"post/{number or '?'}", reason="bad-record", detail="no Id, or no ParentId"
                        )
                root.clear()  # free the rows that were read
    except (ET.ParseError, StopIteration, OSError) as error:
        yield RawDocument(repo, url.rpartition("/")[2], reason="unreadable", detail=f"the rest: {error}"[:200])


def _documents(repo: str, database: sqlite3.Connection) -> Iterator[RawDocument]:
    columns = "question, kind, score, title, body, licence"
    rows = database.execute(f"SELECT {columns} FROM posts ORDER BY question, kind, score DESC, id")
    for question, posts in itertools.groupby(rows, key=lambda row: row[0]):
        parts, answers, licence = [], 0, ""
        for number, (_, kind, score, title, body, stated) in enumerate(posts):
            licence = licence if number else stated  # of the question, which comes first
            if kind == int(QUESTION):
                parts.append(f"# {title}\n\n{to_markdown(body)}")
            elif score >= MIN_SCORE:
                parts.append(f"## Answer (score {score})\n\n{to_markdown(body)}")
                answers += 1
        raw = RawDocument(repo, f"questions/{question}.md", documentation=True, language="markdown")
        if not parts:
            continue
        if not parts[0].startswith("# ") or not answers:
            raw.reason, raw.detail = "bad-record", "answers without their question" if answers else "no answer"
        else:
            raw.content = ("\n\n".join(parts) + "\n").encode("utf-8", "replace")
            raw.size_bytes = len(raw.content)
            raw.licence, raw.licence_evidence = licence, "ContentLicense" if licence else ""
        yield raw


def _int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return 0
