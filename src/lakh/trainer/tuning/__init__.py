"""Choices that depend on the GPU: micro-batch size, CUDA graphs, memory."""
