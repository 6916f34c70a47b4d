"""Text to token ids and back.

tokenizer.py        byte-level BPE on the `tokenizers` package
training.py         train a tokenizer on a corpus
fast_encoder.py     the same encoding, compiled; parallel_encode.py uses it on all cores
detokenizer.py      ids of many texts to bytes
"""

from lakh.tokens.tokenizer.tokenizer import FILE, MADE_BY, NUM_SPECIAL, SPECIAL_TOKENS, Tokenizer, threads

__all__ = ["FILE", "MADE_BY", "NUM_SPECIAL", "SPECIAL_TOKENS", "Tokenizer", "threads"]
