"""Decoding beside transformers and llama.cpp, and the value of speculation."""
