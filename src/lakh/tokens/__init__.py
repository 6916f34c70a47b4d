"""Tokens: a tokenizer, a corpus packed into shards of ids, and the stream that training reads from them.

To read the room: tokenizer.py (text to ids), learn.py (a corpus to a tokenizer), shards.py (the bytes on disk),
packing.py (corpus to shards), order.py (the stream as a function of one integer), prefetch.py, loader.py (rows of
training data). Lives without torch.
"""
