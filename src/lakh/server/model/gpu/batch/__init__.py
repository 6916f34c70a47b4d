"""Layers for decode batches of a few tokens on Hopper GPUs, as kernels that overlap."""
