"""New weights for a running engine: from a run's checkpoints (follow.py) or from a trainer over collectives
(transfer.py).
"""
