"""Fill-in-the-middle prompts: ask for the text between a prefix and a suffix.

    psm    prefix token, prefix, suffix token, suffix, middle token
    spm    prefix token, suffix token, suffix, middle token, prefix

While a user types, the prefix grows and the suffix stays. In spm order the prompt only grows at its end, so the prefix
cache covers all but the new tokens; in psm order everything after the cursor changes with every keystroke. A model
understands an order only if it was trained with it: families that know one order get it whatever is asked
(tokens/tokenizer/special_tokens.py).

Text that does not fit is cut from the ends far from the cursor, in steps of `quantum` tokens: a cut that moved with
every keystroke would invalidate every cached block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar

from lakh.errors import UserError
from lakh.server.model.block_pool import BLOCK_TOKENS

if TYPE_CHECKING:
    from lakh.tokens.tokenizer import Tokenizer

__all__ = ["NUM_TOKENS", "Order", "cut_before", "prompt", "quantum"]

Order = Literal["psm", "spm"]
T = TypeVar("T", str, tuple[int, ...])
SUFFIX_SHARE = 4  # the suffix gets at least a quarter of the room, if it needs it
MAX_QUANTUM = 256
NUM_TOKENS = 3  # prefix, suffix, middle


def prompt(
    tokenizer: Tokenizer, before: tuple[int, ...], after: tuple[int, ...], room: int, *, context: int, order: Order
) -> tuple[int, ...]:
    """At most `room` ids. Raises a UserError if the tokenizer has no fill-in-the-middle tokens."""
    if tokenizer.fim is None:
        raise UserError("suffix", "the tokenizer has no fill-in-the-middle tokens", "omit the suffix")
    prefix, suffix, middle, has_spm = tokenizer.fim
    first = tokenizer.begin_ids
    room -= NUM_TOKENS + len(first)
    if room < 1:
        raise UserError("suffix", f"a context of {context} is too short", "omit the suffix")
    step = quantum(context)
    # A keystroke never moves the end of the suffix, so it is cut exactly; the prefix is cut in steps.
    num_after = min(len(after), max(room // SUFFIX_SHARE, room - _steps_up(len(before), step)))
    before, after = cut_before(before, room - num_after, step), after[:num_after]
    if middle is None:
        return (*first, suffix, *after, prefix, *before)
    if order == "spm" and has_spm:
        return (*first, prefix, suffix, *after, middle, *before)
    return (*first, prefix, *before, suffix, *after, middle)


def quantum(context: int) -> int:
    """A sixteenth of the context in whole blocks, at least one block and at most 256 tokens."""
    return min(MAX_QUANTUM, max(context // 16 // BLOCK_TOKENS, 1) * BLOCK_TOKENS)


def cut_before(before: T, room: int, step: int) -> T:
    """The end of a prefix that fits, in tokens or characters; its start moves only every `step` of them."""
    if len(before) <= room:
        return before
    drop = _steps_up(len(before) - room, step)
    return before[drop:] if drop < len(before) else before[len(before) - room :]


def _steps_up(number: int, step: int) -> int:
    return -(-number // step) * step
