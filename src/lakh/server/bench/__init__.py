"""Decoding speed beside peers on the same weights: decode.py (transformers; llama.cpp by llama_cpp.py), and what
guesses are worth (speculation.py).
"""
