"""Tensor, context and pipeline parallelism of the code model, and the collectives they use."""
