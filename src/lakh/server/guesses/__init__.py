"""Guesses that pay: what follows, looked up in the request's own text or drafted by a smaller model (speculate.py,
draft.py), when it is worth it (guesser.py), and which guesses stay so that answers keep their distribution
(rejection.py). The engine asks for guesses before a step and tells what became of them after it.
"""
