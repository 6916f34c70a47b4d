"""Checkpoints of a real training state, beside torch's distributed checkpoint of the same state in the same run."""
