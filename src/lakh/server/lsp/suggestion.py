"""From a model's text to what an editor shows: pure functions over text."""

from __future__ import annotations

__all__ = ["close_brackets", "remove_repeated_suffix", "tidy"]

PAIRS = {"(": ")", "[": "]", "{": "}"}
MIN_REPEATED_LINE = 3  # characters: shorter lines (`}`) repeat by chance


def tidy(text: str, after: str, *, was_cut: bool) -> str:
    """The suggestion before `after`; "" if there is nothing to show. `was_cut`: the length limit ended the text.

    A cut text of several lines loses its last, incomplete line.
    """
    if was_cut and "\n" in text.rstrip("\n"):
        text = text.rstrip("\n").rpartition("\n")[0]
    text = remove_repeated_suffix(text, after)
    text = close_brackets(text, after)
    rest = after.partition("\n")[0].strip()
    return "" if not text.strip() or text.strip() == rest else text


def remove_repeated_suffix(text: str, after: str) -> str:
    """Remove from the end of `text` what follows the cursor anyway: the rest of its line, or the next lines."""
    rest = after.partition("\n")[0].rstrip()
    if rest:
        lines = text.split("\n")
        if lines[0].rstrip().endswith(rest):  # the first line ends with the rest of the cursor's line
            kept = lines[0].rstrip()[: -len(rest)]
            if _is_balanced(kept):
                return kept
    following = next((line.strip() for line in after.split("\n")[1:] if line.strip()), "")
    if len(following) >= MIN_REPEATED_LINE:
        lines = text.split("\n")
        at = next((number for number, line in enumerate(lines) if number and line.strip() == following), None)
        if at is not None:
            return "\n".join(lines[:at]).rstrip()
    return text


def close_brackets(text: str, after: str) -> str:
    """Append the closing brackets that a single line lacks, unless the rest of the cursor's line has them."""
    if "\n" in text or not text.strip():
        return text
    missing = _open_brackets(text)
    rest = after.partition("\n")[0].strip()
    if missing and not rest and not text.rstrip().endswith((",", ":", *PAIRS)):
        return text + "".join(PAIRS[bracket] for bracket in reversed(missing))
    return text


def _open_brackets(text: str) -> list[str]:
    """Brackets that are opened and not closed, outside of strings."""
    opened: list[str] = []
    quote = ""
    for at, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote and text[at - 1 : at] != "\\" else quote
        elif letter in "\"'":
            quote = letter
        elif letter in PAIRS:
            opened.append(letter)
        elif letter in PAIRS.values() and opened and PAIRS[opened[-1]] == letter:
            opened.pop()
    return opened


def _is_balanced(text: str) -> bool:
    """Whether a cut leaves no bracket of the text without its end."""
    return all(text.count(left) >= text.count(right) for left, right in PAIRS.items())
