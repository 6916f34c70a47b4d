"""CUDA kernels for Hopper GPUs, compiled when they are first used: the compiler (nvrtc.py) and descriptors of tiles in
global memory (tensor_map.py) for kernels of the trainer and the server, and the product of 8-bit integers
(int8_product.py)."""
