"""Deduplication: which copy of a document stays.

nodes.py (document keys that sort the preferred copy first), minhash.py (signatures), near.py (candidate pairs and their
similarity), components.py (groups of near copies), steps.py (the steps that an engine runs).
"""
