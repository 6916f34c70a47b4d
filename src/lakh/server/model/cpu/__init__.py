"""Compiled CPU kernels for decode steps: kernels.py (a whole step), matmul.py (matrix products)."""
