"""Compiled CPU kernels for decode steps: kernels.py (all layers), matmul.py (matrix products)."""
