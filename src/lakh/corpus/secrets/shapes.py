"""A small notation for the formats of secrets, and its translation to regular expressions.

    ghp_<a36>      literal text, then 36 letters or digits
    <x32> hex      <d16> digits     <u26> capitals and digits    <a9> letters and digits    <l34> letters
    <w20> a-z A-Z 0-9 _ -           <b43> base64: a-z A-Z 0-9 + /           <s44> a-z A-Z 0-9 _ - = .
    <k80> base64 of both kinds      <z31> a-z A-Z 0-9 _ ~ . -               <p80> a-z A-Z 0-9 %
    <w20-60>       20 to 60 times                  <uuid>      8-4-4-4-12 hex digits
    {live|test}    one of these                     [-<d1>]     optional

Meant for tables that people read and extend; other patterns are written as regular expressions. Both hyperscan and RE2
accept the result: no look-around, no back-references.
"""

from __future__ import annotations

import re

__all__ = ["regex_of"]

ALPHABETS = {
    "x": "[0-9a-fA-F]",
    "d": "[0-9]",
    "u": "[A-Z0-9]",
    "a": "[0-9A-Za-z]",
    "l": "[A-Za-z]",
    "w": r"[0-9A-Za-z_\-]",
    "b": "[0-9A-Za-z+/]",
    "s": r"[0-9A-Za-z_\-=.]",
    "k": r"[0-9A-Za-z+/=_\-]",
    "z": r"[0-9A-Za-z_~.\-]",
    "p": "[0-9A-Za-z%]",
}
UUID = "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
PIECE = re.compile(r"<uuid>|<([xdualwbskzp])(\d+)(?:-(\d*))?>|\{([^{}]+)\}|\[([^\[\]]+)\]|(.)", re.DOTALL)


def regex_of(shape: str) -> str:
    """The regular expression of a shape."""
    parts = []
    for found in PIECE.finditer(shape):
        alphabet, low, high, choice, option, plain = found.groups()
        if found.group() == "<uuid>":
            parts.append(UUID)
        elif alphabet:
            span = low if high is None else f"{low},{high}"
            parts.append(f"{ALPHABETS[alphabet]}{{{span}}}")
        elif choice:
            parts.append("(?:" + "|".join(regex_of(item) for item in choice.split("|")) + ")")
        elif option:
            parts.append(f"(?:{regex_of(option)})?")
        else:
            parts.append(re.escape(plain))
    return "".join(parts)
