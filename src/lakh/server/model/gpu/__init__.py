"""Steps on a GPU as captured graphs (graphs.py): one token for each row (decode.py), or any few tokens of any rows
(chunks.py), through the same layers (layers.py) and kernels (kernels.py, Triton). Only runner.py and
benchmarks come here.
"""
