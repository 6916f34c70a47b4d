"""Programs that try to pass a test without its answers, or to spoil the verdicts of programs after them.

attacks.toml    attacks in Python and completions in other languages
scripts.toml    attacks as shell scripts, and how a program of each language runs one
programs.toml   an honest program of each language of MultiPL-E
suite.py        attacks as programs for a sandbox; standard library only, so that any Python can run them
table.py        runs them in each way and counts what passed
"""
