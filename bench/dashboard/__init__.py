"""The dashboard on large runs: a generator of synthetic events, and the time from opening a run to its curves.

synthetic_events.py   a run of any number of steps and ranks, as lakh train writes it
command.py            lakh bench dashboard
"""
