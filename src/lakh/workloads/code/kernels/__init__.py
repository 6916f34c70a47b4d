"""Fused training kernels: Triton for NVIDIA GPUs (triton.py), CPUs (cpu.py), 8-bit matrix products (eight_bit/),
grouped products of experts (experts.py, with Triton kernels in triton_experts.py), matrices with adapters
(low_rank.py), blocks of them (low_rank_block.py), and CUDA kernels for Hopper GPUs (cuda/)."""
