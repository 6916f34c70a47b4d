"""Sampling parameters (params.py), logits to tokens (tokens.py), and log-probabilities of prompts.

The package imports nothing, because the gateway uses the parameters without torch.
"""
