"""Files of a run beside its events.

evaluations.py      scores of a run, with samples and verdicts
training_data.py    the token set and corpus of a run
tags.py             names that people gave the run
"""
