"""Token sets: a corpus as shards of token ids, and how their tokens form sequences.

shards.py       the files on disk, and their writer        packing.py    corpus to token set
token_set.py    one split, opened for reading              remote.py     shards on an object store
layout.py       documents to sequences                     shuffle.py    the order of sequences in each epoch
mixture.py      several token sets as one
"""
