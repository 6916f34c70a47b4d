"""Scores from verdicts, and what is done with results.

score.py      unbiased pass@k and its interval          protocol.py   the line that describes how a score was made
compare.py    whether two results differ significantly  reproduce.py  the same result again, from its protocol
"""
