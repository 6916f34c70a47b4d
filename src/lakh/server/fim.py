"""Fill in the middle: the prompt that asks for what stands between a prefix and a suffix.

    psm    prefix token, prefix, suffix token, suffix, middle token
    spm    prefix token, suffix token, suffix, middle token, prefix

While someone types, the prefix grows and the suffix stays. In spm order the prompt only grows at its end, so a cached
prefix stays good and a keystroke costs the tokens of that keystroke; in psm order everything from the cursor on is
new each time. A model understands an order only if it was trained with it.

What has no room goes from the ends far from the cursor, in steps of `quantum` tokens: a cut that moved with every
keystroke would make every cached block useless. Knows ids; knows nothing of models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from lakh.errors import UserError
from lakh.server.model.block_pool import BLOCK_TOKENS

if TYPE_CHECKING:
    from lakh.tokens.tokenizer import Tokenizer

__all__ = ["Order", "cut_before", "prompt", "quantum"]

Order = Literal["psm", "spm"]
FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE = "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"
SUFFIX_SHARE = 4  # the text after the cursor gets at least a quarter of the room, if it needs it
MAX_QUANTUM = 256


def prompt(
    tokenizer: Tokenizer, before: tuple[int, ...], after: tuple[int, ...], room: int, *, context: int, order: Order
) -> tuple[int, ...]:
    """At most `room` ids. A UserError where the tokenizer has no such tokens."""
    try:
        prefix, suffix, middle = (tokenizer.special(token) for token in (FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE))
    except UserError:
        found = "the tokenizer has no tokens for filling in the middle"
        raise UserError("suffix", found, "leave the suffix out") from None
    room -= 3
    if room < 1:
        raise UserError("suffix", f"a context of {context} is too short", "leave the suffix out")
    step = quantum(context)
    # The suffix is cut at its end, where a keystroke changes nothing: exactly. The prefix in steps.
    num_after = min(len(after), max(room // SUFFIX_SHARE, room - _steps_up(len(before), step)))
    before, after = cut_before(before, room - num_after, step), after[:num_after]
    if order == "spm":
        return (prefix, suffix, *after, middle, *before)
    return (prefix, *before, suffix, *after, middle)


def quantum(context: int) -> int:
    """A sixteenth of the context in whole blocks, at least one block and at most 256 tokens."""
    return min(MAX_QUANTUM, max(context // 16 // BLOCK_TOKENS, 1) * BLOCK_TOKENS)


def cut_before(ids: tuple[int, ...], room: int, step: int) -> tuple[int, ...]:
    """The end of `ids` that fits, with a beginning that moves only every `step` tokens."""
    if len(ids) <= room:
        return ids
    drop = _steps_up(len(ids) - room, step)
    return ids[drop:] if drop < len(ids) else ids[len(ids) - room :]


def _steps_up(number: int, step: int) -> int:
    return -(-number // step) * step
