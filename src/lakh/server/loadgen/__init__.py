"""Developers who type, as load: what they ask and when (typing_load.py), sent without waiting for answers
(generator.py, target.py), what came of it (report.py), and the same load with one technique after another
(before_after.py).

A client like any other: knows addresses and nothing of the server's inside. Lives without torch.
"""
