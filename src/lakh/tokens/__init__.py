"""Tokens: a tokenizer, a corpus packed into shards of ids, and the stream that training reads from them.

To read the room: tokenizer.py (text to ids), fast.py and encode.py (the same, compiled and on all cores), learn.py (a
corpus to a tokenizer), shards.py (the bytes on disk), packing.py (corpus to shards), token_set.py and remote.py (shards
opened, near or far); then the stream as a function of one integer: skips.py, mixture.py, order.py, layout.py, fim.py,
loader.py (all of them together), digest.py (its hash), ahead.py (read by a process of its own). Lives without torch.
"""
