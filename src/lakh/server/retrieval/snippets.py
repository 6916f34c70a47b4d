"""Chooses the outlines that help to complete a line, within a budget of characters.

Candidates are what the file imports from its repository, the definitions of files that were edited recently, and those
of the same folder. The score adds up: imported by name, not used yet above the cursor (an import is there to be used),
used near the cursor, shared names with the lines around the cursor, file edited recently.

The lines are whole ones: the line that is being typed does not count, so the choice stays the same while it is typed
and the service's prefix cache stays useful.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lakh.server.prompts.extra_files import ExtraFile
from lakh.server.retrieval.definitions import Definition, definitions_of
from lakh.server.retrieval.identifiers import identifiers, overlap, rarity
from lakh.server.retrieval.imports import imports_of
from lakh.server.retrieval.repository import Repository

__all__ = ["outline_files", "related_snippets"]

MAX_CHARS = 3_000
MAX_SIBLINGS, MAX_RECENT = 12, 8
MAX_OF_MODULE = 40  # definitions of a module that is imported as a whole
LINES_ABOVE, LINES_BELOW = 40, 10

IMPORTED, NEAR, UNUSED, RECENT = 1.0, 0.6, 0.3, 0.2
MIN_OVERLAP = 0.08  # less is chance: a snippet that nothing imports needs as much


class _Candidate(NamedTuple):
    score: float
    file: Path
    definition: Definition


def related_snippets(
    repository: Repository,
    file: Path,
    before: str,
    after: str = "",
    *,
    recent: Sequence[Path] = (),
    max_chars: int = MAX_CHARS,
) -> list[ExtraFile]:
    """Outlines for the cursor between two texts of `file`, the best last. `recent`: files that were edited, latest
    first."""
    above, below = _whole_lines(before, after)
    query = identifiers(above + below)
    given: dict[tuple[Path, str], tuple[float, Definition]] = {}

    def add(path: Path, definition: Definition, score: float) -> None:
        key = path, definition.name
        if path != file and (key not in given or given[key][0] < score):
            given[key] = score, definition

    for imported in imports_of(before + after, file.suffix):
        uses = len(re.findall(rf"(?<![\w$]){re.escape(imported.bound)}(?![\w$])", before)) if imported.bound else 0
        base = IMPORTED + (NEAR if imported.bound in query else 0.0) + (UNUSED if uses == 1 else 0.0)
        found = repository.find(imported, file)[:MAX_OF_MODULE]
        for path, definition in found:
            add(path, definition, base if len(found) == 1 else IMPORTED / 2)
    for path in recent[:MAX_RECENT]:
        if path.suffix == file.suffix:
            for definition in repository.definitions(path):
                add(path, definition, RECENT)
    for path in repository.siblings(file, MAX_SIBLINGS):
        for definition in repository.definitions(path):
            add(path, definition, 0.0)
    weights = rarity(definition.names for _, definition in given.values())
    candidates = []
    for key, (base, definition) in given.items():
        share = overlap(query, definition.names, weights)
        if base >= IMPORTED / 2 or share >= MIN_OVERLAP:
            candidates.append(_Candidate(base + share, key[0], definition))
    return _files(_fitting(candidates, max_chars), repository.root)


def outline_files(files: Sequence[ExtraFile], before: str, max_chars: int) -> list[ExtraFile]:
    """Files that a client sent whole, cut to the outlines that share most names with the text before the cursor."""
    above, _ = _whole_lines(before, "")
    query = identifiers(above)
    candidates = []
    outlines = [(Path(file.name), definition) for file in files for definition in definitions_of(file.text)]
    weights = rarity(definition.names for _, definition in outlines)
    for path, definition in outlines:
        near = NEAR if definition.name in query else 0.0
        candidates.append(_Candidate(near + overlap(query, definition.names, weights), path, definition))
    return _files(_fitting(candidates, max_chars), None)


def _whole_lines(before: str, after: str) -> tuple[str, str]:
    """The lines around the cursor's line."""
    above = before[: before.rfind("\n") + 1].split("\n")[-LINES_ABOVE - 1 :]
    below = after.partition("\n")[2].split("\n")[:LINES_BELOW]
    return "\n".join(above), "\n".join(below)


def _fitting(candidates: list[_Candidate], max_chars: int) -> list[_Candidate]:
    """The best that fit together."""
    chosen = []
    for candidate in sorted(candidates, key=lambda one: (-one.score, str(one.file), one.definition.line)):
        size = len(candidate.definition.outline) + 1
        if size <= max_chars:
            chosen.append(candidate)
            max_chars -= size
    return chosen


def _files(chosen: list[_Candidate], root: Path | None) -> list[ExtraFile]:
    """Grouped by file in the file's order; files by their best score, the best last."""
    by_file: dict[Path, list[_Candidate]] = {}
    for candidate in chosen:
        by_file.setdefault(candidate.file, []).append(candidate)
    files = []
    for path, found in sorted(by_file.items(), key=lambda item: max(one.score for one in item[1])):
        name = path.relative_to(root).as_posix() if root and path.is_relative_to(root) else path.as_posix()
        ordered = sorted(found, key=lambda one: one.definition.line)
        files.append(ExtraFile(name, "\n".join(one.definition.outline for one in ordered) + "\n"))
    return files
