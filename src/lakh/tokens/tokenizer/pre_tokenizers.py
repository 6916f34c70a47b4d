"""Pre-tokenizers of published models, by the names that GGUF files have for them (`tokenizer.ggml.pre`).

A pre-tokenizer splits a text by one pattern after the other: what matches becomes a piece, and what lies between
matches another one. A byte-level BPE then merges inside the pieces. The patterns are facts of the models' own
tokenizer.json; llama.cpp knows the same ones by these names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

__all__ = ["KIMI", "PRE_TOKENIZERS", "PreTokenizer", "describe", "name_of"]

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_UPPER, _LOWER = r"\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Lm}\p{Lo}\p{M}"


def _words(digits: str) -> str:
    """Words with one leading character that is no letter, runs of digits, of other characters and of spaces."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased_words(digits: str, ending: str) -> str:
    """Words that end where a capital letter follows a small one."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    first = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{first}{upper}*{lower}+{ending}|{first}{upper}+{lower}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


def _kimi() -> str:
    """Runs of Chinese characters, and words of others that end where a capital letter follows a small one."""
    upper, lower = (rf"[\p{{{first}}}{rest}&&[^\p{{Han}}]]" for first, rest in (("Lu", _UPPER), ("Ll", _LOWER)))
    first, ending = r"[^\r\n\p{L}\p{N}]?", f"{_CONTRACTIONS}?"
    words = rf"{first}{upper}*{lower}+{ending}|{first}{upper}+{lower}*{ending}"
    return rf"[\p{{Han}}]+|{words}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _characters(ranges: str) -> str:
    """A class of characters from hexadecimal ranges."""
    pairs = [part.partition("-") for part in ranges.split()]
    return "".join(chr(int(low, 16)) + (dash and dash + chr(int(high, 16))) for low, dash, high in pairs)


_DEEPSEEK_LETTERS = _characters(
    """
    41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c 38e-3a1
    3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77
    1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe
    1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124
    2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3
    a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a
    10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943
    """
)
_DEEPSEEK_MARKS = _characters("21-2f 3a-7e ff01-ff0f ff1a-ff5e 2018-201f 3000-3002")
_HAN = _characters("4e00-9fa5 800-4e00 ac00-d7ff")


@dataclass(frozen=True)
class PreTokenizer:
    patterns: tuple[str, ...]
    ignores_merges: bool = False
    """A piece that is a token becomes this token, even where merges lead elsewhere."""
    adds_begin: bool = False
    """Text starts with the begin token, if the file does not say otherwise."""

    def build(self) -> pre_tokenizers.PreTokenizer:
        *first, last = self.patterns
        parts: list[Any] = [
            pre_tokenizers.Digits(individual_digits=True)
            if pattern == _DIGIT
            else pre_tokenizers.Split(Regex(pattern), "isolated")
            for pattern in (first if last == GPT2 else self.patterns)
        ]
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=last == GPT2))
        return pre_tokenizers.Sequence(parts) if len(parts) > 1 else parts[0]


_DIGITS_FIRST = PreTokenizer((_DIGIT, GPT2))
_QWEN2 = PreTokenizer((_words(_DIGIT),))
_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), ignores_merges=True, adds_begin=True)
_DEEPSEEK_LLM = (r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", rf"\s?[{_DEEPSEEK_MARKS}]+", r"\s+$", f"[{_HAN}]+")

KIMI = _kimi()

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "smollm": _DIGITS_FIRST,  # first of its kind: what lakh's own tokenizers are called
    "starcoder": _DIGITS_FIRST,
    "refact": _DIGITS_FIRST,
    "command-r": _DIGITS_FIRST,
    "codeshell": _DIGITS_FIRST,
    "gpt-2": PreTokenizer((GPT2,)),
    "mpt": PreTokenizer((GPT2,)),
    "olmo": PreTokenizer((GPT2,)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "pixtral": _LLAMA3,
    "dbrx": PreTokenizer(_LLAMA3.patterns),
    "chatglm-bpe": PreTokenizer(_LLAMA3.patterns),
    "glm4": PreTokenizer(_LLAMA3.patterns),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", f"[{_HAN}]+", _DIGIT)),
    "deepseek-llm": PreTokenizer((*_DEEPSEEK_LLM, r"\p{N}+")),
    "deepseek-v3": PreTokenizer(
        (
            r"\p{N}{1,3}",
            f"[{_characters('4e00-9fa5 3040-309f 30a0-30ff')}]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
        )
    ),
    "seed-coder": PreTokenizer(
        (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
    ),
    "tekken": PreTokenizer((_cased_words(_DIGIT, ""),), ignores_merges=True, adds_begin=True),
    "gpt-4o": PreTokenizer((_cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),)),
    "llama4": PreTokenizer((_cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),)),
    "minimax-m2": PreTokenizer((_cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),)),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
"""By their names in a file; of several with the same patterns the first is written."""


def name_of(description: Mapping[str, Any]) -> str | None:
    """The name for the pre-tokenizer of a tokenizer.json; None if it has none."""
    patterns = _patterns(description.get("pre_tokenizer") or {})
    if patterns is None:
        return None
    ignores = bool(description["model"].get("ignore_merges"))
    known = {name: one for name, one in PRE_TOKENIZERS.items() if patterns in _spellings(one.patterns)}
    exact = [name for name, one in known.items() if one.ignores_merges == ignores]
    return next(iter(exact), None)


def _spellings(patterns: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Patterns as files of the same effect have them: DeepSeek's tokenizers split single digits, of which their
    vocabularies have no longer numbers."""
    digits = (*patterns[:-1], _DIGIT) if patterns[-1] == r"\p{N}+" else patterns
    return [patterns, digits]


def _patterns(part: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The patterns of a pre-tokenizer in a tokenizer.json; None where it does something else."""
    kind = part.get("type")
    if kind == "Sequence":
        found = [_patterns(one) for one in part["pretokenizers"]]
        if not found or None in found or part["pretokenizers"][-1].get("type") != "ByteLevel":
            return None
        return tuple(pattern for patterns in found for pattern in patterns or ())
    if kind == "Digits":
        return (_DIGIT,) if part["individual_digits"] else (r"\p{N}+",)
    if kind == "ByteLevel" and not part.get("add_prefix_space"):
        return (GPT2,) if part.get("use_regex", True) else ()
    if kind == "Split" and isinstance(pattern := part["pattern"].get("Regex"), str):
        is_isolated = (part["behavior"], part["invert"]) in (("Isolated", False), ("Removed", True))
        return (pattern,) if is_isolated else None
    return None


def describe(description: Mapping[str, Any]) -> str:
    """The pre-tokenizer of a tokenizer.json in a few words, for errors."""
    return json.dumps(description.get("pre_tokenizer"), ensure_ascii=False)[:120]
