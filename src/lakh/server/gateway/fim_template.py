"""Fill-in-the-middle prompts as text, for engines that take no suffix (vLLM answers 400).

Such an engine parses special tokens in the prompt's text. Code that contains one of them would end its own context, so
everything beyond it, seen from the cursor, is dropped. There is no tokenizer here: room is estimated in characters, and
the beginning moves in steps as in prompts/fim.py.
"""

from __future__ import annotations

from typing import NamedTuple

from lakh.errors import UserError
from lakh.server.prompts.fim import SUFFIX_SHARE, cut_before

__all__ = ["TEMPLATES", "FimTemplate", "end_of", "fim_prompt", "fim_template_of"]

CHARS_PER_TOKEN = 2.5  # conservative: code has 3 to 4 with such vocabularies
QUANTUM_CHARS = 1024


class FimTemplate(NamedTuple):
    prefix: str
    suffix: str
    middle: str
    has_spm: bool = True


TEMPLATES = {
    "lakh": FimTemplate("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "qwen": FimTemplate("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "starcoder": FimTemplate("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    # begin, hole, end: the same positions under other names; trained in this order only
    "deepseek": FimTemplate("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", has_spm=False),
}


def fim_template_of(name: str) -> FimTemplate | None:
    """None if the engine takes a suffix itself."""
    if name == "suffix":
        return None
    if name in TEMPLATES:
        return TEMPLATES[name]
    parts = name.split(",")
    if len(parts) == 3 and all(parts):
        return FimTemplate(parts[0], parts[1], parts[2])
    todo = f"write suffix, {', '.join(TEMPLATES)}, or PREFIX,SUFFIX,MIDDLE as the tokenizer writes them"
    raise UserError(f"--fim {name}", "is not a template", todo)


def end_of(prompt: str | tuple[int, ...], room_tokens: int) -> str | tuple[int, ...]:
    """The end of a prompt that fits: a file is completed at its end."""
    room = max(room_tokens, 1)
    if isinstance(prompt, str):
        return cut_before(prompt, int(room * CHARS_PER_TOKEN), QUANTUM_CHARS)
    return prompt[-room:]


def fim_prompt(template: FimTemplate, before: str, after: str, *, order: str, room_tokens: int) -> str:
    for token in template[:3]:
        before, after = before.rpartition(token)[2], after.partition(token)[0]
    room = int(max(room_tokens, 1) * CHARS_PER_TOKEN)
    after = after[: max(room // SUFFIX_SHARE, room - len(before))]
    before = cut_before(before, room - len(after), QUANTUM_CHARS)
    if order == "spm" and template.has_spm:
        return f"{template.prefix}{template.suffix}{after}{template.middle}{before}"
    return f"{template.prefix}{before}{template.suffix}{after}{template.middle}"
