"""Ground truth for the accuracy of the corpus stages: real files with known changes. Used by accuracy.py.

Everything here is made at run time from a seed; nothing secret-like is stored in any file.
"""

from __future__ import annotations

import ast
import builtins
import io
import random
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]

from lakh.corpus.filters.syntax import parser_of
from lakh.corpus.parsing.languages import identify, language_of

MAX_EXTRA = 6


@dataclass(frozen=True)
class SourceFile:
    path: str
    language: str
    text: str


def real_files(roots: list[str], *, per_language_bytes: int, seed: int = 7) -> list[SourceFile]:
    """UTF-8 files of 500 to 60,000 bytes under the folders, shuffled, up to a size per language."""
    found: list[Path] = []
    for root in roots:
        found += [p for p in sorted(Path(root).rglob("*")) if p.is_file() and language_of(p.name)]
    random.Random(seed).shuffle(found)
    room: dict[str, int] = {}
    files = []
    for path in found:
        language = language_of(path.name)
        left = room.get(language, per_language_bytes)
        size = path.stat().st_size
        if not 500 <= size <= 60_000 or left < size:
            continue
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        if "\0" in text or max(map(len, text.splitlines())) > 1000:
            continue
        language = identify(path.name, text.encode()).language or language
        room[language] = left - size
        files.append(SourceFile(str(path), language, text))
    return files


# --- secrets -----------------------------------------------------------------------------------------------------


def random_match(pattern: str, rng: random.Random) -> str:
    """A text that a regular expression (RE2 as in the secret rules) describes."""
    return "".join(_generate(_parser.parse(_python_form(pattern)), rng))


def _python_form(written: str) -> str:
    form = re.sub(r"\(\?-?[is]+:", "(?:", re.sub(r"\(\?-?[is]+\)", "", written))
    return form.replace(r"\z", r"\Z").replace("[[:alnum:]]", "[A-Za-z0-9]")


def _generate(parsed, rng: random.Random) -> Iterator[str]:
    for code, value in parsed:
        if code is op.LITERAL:
            yield chr(value)
        elif code is op.NOT_LITERAL:
            yield rng.choice([c for c in "abcdefgh0123" if ord(c) != value])
        elif code is op.ANY:
            yield rng.choice("abcdefghij ")
        elif code is op.IN:
            yield rng.choice(_members(value))
        elif code in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
            low, high, inner = value
            for _ in range(rng.randint(low, min(int(high), low + MAX_EXTRA))):
                yield from _generate(inner, rng)
        elif code is op.SUBPATTERN:
            yield from _generate(value[3], rng)
        elif code is op.BRANCH:
            yield from _generate(rng.choice(value[1]), rng)
        elif code is op.AT:
            continue
        else:
            raise NotImplementedError(str(code))


def _members(items) -> list[str]:
    made: list[str] = []
    negate = False
    for code, value in items:
        if code is op.NEGATE:
            negate = True
        elif code is op.LITERAL:
            made.append(chr(value))
        elif code is op.RANGE:
            made += [chr(c) for c in range(value[0], value[1] + 1)]
        elif code is op.CATEGORY:
            made += {
                op.CATEGORY_WORD: [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"],
                op.CATEGORY_DIGIT: [*"0123456789"],
                op.CATEGORY_SPACE: [" "],
                op.CATEGORY_NOT_SPACE: [*"abcdefghijklmnopqrstuvwxyzABCDEFGH0123456789"],
            }[value]
    if negate:
        return [c for c in "abcdefghijklmnopqrstuvwxyz0123456789 ,;" if c not in made] or ["/"]
    return made or ["x"]


# --- copies ------------------------------------------------------------------------------------------------------

WORD = re.compile(r"\b[A-Za-z_]{4,}\b")


def mutate(text: str, rng: random.Random) -> str:
    """A near copy: a few renames, dropped and moved lines, changed layout."""
    lines = text.split("\n")
    for _ in range(rng.choice([1, 1, 2, 3, 5, 8])):
        kind = rng.random()
        at = rng.randrange(len(lines))
        if kind < 0.35 and len(lines) > 5:
            del lines[at]
        elif kind < 0.6 and len(lines) > 5:
            lines.insert(rng.randrange(len(lines)), lines.pop(at))
        elif kind < 0.9:
            words = WORD.findall("\n".join(lines))
            if words:
                word = rng.choice(words)
                lines = [re.sub(rf"\b{word}\b", f"{word}_{rng.randrange(10)}", line) for line in lines]
        else:
            lines = [line + " " * rng.randrange(3) for line in lines]
    return "\n".join(lines)


def edit_lines(text: str, share: float, rng: random.Random) -> str:
    """A copy in which this share of the lines with text is replaced by other statements."""
    lines = text.split("\n")
    places = [at for at, line in enumerate(lines) if line.strip()]
    for at in rng.sample(places, max(1, round(share * len(places)))):
        blanks = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        number = rng.randrange(10**6)
        lines[at] = f"{blanks}changed_{number} = other_{number}(value, {number})"
    return "\n".join(lines)


def rename_some(text: str, language: str, share: float, rng: random.Random) -> str:
    """A copy in which this share of the distinct names (by tree-sitter) has another name everywhere."""
    data = text.encode()
    parser = parser_of(language)
    if parser is None:
        return text
    places: list[tuple[int, int]] = []
    queue = [parser.parse(data).root_node]
    while queue:
        node = queue.pop()
        queue += node.children
        if "identifier" in node.type and not node.children:
            places.append((node.start_byte, node.end_byte))
    names = sorted({data[begin:end] for begin, end in places})
    chosen = rng.sample(names, round(share * len(names)))
    fresh = {name: b"other_%d_%d" % (number, rng.randrange(10**6)) for number, name in enumerate(chosen)}
    out, at = [], 0
    for begin, end in sorted(places):
        out += [data[at:begin], fresh.get(data[begin:end], data[begin:end])]
        at = end
    return b"".join([*out, data[at:]]).decode()


def renamed(program: str, rng: random.Random) -> str:
    """A Python program with every bound name renamed; built-ins, attributes and imports are kept."""
    tree = ast.parse(program)
    bound = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    bound |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names = {
        name: f"v{rng.randrange(10**6)}_{number}" for number, name in enumerate(sorted(bound - set(dir(builtins))))
    }
    tokens, last = [], ""
    for token in tokenize.generate_tokens(io.StringIO(program).readline):
        known = token.type == tokenize.NAME and last != "."
        tokens.append((token.type, names.get(token.string, token.string) if known else token.string))
        last = token.string
    return tokenize.untokenize(tokens)


def reindented(program: str) -> str:
    """Tabs for spaces, and empty lines in between."""
    lines = []
    for number, line in enumerate(program.split("\n")):
        size = len(line) - len(line.lstrip(" "))
        lines.append("\t" * (size // 4) + line.lstrip(" ") if size % 4 == 0 else line)
        if number % 3 == 0 and line.endswith(":"):
            lines.append("")
    return "\n".join(lines)
