"""Compiled CPU kernels: kernels.py (all layers of a decode step), matmul.py (its products), decoder.py (all layers with
quantized weights), quantized.py (weights of 8 and 4 bits), large_pages.py (their memory), native.py (the compiled
library)."""
