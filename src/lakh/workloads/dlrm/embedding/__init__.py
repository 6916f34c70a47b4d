"""Embedding tables on one rank: bags of ids, pooled lookups and exact sparse updates.

bags.py          tables in memory (cpu_kernels.py, prefetch.py); jagged.py, bags of ids
cached_bags.py   tables in host memory or files, with a cache of rows (row_cache.py)
gpu_bags.py      tables on a GPU (triton_lookup.py, triton_sort.py, triton_update.py)
"""
