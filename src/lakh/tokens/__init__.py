"""Tokens: the tokenizer, token sets on disk, and the deterministic stream that training reads. Independent of torch.

tokenizer/    text to ids and back; training a tokenizer
dataset/      token sets: format, packing a corpus, sequence layout, shuffle order, mixtures, remote reads
loading/      the training stream: position -> sequence, fill-in-the-middle, hash, prefetching
"""
