"""Small tokenizers as the keys of a GGUF file, and text that is hard to split."""

from __future__ import annotations

import json
import random
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

PARTS = [
    "  ",
    "    ",
    " ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "def ",
    "xY",
    "I'll",
    "it's",
    "WE'VE",
    "foo_Bar",
    "HTTPServer",
    "3.14",
]
PARTS += [
    "12345",
    " 7",
    " ==",
    " //",
    "éa",
    " ДА",
    "日本",
    "가나",
    "…",
    "—",
    "“",
    "！",
    "~~",
    "$x",
    "🙂",
    "\u200d",
    "\u3000",
    "\u00a0",
]
SPECIAL = [
    "<|endoftext|>",
    "<|im_end|>",
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    "<|file_sep|>",
    "<|im_start|>",
]


def soup(count: int, seed: int) -> str:
    draw = random.Random(seed)
    return "".join(draw.choice(PARTS) for _ in range(count))


def byte_level_settings() -> dict[str, Any]:
    """A vocabulary whose tokens cross every boundary of a pre-tokenizer: a missing split gives other ids."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False, max_token_length=8
    )
    made.train_from_iterator([soup(40, seed) for seed in range(100)], trainer)
    description = json.loads(made.to_str())
    vocab = description["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = [" ".join(merge) for merge in description["model"]["merges"]]
    kinds = [3 if token in SPECIAL else 1 for token in tokens]
    return {"model": "gpt2", "tokens": tokens, "token_type": kinds, "merges": merges, "eos_token_id": 0}


def sentence_piece_settings() -> dict[str, Any]:
    """Llama's kind of vocabulary, with fill-in-the-middle tokens and those of Gemma's chats."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *SPECIAL[2:5],
        "<start_of_turn>",
        "<end_of_turn>",
        "<|file_separator|>",
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=tokens, show_progress=False, max_token_length=8, limit_alphabet=50
    )
    made.train_from_iterator([soup(40, seed) for seed in range(60)], trainer)
    vocab = made.get_vocab()
    pieces = sorted(vocab, key=vocab.__getitem__)
    count = len(tokens)
    kinds = [2, 3, 3, *[6] * 256, *[3] * (count - 259), *[1] * (len(pieces) - count)]
    scores = [0.0] * count + [-float(number) for number in range(len(pieces) - count)]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {"model": "llama", "tokens": pieces, "token_type": kinds, "scores": scores, **ids}
