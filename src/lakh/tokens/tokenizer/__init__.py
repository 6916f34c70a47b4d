"""Text to token ids and back.

tokenizer.py        any tokenizer.json, on the `tokenizers` package
special_tokens.py   which tokens end a text, begin one, or mark a fill-in-the-middle prompt
folders/            the tokenizer of a folder without tokenizer.json
pre_tokenizers.py   how published models split texts
training.py         train a tokenizer on a corpus
fast_encoder.py     the same encoding, compiled; parallel_encode.py uses it on all cores
detokenizer.py      ids of many texts to bytes
"""

from lakh.tokens.tokenizer.folders import convert
from lakh.tokens.tokenizer.special_tokens import FimTokens
from lakh.tokens.tokenizer.tokenizer import FILE, MADE_BY, NUM_SPECIAL, SPECIAL_TOKENS, Tokenizer, threads

__all__ = ["FILE", "MADE_BY", "NUM_SPECIAL", "SPECIAL_TOKENS", "FimTokens", "Tokenizer", "convert", "threads"]
