"""The server: overhead, time to first token, weight sync, and an ablation of its techniques."""
