"""The program in the answer of a chat model.

Answers come with reasoning before them, with several code blocks (shell commands, examples of use), with indented
fences, with the body of the function alone, or without the imports of the prompt.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

__all__ = ["program_of_answer"]

_REASONING_END = re.compile(r"</(?:think|thinking|reasoning|thought)>", re.IGNORECASE)
_REASONING_START = re.compile(r"\s*<(?:think|thinking|reasoning|thought)>", re.IGNORECASE)
_FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<tag>[\w+#.-]*)[^\n`]*$", re.MULTILINE)
_ALIASES = {
    "python": {"python", "py", "python3"}, "javascript": {"javascript", "js"}, "cpp": {"cpp", "c++"},
    "js": {"javascript", "js"}, "ts": {"typescript", "ts"}, "py": {"python", "py"}, "rb": {"ruby", "rb"},
    "rs": {"rust", "rs"}, "pl": {"perl", "pl"}, "cs": {"csharp", "cs", "c#"}, "jl": {"julia", "jl"},
    "rkt": {"racket", "rkt", "scheme"}, "sh": {"bash", "sh", "shell"},
}  # fmt: skip
_NOT_CODE = {"bash", "console", "json", "output", "plaintext", "sh", "shell", "text", "txt", "zsh"}


@dataclass(frozen=True)
class CodeBlock:
    language: str
    text: str


def program_of_answer(answer: str, prompt: str, entry_point: str, language: str = "python") -> str:
    """The whole program: the block that defines the entry point, or the prompt with the block as its body."""
    text = _without_reasoning(answer)
    named = _ALIASES.get(language, {language})
    blocks = [block for block in _blocks(text) if block.language in named or block.language not in _NOT_CODE]
    if not blocks:
        blocks = [CodeBlock("", text)]
    best = max(
        enumerate(blocks),
        # The last of several versions: answers correct themselves.
        key=lambda each: (_defines(each[1].text, entry_point), each[1].language in named, each[0]),
    )[1].text
    if not entry_point:
        return best
    if language not in ("python", "py"):
        return _missing_header(prompt, best) + best
    if _defines(best, entry_point):
        return _preamble(prompt, entry_point) + best
    return prompt + ("" if prompt.endswith("\n") else "\n") + _as_body(best)


def _without_reasoning(answer: str) -> str:
    *_, end = [None, *_REASONING_END.finditer(answer)]
    if end is not None:
        return answer[end.end() :]
    return "" if _REASONING_START.match(answer) else answer  # cut off while it was still reasoning


def _blocks(text: str) -> list[CodeBlock]:
    """Fenced blocks; one without an end lasts to the end of the text."""
    found, at = [], 0
    while opening := _FENCE.search(text, at):
        closing = re.compile(rf"^[ \t]*{re.escape(opening['fence'])}[ \t]*$", re.MULTILINE).search(text, opening.end())
        end = closing.start() if closing else len(text)
        lines = text[opening.end() : end].split("\n")[1:]
        body = "\n".join(line.removeprefix(opening["indent"]) for line in lines)
        found.append(CodeBlock(opening["tag"].lower(), body))
        at = closing.end() if closing else len(text)
    return found


def _defines(code: str, name: str) -> bool:
    if not name:
        return False
    pattern = rf"^[ \t]*(?:async\s+def|def|class)\s+{re.escape(name)}\b|^{re.escape(name)}\s*[:=]"
    return re.search(pattern, code, re.MULTILINE) is not None


def _preamble(prompt: str, entry_point: str) -> str:
    """Imports and helpers of the prompt: what lies before the function to complete."""
    at = re.search(rf"^(?:@.*\n)*(?:async\s+def|def|class)\s+{re.escape(entry_point)}\b", prompt, re.MULTILINE)
    return prompt[: at.start()] if at else ""


def _missing_header(prompt: str, code: str) -> str:
    """Lines at the start of a prompt in another language that tests need and answers leave out."""
    lines = [
        line for line in prompt.split("\n") if re.match(r"#include|#lang|using |import |use |package |<\?php", line)
    ]
    return "".join(f"{line}\n" for line in lines if line.strip() not in code)


def _as_body(code: str) -> str:
    dedented = textwrap.dedent(code.strip("\n"))
    return textwrap.indent(dedented, "    ") + "\n"
