"""Fused training kernels: Triton for NVIDIA GPUs (triton.py), CPUs (cpu.py), 8-bit matrix products (fp8.py)."""
