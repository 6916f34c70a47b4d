"""Running a model: weights.py (loading), inference.py (the network over a ragged batch), paged_attention.py,
kv_cache.py and block_pool.py (the paged KV cache with prefix sharing), runner.py (the fastest way to run a step):
compiled kernels on the CPU (cpu/), CUDA graphs on a GPU (gpu/), several processes (tensor_parallel.py).

Works on token ids and cache blocks; independent of requests, text and sampling.
"""
