"""Prompts as token ids: encoding and truncation (encoder.py), fill in the middle (fim.py), token healing
(token_healing.py) and tokenization that reuses unchanged lines (incremental_tokenizer.py).
"""
