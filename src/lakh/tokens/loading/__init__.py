"""The training stream: the tokens of any position, on any number of ranks, after any number of restarts.

stream.py      position -> sequence of tokens           prefetch.py    read ahead in a child process
skips.py       sequences that training skips            digest.py      hash of the stream, in any order
fim.py         fill-in-the-middle
"""
