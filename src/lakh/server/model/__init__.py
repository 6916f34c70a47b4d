"""A model at work: what MODEL is (weights.py), the network over a ragged batch (network.py, attention.py), the blocks
that remember keys and values (blocks.py, kv.py), and the fastest way to run a step (runner.py): compiled kernels on the
CPU (kernels_cpu.py), captured graphs on a GPU (gpu/), several processes that share the layers (tensor_parallel.py).

Knows tokens and places; knows nothing of requests, text or sampling.
"""
