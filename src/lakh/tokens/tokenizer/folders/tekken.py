"""`tekken.json` of Mistral: byte strings in the order of their ranks, behind special tokens, and a pattern.

The first `default_num_special_tokens` ids are those of special tokens; of the byte strings as many follow as fit into
`default_vocab_size`. Files before version 11 do not name their special tokens. Source of the names and of both rules:
mistral-common (github.com/mistralai/mistral-common, tokens/tokenizers/tekken.py).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken

from lakh.errors import CorruptCheckpoint, UserError
from lakh.tokens.tokenizer.folders import added
from lakh.tokens.tokenizer.folders.added import AGAIN
from lakh.tokens.tokenizer.folders.ranks import byte_pairs

__all__ = ["FILE", "build"]

FILE = "tekken.json"
_UNNAMED = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Special tokens of files that do not name them."""
MOST_TOKENS = 10_000_000


def build(
    where: str, files: Mapping[str, bytes], config: Mapping[str, Any], todo: str
) -> tuple[tokenizers.Tokenizer, Mapping[str, Any]]:
    """The tokenizer and its tokenizer_config.json."""
    data = added.json_table(where, files, FILE)
    place = f"{where}/{FILE}"
    try:
        settings = data["config"]
        count, size = settings["default_num_special_tokens"], settings["default_vocab_size"]
        if not (type(count) is type(size) is int and 0 <= count <= size <= MOST_TOKENS):
            raise ValueError("the sizes are no numbers of tokens")
        given = data.get("special_tokens")
        names = (
            dict(enumerate(_UNNAMED)) if given is None else {int(one["rank"]): str(one["token_str"]) for one in given}
        )
        special = {name: number for number, name in sorted(names.items())}
        special |= {f"<SPECIAL_{number}>": number for number in range(count) if number not in names}
        ranks = {
            base64.b64decode(one["token_bytes"], validate=True): int(one["rank"])
            for one in data["vocab"]
            if int(one["rank"]) < size - count
        }
        pattern = str(settings["pattern"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpoint(place, f"is no tokenizer of Mistral ({error})", AGAIN) from None
    if sorted(special.values()) != list(range(count)) or len(ranks) != size - count:
        raise CorruptCheckpoint(place, "has ids that repeat or are missing", AGAIN)
    if twice := next((name for name in special if name.encode() in ranks), None):
        raise UserError(place, f"has {twice} as a special token and as a token of texts", todo)
    inner = byte_pairs(place, ranks, pattern, first=special)
    inner.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return inner, {
        **{role: name for role, name in roles.items() if name in special},
        "add_bos_token": "<s>" in special,
        **config,
    }
